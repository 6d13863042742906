"""How long to wait before asking again after a refusal, or after a machine that came to nothing."""

import time

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 600.0


class Patience:
    """A pause that doubles with every failure, and ends with the first success."""

    def __init__(self) -> None:
        """Nothing has failed."""
        self.trouble = ""
        """The last failure; empty after a success."""
        self._num_failures = 0
        self._until = float("-inf")

    def failed(self, why: str) -> None:
        """Note a failure; the pause begins anew."""
        self.trouble = why
        pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, LAST_PAUSE_S)
        self._until = time.monotonic() + pause_s
        self._num_failures += 1

    def succeeded(self) -> None:
        """Note that a machine has come."""
        self.__init__()

    def is_over(self) -> bool:
        """Whether it may be tried again."""
        return time.monotonic() >= self._until
