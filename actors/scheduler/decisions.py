"""How long the scheduler's decisions take."""

from collections import deque

_KEPT = 4096


class DecisionTimes:
    """The times of the last decisions over the whole queue."""

    def __init__(self) -> None:
        """Have timed none."""
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float) -> None:
        """Note the time that a decision took of the event loop's thread."""
        self._seconds.append(seconds)

    def numbers(self) -> dict[str, float]:
        """Return what the heartbeat tells: milliseconds, median and 99th percentile."""
        times = sorted(self._seconds)
        if not times:
            return {}
        ranks = {"p50": 0.5, "p99": 0.99}
        return {
            f"decision_ms_{name}": 1000 * times[min(int(rank * len(times)), len(times) - 1)]
            for name, rank in ranks.items()
        }
