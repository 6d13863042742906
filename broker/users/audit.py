"""Writes down what touches security, in streams from which nothing can be deleted.

What was done has one stream, what was refused another, so that nobody's refusals push out what was
done. Refusals are bounded for each who is refused and for all together; the next one that is
written says how many were left out. Every text is cut: a name may be anything that somebody sends.
"""

import time

import structlog

from ...schemas.user import AuditRecord
from ...schemas.wire.errors import TinkermqError
from ...schemas.wire.subjects import AUDIT, REFUSALS, STREAM_AUDIT, STREAM_REFUSALS
from ..client.connection import Broker
from ..fair_queue import Rates
from ..jetstream.direct_get import get_batch
from ..jetstream.streams import StreamConfig, stream_config, stream_info

AUDIT_BYTES, REFUSALS_BYTES = 256 << 20, 64 << 20
MAX_REFUSALS = 60
"""Of all together at once; as many in each minute in the long run."""
MAX_REFUSALS_OF_ONE = 20
_MINUTE_S = 60.0
_NAME_CHARS, _TEXT_CHARS = 64, 300
_DEADLINE_S = 10.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def audit_configs() -> list[StreamConfig]:
    """Return the streams of what touches security: nothing in them can be deleted or purged.

    What was refused has one of its own, so that it pushes nothing out that was done.
    """
    kept = {"deny_delete": True, "deny_purge": True}
    done, refused = (
        "What was done to users, and by admins to others",
        "What was refused, and to whom",
    )
    return [
        stream_config(STREAM_AUDIT, done, [AUDIT], AUDIT_BYTES, **kept),
        stream_config(STREAM_REFUSALS, refused, [REFUSALS], REFUSALS_BYTES, **kept),
    ]


class Audit:
    """The audit; what is refused is bounded, so that nobody can fill it."""

    def __init__(self, broker: Broker) -> None:
        """Write with this connection."""
        self._broker = broker
        self._refusals = Rates(MAX_REFUSALS / _MINUTE_S, MAX_REFUSALS)
        self._refusals_of = Rates(MAX_REFUSALS_OF_ONE / _MINUTE_S, MAX_REFUSALS_OF_ONE)

    async def write(
        self, who: str, what: str, *, target: str = "", outcome: str = "done", detail: str = ""
    ) -> None:
        """Append a record of what was done; what cannot be written is logged."""
        await self._append(AUDIT, who, what, target, outcome, detail)

    async def refused(
        self, who: str, what: str, why: str, detail: str = "", *, target: str = ""
    ) -> None:
        """Append what was refused; beyond the bounds it is only counted."""
        now = time.monotonic()
        of_one = self._refusals_of.take(who[:_NAME_CHARS], now)
        if of_one is None:
            return
        of_all = self._refusals.take("", now)
        if of_all is None:
            return
        if of_one + of_all:
            detail = f"{detail}; {of_one + of_all} more were left out before".lstrip("; ")
        await self._append(REFUSALS, who, what, target, why, detail)

    async def _append(
        self, subject: str, who: str, what: str, target: str, outcome: str, detail: str
    ) -> None:
        record = AuditRecord(
            who=_cut(who, _NAME_CHARS),
            what=_cut(what, _NAME_CHARS),
            target=_cut(target, 2 * _NAME_CHARS),
            outcome=_cut(outcome, _TEXT_CHARS),
            detail=_cut(detail, _TEXT_CHARS),
            time=time.time(),
        )
        _log.info("audit", **record.model_dump(exclude={"time"}))
        try:
            await self._broker.append(
                subject, record.to_bytes(), deadline_s=_DEADLINE_S, waiting_for="the audit stream"
            )
        except TinkermqError as error:
            _log.error("audit_failed", error=error.message)

    async def last(self, limit: int) -> list[AuditRecord]:
        """Return the newest records of both kinds, newest first."""
        found = await self._last(STREAM_AUDIT, AUDIT, limit)
        found += await self._last(STREAM_REFUSALS, REFUSALS, limit)
        return sorted(found, key=lambda record: record.time, reverse=True)[:limit]

    async def _last(self, stream: str, subject: str, limit: int) -> list[AuditRecord]:
        state = (await stream_info(self._broker, stream))["state"]
        last = int(state["last_seq"])
        found: list[AuditRecord] = []
        seq = max(int(state["first_seq"]), last - limit + 1, 1)
        while seq <= last:
            messages, more = await get_batch(self._broker, stream, seq, subject)
            found += [AuditRecord.from_bytes(message.payload) for message in messages]
            if not more or not messages:
                break
            seq = messages[-1].seq + 1
        return found


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
