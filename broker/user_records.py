"""Users: stored in a KV bucket that only the auth service writes.

The scheduler reads a user's quota here (`UserStore.get`); a pool without authentication has no such
bucket, and `get` returns None.
"""

import time
from collections.abc import Callable

import structlog

from ..schemas.user import AuditRecord, UserRecord
from ..schemas.wire import subjects
from ..schemas.wire.errors import NotFoundError, TinkermqError
from .client.connection import Broker
from .client.fair_queue import Rates
from .jetstream.direct_get import get_batch
from .jetstream.kv import Bucket
from .jetstream.streams import (
    StreamConfig,
    bucket_config,
    ensure_stream,
    stream_config,
    stream_info,
)

USER = "user"


async def create_user_stores(broker: Broker) -> None:
    """Make the bucket of users and the audit streams; harmless when they exist."""
    await ensure_stream(broker, bucket_config(subjects.BUCKET_USERS, "Users, by hash of their key"))
    for config in audit_configs():
        await ensure_stream(broker, config)


class UserStore:
    """The users of a pool."""

    def __init__(self, broker: Broker) -> None:
        """Work on the bucket that `create_user_stores` has made."""
        self._users = Bucket(broker, subjects.BUCKET_USERS, UserRecord)

    async def get(self, user: str) -> UserRecord | None:
        """Return a user, or None, also in a pool without users."""
        try:
            entry = await self._users.find(f"{USER}.{user}")
        except NotFoundError:
            return None
        return None if entry is None else entry.value

    async def list(self) -> list[UserRecord]:
        """Return all users, by name."""
        return [entry.value for entry in await self._users.items(USER)]

    async def create(self, record: UserRecord) -> None:
        """Make a user; raises ConflictError when the name is taken."""
        await self._users.create(f"{USER}.{record.user}", record)

    async def change(self, user: str, change: Callable[[UserRecord], UserRecord]) -> UserRecord:
        """Replace a user's record by `change` of it; raises NotFoundError."""

        def changed(current: UserRecord | None) -> UserRecord:
            if current is None:
                raise NotFoundError(
                    f"there is no user {user!r}", hint="list the users: `tinkermq user list`"
                )
            return change(current)

        return (await self._users.change(f"{USER}.{user}", changed)).value


# The audit log: accepted actions in one stream, refusals in another, so that refusals never push
# out actions. Refusals are limited per user and in all; the next record of a refusal has the number
# of those left out. Every text is cut.

AUDIT_BYTES, REFUSALS_BYTES = 256 << 20, 64 << 20
MAX_REFUSALS = 60
"""Bound on a burst of refusals of all users, and on their number per minute in the long run."""
MAX_REFUSALS_OF_ONE = 20
_MINUTE_S = 60.0
_NAME_CHARS, _TEXT_CHARS = 64, 300
_DEADLINE_S = 10.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def audit_configs() -> list[StreamConfig]:
    """Return the audit streams; their records cannot be deleted or purged.

    Refusals have a stream of their own, so that they never push out actions.
    """
    protection = {"deny_delete": True, "deny_purge": True}
    done, refused = (
        "What was done to users, and by admins to others",
        "Refused requests, with their senders",
    )
    return [
        stream_config(subjects.STREAM_AUDIT, done, [subjects.AUDIT], AUDIT_BYTES, **protection),
        stream_config(
            subjects.STREAM_REFUSALS, refused, [subjects.REFUSALS], REFUSALS_BYTES, **protection
        ),
    ]


class Audit:
    """Writes and reads the audit log; refusals are bounded, so that no user can fill it."""

    def __init__(self, broker: Broker) -> None:
        """Write with this connection."""
        self._broker = broker
        self._refusals = Rates(MAX_REFUSALS / _MINUTE_S, MAX_REFUSALS)
        self._refusals_of = Rates(MAX_REFUSALS_OF_ONE / _MINUTE_S, MAX_REFUSALS_OF_ONE)

    async def write(
        self, who: str, what: str, *, target: str = "", outcome: str = "done", detail: str = ""
    ) -> None:
        """Append a record of an action; failures to write are logged."""
        await self._append(subjects.AUDIT, who, what, target, outcome, detail)

    async def refused(
        self, who: str, what: str, why: str, detail: str = "", *, target: str = ""
    ) -> None:
        """Append a refusal; beyond the bounds it is only counted."""
        now = time.monotonic()
        of_one = self._refusals_of.take(who[:_NAME_CHARS], now)
        if of_one is None:
            return
        of_all = self._refusals.take("", now)
        if of_all is None:
            return
        if of_one + of_all:
            detail = f"{detail}; {of_one + of_all} more were left out before".lstrip("; ")
        await self._append(subjects.REFUSALS, who, what, target, why, detail)

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
        records = await self._last(subjects.STREAM_AUDIT, subjects.AUDIT, limit)
        records += await self._last(subjects.STREAM_REFUSALS, subjects.REFUSALS, limit)
        return sorted(records, key=lambda record: record.time, reverse=True)[:limit]

    async def _last(self, stream: str, subject: str, limit: int) -> list[AuditRecord]:
        state = (await stream_info(self._broker, stream))["state"]
        last = int(state["last_seq"])
        records: list[AuditRecord] = []
        seq = max(int(state["first_seq"]), last - limit + 1, 1)
        while seq <= last:
            messages, more = await get_batch(self._broker, stream, seq, subject)
            records += [AuditRecord.from_bytes(message.payload) for message in messages]
            if not more or not messages:
                break
            seq = messages[-1].seq + 1
        return records


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
