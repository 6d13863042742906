"""When a crashed actor is started again, and when no more. Pure: time comes from the caller.

An actor that fails too often within the window is given up; so is one that fails too often without
having finished a piece of work in between, however long that takes. A deadline that passes again
and again would else look like health for ever.
"""

WINDOW_S = 600.0
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0


class Backoff:
    """Counts an actor's failures: each doubles the delay, too many are final."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_failures = 0
        self.num_fruitless = 0
        """Failures in a row of processes that finished no piece of work."""
        self._recent: list[float] = []

    @property
    def is_hasty(self) -> bool:
        """Whether the failures within the window are too many."""
        return len(self._recent) > self.max_restarts

    def after_failure(self, now: float, *, progress: bool | None = False) -> float | None:
        """Return the seconds to wait before the next start, or None if there shall be none.

        `progress` says whether the process had finished a piece of work; None: nobody knows.
        """
        self.num_failures += 1
        if progress is not None:
            self.num_fruitless = 0 if progress else self.num_fruitless + 1
        self._recent = [time for time in self._recent if now - time < WINDOW_S] + [now]
        if self.is_hasty or self.num_fruitless > self.max_restarts:
            return None
        return min(FIRST_DELAY_S * 2 ** (len(self._recent) - 1), MAX_DELAY_S)
