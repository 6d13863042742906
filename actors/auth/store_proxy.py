"""Check guests' reads and writes of JetStream, and forward them.

A guest cannot use JetStream directly, because a request also names the subject of its answer. Here
a request's subject names the caller (the broker enforces it) and the operation; the request is
rewritten and sent to JetStream with the guest's inbox as reply subject, so that the answer, however
large, goes from the server directly to the guest.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import structlog
from cachetools import TTLCache
from nats.aio.msg import Msg

from ...broker.client.connection import Broker
from ...broker.client.fair_queue import DEFAULT_BOUND, FairQueue
from ...broker.client.faults import ConnectionLost
from ...broker.client.nats_internals import (
    DESCRIPTION,
    EXPECTED_SEQ,
    FORBIDDEN,
    MESSAGE_ID,
    NO_RESPONDERS,
    NO_STREAM,
    OPERATION,
    STATUS,
    TTL,
    WRITE_ID,
)
from ...broker.client.replies import Listening
from ...broker.client.rpc import INBOXES
from ...broker.jetstream.kv import Mirror
from ...broker.jetstream.streams import PRESENCE_BYTES, stream_info, stream_subjects
from ...broker.jobs import JobStore
from ...broker.permissions import Guest, is_stream_of, may_read, may_store
from ...broker.user_records import USER, Audit
from ...schemas.job import JobRecord
from ...schemas.user import UserRecord
from ...schemas.wire import errors
from ...schemas.wire.codec import read_json
from ...schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_EVALS,
    BUCKET_USERS,
    PREFIX,
    acting,
    caller_of_rpc,
    rpc,
)
from ...schemas.wire.trace import TRACEPARENT

# Users in memory, for cheap look-ups of quotas.
#
# Logins read the record itself (`callout.py`); changes arrive here a moment later.

_RETRY_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class UserCache:
    """A copy of the users' records, a moment old."""

    def __init__(self, broker: Broker) -> None:
        """Start without users; `open` reads them."""
        self._mirror = Mirror(broker, BUCKET_USERS, UserRecord, prefix=USER)
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listen for changes and read everything."""
        await self._mirror.open(self._changed.set)
        await self._mirror.refresh()

    async def close(self) -> None:
        """Stop listening."""
        await self._mirror.close()

    async def run(self) -> None:
        """Read changes, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._mirror.refresh()
            except (errors.BrokerError, errors.DeadlineError) as error:
                _log.warning("users_not_read", error=error.message)
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    def get(self, user: str) -> UserRecord | None:
        """Return a user, or None."""
        entry = self._mirror.entries.get(f"{USER}.{user}")
        return None if entry is None else entry.value

    def requests(self, user: str) -> int | None:
        """Return how many requests of a user may run at once."""
        record = self.get(user)
        return DEFAULT_BOUND if record is None else record.max_requests


# -- bounds of the buckets that all users share ----------------------------------------------------

ASKED_BYTES = 4 << 10
"""Largest request of a user for an evaluation; the job's own processes write its result."""
_COUNTED_S = 30.0
_KNOWN_S = 5.0
_MAX_KNOWN = 10_000


class StorageBounds:
    """Checks whether there is room for a guest's message."""

    def __init__(self, broker: Broker, known: UserCache) -> None:
        """Count through this connection; quotas are those of `known` users."""
        self._broker = broker
        self._known = known
        self._jobs = JobStore(broker)
        self._keys: TTLCache[str, set[str], float] = TTLCache(
            _MAX_KNOWN, _COUNTED_S, time.monotonic
        )
        self._records: TTLCache[tuple[str, str], JobRecord, float] = TTLCache(
            _MAX_KNOWN, _KNOWN_S, time.monotonic
        )

    async def check(self, guest: Guest, subject: str, num_bytes: int) -> None:
        """Raise MessageError, NotFoundError or QuotaError if a guest may not add the message."""
        parts = subject.split(".")
        if parts[0] != "$KV":
            return
        bucket, user, job, name = parts[1], parts[2], parts[3], parts[4]
        most = {BUCKET_EVALS: ASKED_BYTES, BUCKET_ACTORS: PRESENCE_BYTES // 2}[bucket]
        if num_bytes > most:
            raise errors.MessageError(
                f"{num_bytes:,} bytes for {subject}, where {most:,} may be stored"
            )
        record = await self._record(user, job)
        if bucket == BUCKET_ACTORS:
            if not any((actor.name, actor.role) == (name, guest.role) for actor in record.actors):
                raise errors.MessageError(f"job {job} has no {guest.role} of the name {name!r}")
            return
        quota = self._known.get(user)
        bound = quota.max_evaluations if quota is not None else None
        if bound is not None:
            await self._count(user, subject, bound)

    async def _count(self, user: str, subject: str, bound: int) -> None:
        if (keys := self._keys.get(user)) is None:
            mine = f"$KV.{BUCKET_EVALS}.{user}.>"
            keys = set(await stream_subjects(self._broker, f"KV_{BUCKET_EVALS}", mine))
            self._keys[user] = keys
        if subject not in keys and len(keys) >= bound:
            raise errors.QuotaError(
                f"user {user!r} has {len(keys)} evaluations, the quota is {bound}",
                hint="delete old runs (`tinkermq delete`), or ask an admin for more",
            )
        keys.add(subject)

    async def _record(self, user: str, job: str) -> JobRecord:
        """Return the record of a job, up to some seconds old."""
        record = self._records.get((user, job)) or await self._jobs.find_by_id(user, job)
        if record is None:
            raise errors.NotFoundError(f"user {user!r} has no job {job}", hint="submit it first")
        return self._records.setdefault((user, job), record)


_QUEUE = "door"
"""Queue group in which all auth services share the requests."""
_SETTLE_S = 1.0
_MAX_MESSAGES = 1000
_MAX_BYTES = 32 * 2**20
_HEADERS = (EXPECTED_SEQ, TTL, OPERATION, WRITE_ID, TRACEPARENT)
"""Headers that a guest's message keeps; others could do more than store it."""


class StoreProxy:
    """Answers requests below `rpc.<user>.store` and `job.<user>.<job>.store.<role>`."""

    def __init__(
        self,
        requests: Broker,
        broker: Broker,
        audit: Audit,
        bounds: StorageBounds,
        bound: Callable[[str], int | None],
    ) -> None:
        """Receive and forward requests of guests over `requests`; read records through `broker`.

        `bounds` checks guests' additions; `bound` returns how many requests of a user may run at
        once.
        """
        self._requests = requests
        self._broker = broker
        self._audit = audit
        self._bounds = bounds
        self._known: TTLCache[str, bool, float] = TTLCache(_MAX_KNOWN, _KNOWN_S, time.monotonic)
        """Streams that exist."""
        self.share = FairQueue()
        """Requests of guests, who take turns."""
        self.share.bound = bound
        self._listening: list[Listening] = []

    async def open(self) -> None:
        """Listen; several proxies share the requests."""
        subjects = (
            rpc("*", "store", ">"),
            acting("*", "*", "store", ">"),
            f"{PREFIX}.job.*.*.store.>",
        )
        self._listening = [
            await self._requests.listen(subject, self._handle, queue=_QUEUE) for subject in subjects
        ]

    async def close(self) -> None:
        """Stop receiving requests."""
        for item in self._listening:
            await item.stop()
        await self.share.settle(_SETTLE_S)

    def _handle(self, message: Msg) -> None:
        """Answer in the user's turn; drop a request beyond the bound: the guest repeats it."""
        if message.reply.startswith(INBOXES):
            user = message.subject.split(".")[3]
            self.share.submit(user, lambda: self._answer(message), len(message.data))

    async def _answer(self, message: Msg) -> None:
        try:
            guest, verb, rest = read_subject(message.subject)
            if verb == "get":
                await self._get(guest, rest, message)
            elif verb == "info":
                await self._info(guest, rest, message)
            elif verb == "put":
                await self._put(guest, rest, message)
            else:
                raise errors.MessageError(f"the store proxy cannot {verb}")
        except (errors.MessageError, errors.NotFoundError, errors.QuotaError) as error:
            await self._refuse(message, " — ".join(filter(None, (error.message, error.hint))))
        except ConnectionLost:  # dropped with all waiting requests: the guest repeats it
            return
        except (
            errors.TinkermqError
        ) as error:  # the guest's deadline ends it, and the guest repeats it
            _log.warning("store_request_failed", subject=message.subject, error=error.message)

    async def _get(self, guest: Guest, rest: str, message: Msg) -> None:
        stream, _, key = rest.partition(".")
        request = b"" if key else read_request(message.data)
        subject = key or str(json.loads(request).get("next_by_subj", ""))
        if not may_read(guest, stream, subject):
            raise errors.MessageError(f"{guest.user} may not read {subject or 'all'} of {stream}")
        if await self._exists(stream, message):
            place = f"$JS.API.DIRECT.GET.{stream}"
            if key:
                place, request = self._broker.last_get(stream, key)
            await self._requests.send(place, request, reply=message.reply)

    async def _info(self, guest: Guest, stream: str, message: Msg) -> None:
        if guest.job or not is_stream_of(guest.user, stream):
            raise errors.MessageError(f"{guest.user} may not look at {stream}")
        request = _json(message.data) if message.data else {}
        known = {key: request[key] for key in ("subjects_filter", "offset") if key in request}
        payload = json.dumps(known).encode() if known else b""
        await self._requests.send(f"$JS.API.STREAM.INFO.{stream}", payload, reply=message.reply)

    async def _put(self, guest: Guest, subject: str, message: Msg) -> None:
        stream = may_store(guest, subject)
        if stream is None:
            raise errors.MessageError(f"{guest.user} may not store on {subject}")
        await self._bounds.check(guest, subject, len(message.data))
        if await self._exists(stream, message):
            received = message.headers or {}
            headers = {name: received[name] for name in _HEADERS if name in received}
            # the server stores one message of each id
            if MESSAGE_ID in received and is_stream_of(guest.user, stream):
                headers[MESSAGE_ID] = f"{guest.role or 'user'}.{received[MESSAGE_ID]}"
            await self._requests.send(
                subject, message.data, reply=message.reply, headers=headers or None
            )

    async def _exists(self, stream: str, message: Msg) -> bool:
        """Return whether a stream exists; report a missing one to the guest."""
        if stream in self._known:
            return True
        try:
            await stream_info(self._broker, stream)
        except errors.NotFoundError:
            headers = {STATUS: NO_RESPONDERS, NO_STREAM: stream}
            await self._requests.publish(message.reply, b"", headers)
            return False
        self._known[stream] = True
        return True

    async def _refuse(self, message: Msg, why: str) -> None:
        """Refuse in the form of the request: a read, or a call of the API."""
        body = json.dumps({"error": {"code": 403, "err_code": 0, "description": why}}).encode()
        headers = {STATUS: FORBIDDEN, DESCRIPTION: " ".join(why.split())}
        await self._requests.publish(message.reply, body, headers)
        await self._audit.refused(caller_of_rpc(message.subject), "store", why)


def read_subject(subject: str) -> tuple[Guest, str, str]:
    """Return user, request and stream; raises MessageError."""
    parts = subject.split(".")
    if parts[2] == "rpc":
        guest, rest = Guest(parts[3]), parts[5:]
    elif parts[2] == "as":
        guest, rest = Guest(parts[4]), parts[6:]
    else:
        guest, rest = Guest(parts[3], parts[4], parts[6]), parts[7:]
    if len(rest) < 2:
        raise errors.MessageError(f"{subject} names no request")
    return guest, rest[0], ".".join(rest[1:])


def read_request(payload: bytes) -> bytes:
    """Return a request for messages with known fields only; raises MessageError."""
    fields = _json(payload)
    seq = fields.get("seq", 1)
    request: dict[str, Any] = {"seq": seq if isinstance(seq, int) and seq > 0 else 1}
    subject = fields.get("next_by_subj")
    if isinstance(subject, str):
        request["next_by_subj"] = subject
    for key, most in (("batch", _MAX_MESSAGES), ("max_bytes", _MAX_BYTES)):
        value = fields.get(key)
        if isinstance(value, int) and value > 0:
            request[key] = min(value, most)
    return json.dumps(request).encode()


def _json(payload: bytes) -> dict[str, Any]:
    try:
        value: Any = read_json(payload)
    except errors.MessageError as error:
        raise errors.MessageError("the request is not JSON") from error
    if not isinstance(value, dict):
        raise errors.MessageError("the request must be a JSON object")
    return cast("dict[str, Any]", value)
