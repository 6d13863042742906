"""What the actors of a job wrote and what happened to it: the ends of its logs and events."""

import re
from typing import Any, TypeVar

from ....broker.client.connection import Broker
from ....broker.jetstream.stored import StoredMessage, get_batch
from ....broker.jetstream.streams import stream_info
from ....schemas.job import JobRecord
from ....schemas.metric import Event, LogLines, readable
from ....schemas.wire.errors import MessageError, NotFoundError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import JobScope

M = TypeVar("M", bound=Message)

MAX_LINES = 1000
_WINDOW = 900
_MAX_LOOKS = 8
_LEVEL = re.compile(r'"level": ?"(\w+)"|\b(ERROR|WARNING|Traceback)\b')


async def tail_of_log(
    broker: Broker, scope: JobScope, *, actor: str = "", limit: int = MAX_LINES
) -> list[dict[str, Any]]:
    """Return the last lines that the actors of a job, or one of them, wrote; oldest first."""
    subject = scope.log(actor or "*")
    lines: list[dict[str, Any]] = []
    for message in await _tail(broker, scope.stream_log, subject, limit):
        batch = _parse(message, LogLines)
        lines += shown_lines(batch) if batch is not None else []
    return lines[-limit:]


async def tail_of_events(
    broker: Broker, record: JobRecord, *, limit: int = 200, quiet: bool = True
) -> list[Event]:
    """Return the last events of a job, newest first; without the bottleneck lines if `quiet`."""
    scope = record.scope
    messages = await _tail(broker, scope.stream_feed, scope.event, limit * 2)
    stored = [event for message in messages if (event := _parse(message, Event)) is not None]
    events = [*stored, *(event for event in record.untold if event not in stored)]
    told = [event for event in events if not quiet or event.kind != "bottleneck"]
    return told[-limit:][::-1]


async def bottleneck_of(broker: Broker, record: JobRecord) -> str:
    """Return the newest line that says what holds a run up; empty for none."""
    for event in await tail_of_events(broker, record, quiet=False):
        if event.kind == "bottleneck":
            return event.message
    return ""


def shown_lines(batch: LogLines) -> list[dict[str, Any]]:
    """Return the lines of a message as the page shows them."""
    return [
        {
            "actor": batch.actor,
            "attempt": batch.attempt,
            "text": readable(line),
            "level": _level(line),
            "time": batch.time,
        }
        for line in batch.lines
    ]


def _level(line: str) -> str:
    found = _LEVEL.search(line)
    word = (found[1] or found[2]).lower() if found else "info"
    return {"traceback": "error", "critical": "error"}.get(word, word)


async def _tail(broker: Broker, stream: str, subject: str, limit: int) -> list[StoredMessage]:
    """Return the last messages on a subject, by looking at ever more of the stream's end."""
    try:
        state = (await stream_info(broker, stream))["state"]
    except NotFoundError:
        return []
    first, last = max(int(state["first_seq"]), 1), int(state["last_seq"])
    found: list[StoredMessage] = []
    end, window = last, _WINDOW
    for _ in range(_MAX_LOOKS):
        start = max(first, end - window + 1)
        if end < first or len(found) >= limit:
            break
        found = [*await _between(broker, stream, subject, start, end), *found]
        end, window = start - 1, window * 4
    return found[-limit:]


async def _between(
    broker: Broker, stream: str, subject: str, start: int, end: int
) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    while start <= end:
        messages, more = await get_batch(broker, stream, start, subject)
        found += [message for message in messages if message.seq <= end]
        if not messages or not more:
            break
        start = messages[-1].seq + 1
    return found


def _parse(message: StoredMessage, model: type[M]) -> M | None:
    try:
        return model.from_bytes(message.payload, at=message.subject)
    except MessageError:
        return None
