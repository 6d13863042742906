"""How busy the cores of this machine are, by the kernel's counters."""

from pathlib import Path

_IDLE = (3, 4)
"""Columns of time in which a core did nothing: idle, and waiting for a disk."""
_COUNTED = 8


class CoreUse:
    """Measures the share of busy core time from one look to the next."""

    def __init__(self, source: Path = Path("/proc/stat")) -> None:
        self._source = source
        self._last = self._read()

    def look(self) -> float:
        """Return the busy share since the last look, 0 to 1; 0 where nothing tells it."""
        now, last = self._read(), self._last
        self._last = now
        spent = [new - old for new, old in zip(now, last, strict=False)]
        total = sum(spent)
        return 1 - sum(spent[column] for column in _IDLE) / total if total > 0 else 0.0

    def _read(self) -> list[int]:
        """Return the ticks of all cores by kind; none on a system without such counters."""
        try:
            first = self._source.read_text().partition("\n")[0].split()
        except OSError:
            return []
        return [int(ticks) for ticks in first[1 : 1 + _COUNTED]]
