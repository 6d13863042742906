"""What the owner of a job asks its learner for directly."""

from ...schemas.control import MAX_TRACED_STEPS, ControlReply, ControlRequest
from ...schemas.job import JobRecord
from ...schemas.wire.errors import ConfigError, StateError, StorageError
from ..client.connection import Broker
from ..client.rpc import call

DEADLINE_S = 600.0
_LIVE = frozenset({"RUNNING", "PAUSED"})


async def write_checkpoint(broker: Broker, record: JobRecord) -> str:
    """Have the learner of a job write a checkpoint between two steps; return its folder there.

    Raises StateError for a job that does not train, StorageError when the disk is full,
    DeadlineError after ten minutes.
    """
    _refuse_idle(
        record,
        "checkpoint to write",
        "ask while a training job runs; one that ends has written its last checkpoint",
    )
    request = ControlRequest(verb="checkpoint", reason="asked for")
    reply = await _ask(broker, record, request, "checkpoint")
    folder = reply.detail["folder"]
    if folder is None:
        raise StorageError(
            f"the learner of {record.name} could not write a checkpoint",
            hint=f"its last event says why: `tinkermq watch {record.name}`",
        )
    return str(folder)


async def trace_steps(broker: Broker, record: JobRecord, steps: int) -> list[str]:
    """Have the learner of a job write torch's traces of its next steps; return their files there.

    There are fewer when the run ends before. Raises ConfigError for too many, StateError for
    a job that does not train, StorageError for a full disk, DeadlineError after ten minutes.
    """
    if not 1 <= steps <= MAX_TRACED_STEPS:
        raise ConfigError(
            f"{steps} steps cannot be traced at a time",
            hint=f"ask for 1 to {MAX_TRACED_STEPS}: --steps 3",
        )
    _refuse_idle(record, "step to trace", "ask while a training job runs")
    request = ControlRequest(verb="profile", reason="asked for", steps=steps)
    reply = await _ask(broker, record, request, "next steps")
    return [str(file) for file in reply.detail["files"]]


def _refuse_idle(record: JobRecord, wanted: str, hint: str) -> None:
    if not record.trains or record.state not in _LIVE:
        what = f"is {record.state}" if record.trains else "trains nothing"
        raise StateError(f"job {record.name} {what}, so there is no {wanted}", hint=hint)


async def _ask(
    broker: Broker, record: JobRecord, request: ControlRequest, what: str
) -> ControlReply:
    return await call(
        broker,
        broker.control(record.scope, "learner"),
        request,
        ControlReply,
        timeout_s=DEADLINE_S,
        waiting_for=f"the learner's {what} of {record.name}",
    )
