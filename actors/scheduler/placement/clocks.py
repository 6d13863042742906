"""How far the clock of a node is off, as seen over a request and its answer. Pure.

The node says what its clock shows when it answers, which was at some time between the request and
the arrival of the answer. The middle of both is taken (as NTP does, RFC 5905 section 8), and the
answer that came back soonest counts, for as long as it is recent: it leaves the least doubt.

Nothing is decided by it: leases, heartbeats and silence are counted by each process's own monotonic
clock. What people read, order and bill goes by the clocks of machines.
"""

from dataclasses import dataclass

RECENT_S = 60.0
"""An answer counts for so long, if none came back sooner."""


@dataclass(frozen=True)
class ClockReading:
    """What one answer told of a clock."""

    ahead_s: float
    """How far it is ahead of one's own, seconds."""
    within_s: float
    """By how much that may be wrong, either way."""
    at: float
    """When it was read, by the monotonic clock."""

    @property
    def surely_ahead_s(self) -> float:
        """How far it is ahead at least; negative where it is behind, 0 where one cannot tell."""
        least = max(abs(self.ahead_s) - self.within_s, 0.0)
        return least if self.ahead_s > 0 else -least


def reading(shown: float, asked: float, took_s: float, at: float) -> ClockReading:
    """Return what is known of a clock that showed `shown` in an answer.

    It was asked for when one's own showed `asked`, and came `took_s` later.
    """
    return ClockReading(shown - asked - took_s / 2, took_s / 2, at)


def better(known: ClockReading | None, new: ClockReading) -> ClockReading:
    """Return which of two readings counts."""
    if known is None or new.within_s <= known.within_s or new.at - known.at > RECENT_S:
        return new
    return known
