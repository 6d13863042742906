"""How long a scheduler waits for what."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A scheduler's clocks, in seconds; tests run them faster."""

    turn_s: float = 0.5
    """Between two looks at all jobs, when nothing calls for one at once."""
    hurries: bool = True
    """Whether a change calls for a look at once."""
    renew_s: float = 1.0
    """Between two renewals of the lease."""
    stale_s: float = 3.0
    """A lease that stood still for this long may be taken over."""
    aging_s: float = 3600.0
    """A wait of so long counts as one more point of priority."""
    silent_s: float = 10.0
    """A node that was not heard of for this long has left."""
    sync_s: float = 2.0
    """A node has this long to answer a request."""
    resync_s: float = 5.0
    """Between two requests to a node that does what it shall."""


# How long the scheduler's decisions take.

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
