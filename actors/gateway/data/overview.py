"""What a job's page tells at a glance: state, figures, actors and whom each waits for."""

import asyncio
import contextlib
import time
from typing import Any

from ....broker.jetstream.kv import Entry
from ....broker.presence import list_presences
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.metric import Presence
from ....schemas.wire.errors import TinkermqError
from ..sessions import Visitor
from ..web import Gateway
from .jobs import bottleneck_of, row


async def glance(gateway: Gateway, visitor: Visitor, record: JobRecord) -> dict[str, Any]:
    """Return what the head of a job's page shows, and its actors."""
    values, actors, bottleneck = await asyncio.gather(
        gateway.figures.values(visitor.broker, record),
        actors_of(visitor, record),
        _bottleneck(visitor, record),
    )
    return {
        "job": row(record, values),
        "figures": _figures(values),
        "actors": actors,
        "bottleneck": bottleneck,
        "can": possible(record),
    }


def possible(record: JobRecord) -> dict[str, bool]:
    """Return which actions the state of a job allows."""
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
    """Return the actors of a job: where each was placed, what it does, whom it waits for."""
    entries: list[Entry[Presence]] = []
    if record.state not in FINAL_STATES:  # the last heartbeats outlive their actors for a while
        with contextlib.suppress(TinkermqError):
            entries = await list_presences(visitor.broker, record.scope.key)
    heard = {entry.value.actor: entry.value for entry in entries}
    rows = [
        {
            "name": one.name,
            "role": one.role,
            "node": one.node,
            "slots": one.slots,
            "placed": one.state,
            "restarts": one.restarts,
            **_heartbeat(heard.pop(one.name, None)),
        }
        for one in record.actors
    ]
    joined = [
        {
            "name": one.actor,
            "role": one.role,
            "node": one.host,
            "slots": 0,
            "placed": "joined",
            "restarts": 0,
            **_heartbeat(one),
        }
        for one in heard.values()
    ]
    return rows + joined


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


async def _bottleneck(visitor: Visitor, record: JobRecord) -> str:
    if record.state != "RUNNING":
        return ""
    return await bottleneck_of(visitor.broker, record)


def _figures(values: dict[str, float]) -> list[dict[str, Any]]:
    """Return the handful of numbers beside the step bar."""
    shown = (
        ("reward", "training_step_reward", "{:.3f}"),
        ("validation", "val/mean_score", "{:.3f}"),
        ("tokens/s", "perf/throughput", "{:,.0f}"),
        ("s/step", "perf/time_per_step", "{:.2f}"),
        ("lag", "staleness/lag_mean", "{:.2f}"),
        ("length", "response_length/mean", "{:,.0f}"),
        ("entropy", "actor/entropy", "{:.3f}"),
    )
    return [
        {"label": label, "name": name, "text": shape.format(values[name])}
        for label, name, shape in shown
        if name in values and values[name] == values[name]
    ]
