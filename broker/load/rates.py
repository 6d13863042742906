"""How often something may happen, for each of many keys. Pure: time is given."""

from collections import OrderedDict

MAX_KEYS = 10_000


class Rates:
    """Lets `burst` events of a key through at once, and `per_s` of them in the long run."""

    def __init__(self, per_s: float, burst: int, *, max_keys: int = MAX_KEYS) -> None:
        """Know no key; of more than `max_keys` those heard of least lately are forgotten."""
        self._per_s = per_s
        self._burst = burst
        self._max_keys = max_keys
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._left_out: dict[str, int] = {}

    @property
    def num_keys(self) -> int:
        """How many keys are remembered."""
        return max(len(self._left), len(self._left_out))

    def take(self, key: str, now: float) -> int | None:
        """Return None for an event over the bound, else how many of its key were before it."""
        left, since = self._left.pop(key, (float(self._burst), now))
        left = min(left + (now - since) * self._per_s, float(self._burst))
        allowed = left >= 1
        self._left[key] = (left - 1 if allowed else left, now)
        if len(self._left) > self._max_keys:
            gone, _ = self._left.popitem(last=False)
            self._left_out.pop(gone, None)
        if not allowed:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return None
        return self._left_out.pop(key, 0)
