"""Whether the broker is there, for how long it was, and who waits for it.

Waiting for the broker is not a failure of whoever waits. A connection that is *patient* (every
actor's, and that of a client that follows a run) waits for as long as it takes: its clock, by which
its deadlines are counted, stands still while the broker is away, and what the broker does not
answer or has no room for is asked again. Who waits says so: in the log, and by `trouble`, which
heartbeats carry. A connection that is not patient gives up at its deadlines.
"""

import asyncio
import time
from typing import NamedTuple

import structlog

TOLD_AFTER_S = 5.0
_TOLD_EVERY_S = 60.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Trouble(NamedTuple):
    """A wait that has lasted for long although the connection is up."""

    text: str
    """For what, and what may be wrong."""
    since: float
    """Seconds since the epoch."""


class Availability:
    """The state of one connection as those see it who wait for it."""

    def __init__(self) -> None:
        """Be away and not patient."""
        self.is_patient = False
        self.outlasts_refusal = False
        """Whether a refusal after a reconnect is waited out: who checks keys may be away."""
        self.is_connected = False
        self._changed = asyncio.Event()
        self._away_s = 0.0
        self._away_since: float | None = None
        self._came = float("-inf")
        self.unanswered: dict[object, Trouble] = {}
        """What waits have lasted for long although the connection is up."""

    def clock(self) -> float:
        """Return the seconds of the loop's clock without those a patient connection was away."""
        now = time.monotonic()
        return (now if self._away_since is None else self._away_since) - self._away_s

    def came(self) -> None:
        """Take notice that the connection is up."""
        self._count()
        self._away_since = None
        self.is_connected = True
        self._came = time.monotonic()
        self._changed.set()

    def went(self) -> None:
        """Take notice that the connection is lost."""
        self.is_connected = False
        if self.is_patient and self._away_since is None:
            self._away_since = time.monotonic()
        self._changed.set()

    def up_for(self, seconds: float) -> bool:
        """Whether it is so long that the connection last came up."""
        return time.monotonic() - self._came > seconds

    def set_patient(self, patient: bool) -> None:
        """Wait for the broker for as long as it takes, or from now on by the deadlines."""
        self._count()
        self.is_patient = patient
        self._away_since = time.monotonic() if patient and not self.is_connected else None
        self._changed.set()

    def wake(self) -> None:
        """Let those who wait look again: the connection is closed for good."""
        self._changed.set()

    async def wait(self, deadline: float, is_over: "asyncio.Event") -> None:
        """Wait until the connection is up or closed for good; TimeoutError at `deadline`.

        The deadline is one of `clock`: a patient connection has none while the broker is away.
        """
        while not self.is_connected and not is_over.is_set():
            self._changed.clear()
            left_s = None if self.is_patient else deadline - self.clock()
            async with asyncio.timeout(left_s):
                await self._changed.wait()

    @property
    def trouble(self) -> Trouble | None:
        """Say what the broker does not do; None while all is well, and while it is away."""
        return next(iter(self.unanswered.values()), None) if self.is_connected else None

    def _count(self) -> None:
        if self._away_since is not None:
            self._away_s += time.monotonic() - self._away_since
            self._away_since = None


class Unanswered:
    """One wait for an answer that does not come although the connection is up."""

    def __init__(self, availability: Availability, waiting_for: str) -> None:
        self._availability = availability
        self._waiting_for = waiting_for
        self._since: float | None = None
        self._next_word = 0.0

    def __enter__(self) -> "Unanswered":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._availability.unanswered.pop(self, None) is not None:
            _log.info("broker_wait_over", waited_for=self._waiting_for)

    def note(self, why: str) -> None:
        """Take notice of one more attempt that came to nothing, and say so now and then."""
        now = time.monotonic()
        if self._since is None or not self._availability.is_connected:
            self._since, self._next_word = now, now + TOLD_AFTER_S
        elif now >= self._next_word:
            self._next_word = now + _TOLD_EVERY_S
            since = time.time() - (now - self._since)
            self._availability.unanswered[self] = Trouble(f"{self._waiting_for}: {why}", since)
            _log.warning("broker_does_not_answer", waiting_for=self._waiting_for, reason=why)
