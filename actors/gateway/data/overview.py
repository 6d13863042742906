"""The overview of one run and its live updates: state, figures and actors.

Updates are server-sent events: the run's feed or log, and its state. The id of an event is the
message's sequence, so a browser that lost the connection continues after its last event. A browser
that is far behind must reload the page.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from ....broker.client.fair_queue import end_tasks
from ....broker.feed import VALIDATION, ValidationScore, parse_feed_message
from ....broker.jetstream.direct_get import StoredMessage, StreamReader
from ....broker.jetstream.kv import Entry
from ....broker.jetstream.streams import stream_info
from ....broker.presence import list_presences
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.metric import Event, LogLines, Metric, Presence
from ....schemas.wire.errors import MessageError, NotFoundError, TinkermqError
from ....schemas.wire.subjects import JobScope
from ..operations import Scheduler
from ..sessions import Visitor
from ..web import Gateway, gateway_of, number_in, to_json, visitor_of
from .jobs import row, shown_lines
from .metrics import finite_values
from .timeline import limit_of


async def summarize_run(gateway: Gateway, visitor: Visitor, record: JobRecord) -> dict[str, Any]:
    """Return the data for the head of a job's page, and its actors."""
    values, actors, limit = await asyncio.gather(
        gateway.figures.values(visitor.broker, record),
        actors_of(visitor, record),
        limit_of(visitor.broker, record),
    )
    return {
        "job": row(record, values),
        "figures": _figures(values),
        "actors": actors,
        "bottleneck": limit.text if limit else "",
        "change": list(limit.change) if limit else [],
        "can": allowed_actions(record),
    }


def allowed_actions(record: JobRecord) -> dict[str, bool]:
    """Return the actions that the state of a job allows."""
    ended = record.state in FINAL_STATES
    at_hand = ended and record.archived is None and record.removal == "no"
    trains = record.trains and record.stop == "no"
    return {
        "stop": not ended and record.stop == "no",
        "stop_now": not ended and record.stop != "now",
        "checkpoint": trains and record.state in ("RUNNING", "PAUSED"),
        "pause": trains and record.state == "RUNNING",
        "resume": (at_hand and record.configured) or record.state == "PAUSED",
        "archive": at_hand and bool(record.run_dir),
        "unarchive": record.archived is not None and record.removal == "no",
        "delete": ended and record.removal != "delete",
        "scale": not ended and record.configured,
        "prioritize": not ended,
    }


async def actors_of(visitor: Visitor, record: JobRecord) -> list[dict[str, Any]]:
    """Return the actors of a job: placement, state, and reason of waiting."""
    entries: list[Entry[Presence]] = []
    if record.state not in FINAL_STATES:  # heartbeats outlive their actors for a while
        with contextlib.suppress(TinkermqError):
            entries = await list_presences(visitor.broker, record.scope.key)
    beats = {entry.value.actor: entry.value for entry in entries}
    columns = ("name", "role", "node", "slots", "placed", "restarts")
    rows = [
        ((a.name, a.role, a.node, a.slots, a.state, a.restarts), beats.pop(a.name, None))
        for a in record.actors
    ]
    rows += [((beat.actor, beat.role, beat.host, 0, "joined", 0), beat) for beat in beats.values()]
    return [{**dict(zip(columns, row, strict=True)), **_heartbeat(beat)} for row, beat in rows]


def _heartbeat(presence: Presence | None) -> dict[str, Any]:
    if presence is None:
        return {"state": "", "waits_for": "", "version": None, "numbers": {}, "heard_s": None}
    return {
        "state": presence.state,
        "waits_for": presence.waits_for,
        "missing_since": presence.missing_since,
        "version": presence.version,
        "numbers": presence.numbers,
        "heard_s": max(0.0, time.time() - presence.time),
        "host": presence.host,
        "pid": presence.pid,
    }


def _figures(values: dict[str, float]) -> list[dict[str, Any]]:
    """Return the figures beside the step bar."""
    shown = (
        ("reward", "training_step_reward", "{:.3f}"),
        ("validation", VALIDATION, "{:.3f}"),
        ("tokens/s", "perf/throughput", "{:,.0f}"),
        ("s/step", "perf/time_per_step", "{:.2f}"),
        ("lag", "staleness/lag_mean", "{:.2f}"),
        ("length", "response_length/mean", "{:,.0f}"),
        ("entropy", "actor/entropy", "{:.3f}"),
    )
    score = ValidationScore.of(values)
    return [
        {
            "label": label,
            "name": name,
            "text": score.text if score and name == VALIDATION else shape.format(values[name]),
        }
        for label, name, shape in shown
        if name in values and values[name] == values[name]
    ]


# -- live updates ----------------------------------------------------------------------------------

PING_S = 15
WATCH_S = 1.0
FAR_BEHIND = 5000
_QUEUE_LENGTH = 256


async def job_stream(request: Request) -> EventSourceResponse:
    """Stream a job's updates: `?of=feed` (metrics, events) or `?of=log`, `from=SEQUENCE`."""
    gateway, visitor = gateway_of(request), await visitor_of(request)
    record = await Scheduler(visitor).get(request.path_params["job"])
    of = request.query_params.get("of", "feed")
    if of not in ("feed", "log"):
        raise MessageError(f"of={of!r} must be feed or log")
    from_seq = number_in(request, "from", least=1)
    last_id = request.headers.get("last-event-id", "")
    if last_id.isascii() and last_id.isdigit():
        from_seq = int(last_id[:18]) + 1
    updates = _Updates(gateway, visitor, record)
    return EventSourceResponse(updates.run(of, from_seq), ping=PING_S, sep="\n")


class _Updates:
    """Two sources, the stream and the state of a job, and the queue that they fill."""

    def __init__(self, gateway: Gateway, visitor: Visitor, record: JobRecord) -> None:
        self._gateway = gateway
        self._visitor = visitor
        self._record = record
        self._queue: asyncio.Queue[ServerSentEvent | None] = asyncio.Queue(_QUEUE_LENGTH)

    async def run(self, of: str, from_seq: int | None) -> AsyncGenerator[ServerSentEvent, None]:
        """Yield events until the gateway stops, the browser disconnects, or the key is revoked."""
        parts: tuple[Coroutine[Any, Any, None], ...] = (
            self._pump(of, from_seq),
            self._watch(),
            self._end(self._gateway.stopping),
            self._end(self._visitor.broker.closed),
        )
        streams = self._gateway.counters.streams
        streams.inc()
        tasks = [asyncio.create_task(part, name="live updates") for part in parts]
        try:
            while (event := await self._queue.get()) is not None:
                yield event
        finally:
            streams.dec()
            await end_tasks(tasks)

    async def _end(self, ends: asyncio.Event) -> None:
        await ends.wait()
        await self._queue.put(None)

    async def _pump(self, of: str, from_seq: int | None) -> None:
        """Forward stored messages, from when the job's streams exist until they are removed."""
        while not await self._hand_on(of, from_seq):  # noqa: ASYNC110  streams send no signal
            await asyncio.sleep(WATCH_S)

    async def _hand_on(self, of: str, from_seq: int | None) -> bool:
        """Return False if the streams do not exist yet, True at their end."""
        scope = self._record.scope
        stream = scope.stream_feed if of == "feed" else scope.stream_log
        subjects = [scope.metric, scope.event] if of == "feed" else [scope.log("*")]
        broker = self._visitor.broker
        try:
            if from_seq is not None:
                last = int((await stream_info(broker, stream))["state"]["last_seq"])
                if last - from_seq > FAR_BEHIND or from_seq > last + 1:
                    await self._put("reload", {})
                    return True
            reader = StreamReader(broker, stream, subjects, from_seq=from_seq)
            async with aclosing(reader.messages()) as messages:
                async for stored in messages:
                    update = _event_of(stored, scope)
                    if update is not None:
                        await self._put(update[0], update[1], stored.seq)
        except NotFoundError:
            return self._record.has_streams or self._record.state in FINAL_STATES
        except MessageError:
            return True
        except TinkermqError:  # the connection was lost: the browser reconnects
            await self._queue.put(None)
        return True

    async def _watch(self) -> None:
        """Send the job's state, figures and actors whenever they change."""
        scheduler, before = Scheduler(self._visitor), ""
        template = self._gateway.templates.get_template("job_live.html")
        while True:
            try:
                record = self._record = await scheduler.get(self._record.job)
                seen = await summarize_run(self._gateway, self._visitor, record)
                html = template.render(seen)
                if html != before:
                    state = {"state": record.state, "step": seen["job"]["step"], "html": html}
                    await self._put("job", state)
                before = html
            except (TinkermqError, TimeoutError) as error:
                await self._put("trouble", {"message": str(error)})
            await asyncio.sleep(WATCH_S)

    async def _put(self, name: str, data: Any, seq: int | None = None) -> None:
        event = ServerSentEvent(
            data=to_json(data), event=name, id=str(seq) if seq is not None else None
        )
        await self._queue.put(event)


def _event_of(stored: StoredMessage, scope: JobScope) -> tuple[str, Any] | None:
    """Return name and data of the event for a stored message; None for a malformed one."""
    match parse_feed_message(stored, scope):
        case Metric() as metric:
            fields = {"step": metric.step, "time": metric.time, "values": finite_values(metric)}
            return "metric", fields
        case Event() as event:
            return "event", event.model_dump(exclude={"data"})
        case LogLines() as lines:
            return "log", shown_lines(lines)
        case None:
            return None
