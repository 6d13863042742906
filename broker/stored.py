"""Reading stored messages by sequence, without a consumer.

A direct get answers from the stream itself, in batches, and needs no right to create consumers.
Used for keys, single log entries and the chunks of objects; live tails are in `reader.py`.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from ..schemas.errors import BrokerError, NotFoundError
from .connection import Broker, ConnectionLost, NoResponders

BATCH_MESSAGES = 1000
BATCH_BYTES = 16 * 2**20
_BATCH_TIMEOUT_S = 5.0
_END_OF_BATCH = "204"
_NOT_FOUND = "404"


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a stream."""

    subject: str
    seq: int
    payload: bytes
    headers: dict[str, str]


async def get_last(broker: Broker, stream: str, subject: str) -> StoredMessage | None:
    """Return the last message on `subject`, or None; a single attempt."""
    reply = await _direct(broker, stream, f".{subject}", b"")
    return stored_message(reply)


async def get_seq(broker: Broker, stream: str, seq: int) -> StoredMessage | None:
    """Return the message at `seq`, or None if there is none (any more); a single attempt."""
    reply = await _direct(broker, stream, "", json.dumps({"seq": seq}).encode())
    return stored_message(reply)


async def _direct(broker: Broker, stream: str, tail: str, payload: bytes) -> Msg:
    return await broker.request(f"$JS.API.DIRECT.GET.{stream}{tail}", payload)


def stored_message(reply: Msg) -> StoredMessage | None:
    """Turn the reply to a direct get into a message; None when there is none."""
    headers = reply.headers or {}
    subject = headers.get("Nats-Subject")
    if subject is not None:
        return StoredMessage(subject, int(headers["Nats-Sequence"]), reply.data, headers)
    if headers.get("Status") == _NOT_FOUND:
        return None
    raise BrokerError(
        f"a direct get was refused: {headers.get('Status')} {headers.get('Description', '')}",
        hint="look at the stream with `nats stream info`",
    )


async def get_all(broker: Broker, stream: str, subject: str) -> list[StoredMessage]:
    """Return all messages on `subject` (wildcards allowed) in order, in bounded batches.

    A message that is replaced meanwhile (a key that is written again) may come twice.
    Each batch is one attempt; raises what `Broker.request` raises.
    """
    found: list[StoredMessage] = []
    seq = 1
    while True:
        messages, more = await get_batch(broker, stream, seq, subject)
        found += messages
        if not more:
            return found
        seq = messages[-1].seq + 1


async def get_batch(
    broker: Broker, stream: str, seq: int, subject: str
) -> tuple[list[StoredMessage], bool]:
    """Return the next messages on `subject` from `seq` on, and whether there may be more."""
    request: dict[str, Any] = {
        "seq": seq,
        "next_by_subj": subject,
        "batch": BATCH_MESSAGES,
        "max_bytes": BATCH_BYTES,
    }
    replies: asyncio.Queue[Msg | None] = asyncio.Queue()
    inbox = broker.nc.new_inbox()
    listening = await broker.listen(inbox, replies.put_nowait)
    remove = broker.on_disconnect(lambda: replies.put_nowait(None))
    try:
        await broker.send(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox)
        return await _collect(replies, stream)
    finally:
        remove()
        await listening.stop()


async def _collect(
    replies: "asyncio.Queue[Msg | None]", stream: str
) -> tuple[list[StoredMessage], bool]:
    messages: list[StoredMessage] = []
    while True:
        async with asyncio.timeout(_BATCH_TIMEOUT_S):
            reply = await replies.get()
        if reply is None:
            raise ConnectionLost("the connection broke during a batched read", hint="try again")
        headers = reply.headers or {}
        status = headers.get("Status")
        if status == "503":
            raise NoResponders(f"there is no stream {stream}", hint="see `nats stream ls`")
        if status == _END_OF_BATCH:
            return messages, int(headers.get("Nats-Num-Pending", "0")) > 0
        message = stored_message(reply)
        if message is None:
            return messages, False
        messages.append(message)


def missing(stream: str) -> NotFoundError:
    """Return the error of a stream that is not there."""
    return NotFoundError(
        f"there is no stream {stream}",
        hint="the job may have ended and been removed (`tinkermq ps --all`)",
    )
