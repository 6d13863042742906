"""How long a scheduler waits for what."""

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
