"""Reads stored messages by sequence, without a consumer: one, a batch, or a growing stream.

A direct get reads from the stream itself, in batches, and needs no right to create consumers. Used
for keys, log entries, the chunks of objects, and by `StreamReader` for live streams.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from nats.aio.msg import Msg

from ...schemas.wire.errors import BrokerError, TinkermqError
from ..client.connection import Broker
from ..client.faults import NoResponders, Refused, Unanswered, nobody_listens
from ..client.nats_internals import (
    DESCRIPTION,
    END_OF_BATCH,
    NO_RESPONDERS,
    NOT_FOUND,
    SEQUENCE,
    STATUS,
    header,
    parse_headers,
    status_of,
)
from ..client.parts import Inbox
from ..client.replies import Listening, checked
from .streams import stream_info

BATCH_MESSAGES = 1000
BATCH_BYTES = 16 * 2**20
_BATCH_TIMEOUT_S = 5.0
_NO_MESSAGE = 10037
_IN_FLIGHT_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a stream."""

    subject: str
    seq: int
    payload: bytes
    headers: dict[str, str]


Batch: TypeAlias = tuple[list[StoredMessage], bool]
"""Messages in order, and whether there may be more."""


async def get_last(broker: Broker, stream: str, subject: str) -> StoredMessage | None:
    """Return the last message on `subject`, or None; a single attempt."""
    place, request = broker.last_get(stream, subject)
    return stored_message(await broker.request(place, request), stream)


async def get_newest(broker: Broker, stream: str, subjects: str) -> StoredMessage | None:
    """Return the newest stored message of a stream on `subjects` (with wildcards), or None.

    A single attempt; in a cluster it reads from the stream's leader.
    """
    api = f"$JS.API.STREAM.MSG.GET.{stream}"
    place = api if broker.replication.reads_leader else broker.direct_get(stream)
    request = json.dumps({"last_by_subj": subjects}).encode()
    return stored_message(await broker.request(place, request), stream)


async def get_last_behind(
    broker: Broker, stream: str, subject: str, seq: int
) -> StoredMessage | None:
    """Return the last message on `subject`, which must be behind `seq`.

    A cluster may have accepted but not yet stored it, so this waits briefly for it.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + broker.replication.lag_s
    while True:
        newest = await get_last(broker, stream, subject)
        if (newest is not None and newest.seq > seq) or loop.time() >= deadline:
            return newest
        await asyncio.sleep(_IN_FLIGHT_PAUSE_S)


async def get_seq(broker: Broker, stream: str, seq: int) -> StoredMessage | None:
    """Return the message at `seq`, or None if it is not there (any more); a single attempt."""
    request = json.dumps({"seq": seq}).encode()
    return stored_message(await broker.request(broker.direct_get(stream), request), stream)


def stored_message(reply: Msg, stream: str) -> StoredMessage | None:
    """Convert the reply to a get, from a replica or the leader, to a message; None for none."""
    headers = reply.headers or {}
    if not headers:
        return _of_leader(reply, stream)
    if SEQUENCE in headers:
        return StoredMessage(headers["Nats-Subject"], int(headers[SEQUENCE]), reply.data, headers)
    if (status := header(reply, STATUS)) == NOT_FOUND:
        return None
    raise BrokerError(
        f"a direct get was refused: {status} {header(reply, DESCRIPTION)}",
        hint="look at the stream with `nats stream info`",
    )


def _of_leader(reply: Msg, stream: str) -> StoredMessage | None:
    """Convert the leader's answer, JSON that contains the message."""
    try:
        message = checked(reply.data, f"a read of {stream}")["message"]
    except Refused as error:
        if error.err_code == _NO_MESSAGE:
            return None
        if error.is_absent:
            raise NoResponders("no server answers the read", stream=stream) from error
        raise
    _, headers = parse_headers(base64.b64decode(message.get("hdrs", "")))
    payload = base64.b64decode(message.get("data", ""))
    return StoredMessage(message["subject"], int(message["seq"]), payload, headers)


async def get_all(
    broker: Broker, stream: str, subject: str, from_seq: int = 1
) -> list[StoredMessage]:
    """Return all messages on `subject` (wildcards allowed) in order, in bounded batches.

    A message that is replaced meanwhile (a rewritten key) may be returned twice. Each batch is a
    single attempt; raises what `Broker.request` raises.
    """
    stored: list[StoredMessage] = []
    seq = from_seq
    while True:
        messages, more = await get_batch(broker, stream, seq, subject)
        stored += messages
        if not more:
            return stored
        seq = messages[-1].seq + 1


async def get_batch(broker: Broker, stream: str, seq: int, subject: str) -> Batch:
    """Return the next messages on `subject` from `seq` on, and whether there may be more."""
    inbox = BatchInbox(broker)
    try:
        return await inbox.get(stream, seq, subject)
    finally:
        await inbox.close()


class BatchInbox:
    """Receives batches of stored messages, one after the other."""

    def __init__(
        self, broker: Broker, max_messages: int = BATCH_MESSAGES, max_bytes: int = BATCH_BYTES
    ) -> None:
        """Set the bounds of batches."""
        self._broker = broker
        self._bounds = {"batch": max_messages, "max_bytes": max_bytes}
        self._inbox = Inbox(broker)

    async def get(self, stream: str, seq: int, subject: str) -> Batch:
        """Return the next messages on `subject` from `seq` on, and whether there may be more.

        A single attempt: raises ConnectionLost, NoResponders, TimeoutError, and BrokerError for
        a user without the permission.
        """
        self._inbox.drain()  # of an abandoned attempt
        request = {"seq": seq, "next_by_subj": subject, **self._bounds}
        place = self._broker.direct_get(stream)
        answers = await self._inbox.ask(place, json.dumps(request).encode())
        messages: list[StoredMessage] = []
        while True:
            try:
                reply = await self._inbox.next(_BATCH_TIMEOUT_S)
            except TimeoutError:
                raise Unanswered(place) from None
            if reply.subject != answers:
                continue
            status = status_of(reply)
            if status == NO_RESPONDERS:
                raise nobody_listens(place, reply.headers or {})
            if status == END_OF_BATCH:
                return messages, int(header(reply, "Nats-Num-Pending") or 0) > 0
            message = stored_message(reply, stream)
            if message is None:
                return messages, False
            messages.append(message)

    async def close(self) -> None:
        """Unsubscribe."""
        await self._inbox.close()


# Batching: requests made within one turn of the event loop are sent in one message.

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q")
R = TypeVar("R")


class RequestBatcher(Generic[K, Q, R]):
    """Collects requests by key, during one turn of the event loop."""

    def __init__(
        self, send: Callable[[K, list[Q]], Awaitable[Sequence[R | TinkermqError]]]
    ) -> None:
        """`send(key, questions)` returns an answer or an error for each question, in order."""
        self._send = send
        self._waiting: dict[K, list[tuple[Q, asyncio.Future[R]]]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def ask(self, key: K, question: Q) -> "asyncio.Future[R]":
        """Return the future of the answer."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = []
            loop.call_soon(self._go, key)
        future: asyncio.Future[R] = loop.create_future()
        waiting.append((question, future))
        return future

    def _go(self, key: K) -> None:
        task = asyncio.create_task(self._answer(key, self._waiting.pop(key)), name=f"ask {key}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _answer(self, key: K, requests: list[tuple[Q, "asyncio.Future[R]"]]) -> None:
        try:
            answers = await self._send(key, [question for question, _ in requests])
        except Exception as error:  # noqa: BLE001  raised where the answer is awaited
            for _, future in requests:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(requests, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, TinkermqError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


# Live reading of a stream from any sequence, across restarts of the server.
#
# The reader keeps its own position and reads by batched direct gets, one batch ahead. At the end,
# it reads again when a plain subscription to the stream's subjects (or, for large messages, to
# their republished headers) receives a message. So every stored message is yielded once and in
# order, even if the subscription loses some.

FIRST_PAUSE_S = 0.005
LAST_PAUSE_S = 1.0
READ_AHEAD_MESSAGES = 250
READ_AHEAD_BYTES = 8 * 2**20
_EVERYTHING = ">"
_DEADLINE_S = 60.0


class StreamReader:
    """Yields the stored messages of a stream in order, and then new ones."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        subjects: list[str],
        *,
        from_seq: int | None = 1,
        sign: str = "",
    ) -> None:
        """`from_seq` is the first sequence to yield; None starts behind the last one.

        A message on subject `sign` announces more; by default any message of the stream does.
        """
        self._broker = broker
        self._stream = stream
        self._subjects = subjects
        self._next_seq = from_seq
        self._inbox = BatchInbox(broker, READ_AHEAD_MESSAGES, READ_AHEAD_BYTES)
        self._signs = [sign] if sign else subjects
        self._sign = asyncio.Event()
        self._listening: list[Listening] = []
        self._num_reads = self._last_whole = 0
        """The number of reads, and the number of the last read that reached the end."""
        self._was_whole = asyncio.Event()
        self._has_reconnected = False

    async def start(self) -> None:
        """Fix the position now, so that later messages are not missed.

        Raises NotFoundError when the stream does not exist, DeadlineError.
        """
        if not self._listening:
            self._listening = [
                await self._broker.listen(s, self._note_message) for s in self._signs
            ]
        if self._next_seq is None:
            state = (await stream_info(self._broker, self._stream))["state"]
            self._next_seq = int(state["last_seq"]) + 1

    async def messages(self) -> AsyncGenerator[StoredMessage, None]:
        """Iterate for ever; leave the loop through `aclose`.

        Raises NotFoundError when the stream is gone, DeadlineError when the server stays away.
        """
        remove = self._broker.on_reconnect(self._note_reconnect)
        pause_s = FIRST_PAUSE_S
        ahead: asyncio.Task[Batch] | None = None
        try:
            await self.start()
            while True:
                self._sign.clear()
                messages, more = await (ahead or self._read())
                if messages:
                    self._next_seq = messages[-1].seq + 1
                    pause_s = FIRST_PAUSE_S
                ahead = asyncio.create_task(self._read()) if more else None
                for message in messages:
                    if len(self._subjects) == 1 or message.subject in self._subjects:
                        yield message
                if not more and self._has_reconnected:
                    self._has_reconnected = False
                    await self._go_back()
                if not more:
                    self._last_whole = self._num_reads
                    self._was_whole.set()
                if not more and await self._rest(pause_s):
                    pause_s = FIRST_PAUSE_S
                elif not more:
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            remove()
            if ahead is not None:
                ahead.cancel()
                await asyncio.wait({ahead})
            listening, self._listening = self._listening, []
            for subscription in listening:
                await subscription.stop()
            await self._inbox.close()

    async def catch_up(self) -> None:
        """Wait until the iterating task has received all messages stored by now."""
        last = self._num_reads
        self._sign.set()
        while self._last_whole <= last:
            self._was_whole.clear()
            await self._was_whole.wait()

    async def _read(self) -> Batch:
        """Return the next messages, and whether there may be more."""
        self._num_reads += 1
        seq = max(self._next_seq or 1, 1)
        subject = self._subjects[0] if len(self._subjects) == 1 else _EVERYTHING
        return await self._broker.retry(
            lambda: self._inbox.get(self._stream, seq, subject),
            deadline_s=_DEADLINE_S,
            waiting_for=f"stream {self._stream}",
        )

    async def _go_back(self) -> None:
        """Continue behind the stream's last message if the broker's store was set back."""
        info = await self._broker.retry(
            lambda: stream_info(self._broker, self._stream),
            deadline_s=_DEADLINE_S,
            waiting_for=f"stream {self._stream}",
        )
        self._next_seq = min(self._next_seq or 1, int(info["state"]["last_seq"]) + 1)

    async def _rest(self, pause_s: float) -> bool:
        """Wait for a message or `pause_s`, since it may arrive before it is stored."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._sign.wait()
        return self._sign.is_set()

    def _note_message(self, _: Msg) -> None:
        self._sign.set()

    def _note_reconnect(self) -> None:
        self._has_reconnected = True
        self._sign.set()
