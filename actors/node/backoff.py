"""When a crashed actor is started again, and when no more. Pure: time comes from the caller."""

WINDOW_S = 600.0
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0


class Backoff:
    """Counts an actor's failures: each doubles the delay, too many within the window are final."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.num_failures = 0
        self._recent: list[float] = []

    def after_failure(self, now: float) -> float | None:
        """Return the seconds to wait before the next start, or None if there shall be none."""
        self.num_failures += 1
        self._recent = [time for time in self._recent if now - time < WINDOW_S] + [now]
        if len(self._recent) > self.max_restarts:
            return None
        return min(FIRST_DELAY_S * 2 ** (len(self._recent) - 1), MAX_DELAY_S)
