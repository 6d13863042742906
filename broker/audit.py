"""Writes down what touches security, in a stream from which nothing can be deleted."""

import time

import structlog

from ..schemas.errors import TinkermqError
from ..schemas.subjects import AUDIT, STREAM_AUDIT
from ..schemas.user import AuditRecord
from .connection import Broker
from .stored import get_batch
from .streams import stream_info

MAX_REFUSALS = 60
WINDOW_S = 60.0
_DEADLINE_S = 10.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Audit:
    """The audit stream; what is refused is bounded, so that nobody can fill it."""

    def __init__(self, broker: Broker) -> None:
        """Write with this connection."""
        self._broker = broker
        self._refusals = Bound(MAX_REFUSALS, WINDOW_S)

    async def write(
        self, who: str, what: str, *, target: str = "", outcome: str = "done", detail: str = ""
    ) -> None:
        """Append a record; what cannot be written is logged."""
        record = AuditRecord(
            who=who, what=what, target=target, outcome=outcome, detail=detail, time=time.time()
        )
        _log.info("audit", **record.model_dump(exclude={"time"}))
        try:
            await self._broker.append(
                AUDIT, record.to_bytes(), deadline_s=_DEADLINE_S, waiting_for="the audit stream"
            )
        except TinkermqError as error:
            _log.error("audit_failed", error=error.message)

    async def last(self, limit: int) -> list[AuditRecord]:
        """Return the newest records, newest first."""
        state = (await stream_info(self._broker, STREAM_AUDIT))["state"]
        last = int(state["last_seq"])
        found: list[AuditRecord] = []
        seq = max(int(state["first_seq"]), last - limit + 1, 1)
        while seq <= last:
            messages, more = await get_batch(self._broker, STREAM_AUDIT, seq, AUDIT)
            found += [AuditRecord.from_bytes(message.payload) for message in messages]
            if not more or not messages:
                break
            seq = messages[-1].seq + 1
        return found[::-1]

    async def refused(self, who: str, what: str, why: str, detail: str = "") -> None:
        """Append a refused log-in or request; beyond the bound they are only counted."""
        left_out = self._refusals.take(time.monotonic())
        if left_out is None:
            return
        if left_out:
            detail = f"{detail}; {left_out} more were left out before".lstrip("; ")
        await self.write(who, what, outcome=why, detail=detail)


class Bound:
    """Lets `max_events` through in each window and counts the others. Pure: time is given."""

    def __init__(self, max_events: int, window_s: float) -> None:
        self._max_events = max_events
        self._window_s = window_s
        self._started = float("-inf")
        self._num = self._left_out = 0

    def take(self, now: float) -> int | None:
        """Return None for an event over the bound, else how many were before it."""
        if now - self._started >= self._window_s:
            self._started, self._num = now, 0
        if self._num >= self._max_events:
            self._left_out += 1
            return None
        self._num += 1
        left_out, self._left_out = self._left_out, 0
        return left_out
