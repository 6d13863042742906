"""The newest numbers of a run, without reading its whole history."""

import time
from collections.abc import Mapping
from typing import Any

from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.metric import Metric
from ...schemas.wire.errors import MessageError
from ...schemas.wire.subjects import JobScope
from ..client.connection import Broker
from ..jetstream.direct_get import get_batch
from ..jetstream.streams import stream_info

RECENT_ENTRIES = 40


async def recent_values(broker: Broker, scope: JobScope) -> dict[str, float]:
    """Return the newest value of each metric among the last entries of a run's feed.

    Raises NotFoundError when the run's streams are gone.
    """
    state = (await stream_info(broker, scope.stream_feed))["state"]
    first = max(int(state["first_seq"]), int(state["last_seq"]) - RECENT_ENTRIES, 1)
    messages, _ = await get_batch(broker, scope.stream_feed, first, scope.metric)
    values: dict[str, float] = {}
    for message in messages:
        try:
            metric = Metric.from_bytes(message.payload)
        except MessageError:
            continue
        values.update(metric.values)
        values["step"] = max(values.get("step", 0.0), float(metric.step))
    return values


def run_row(record: JobRecord, values: Mapping[str, float]) -> dict[str, Any]:
    """Return what every list of runs tells of one, from its record and its newest values."""
    live = record.state not in FINAL_STATES
    return {
        "job": record.job,
        "kind": record.kind,
        "trains": record.trains,
        "state": record.state,
        "reason": record.reason,
        "step": int(values.get("step", record.version)),
        "reward": values.get("training_step_reward"),
        "validation": values.get("val/mean_score"),
        "slots": sum(one.slots for one in record.actors if one.node is not None) if live else 0,
        "age_s": (record.finished or time.time()) - record.created,
        "restarts": sum(one.restarts for one in record.actors),
        "attempt": record.attempt,
        "tags": record.tags,
        "group": record.group,
    }
