"""What the owner of a job asks its learner for directly."""

from ..schemas.control import ControlReply, ControlRequest
from ..schemas.errors import StateError, StorageError
from ..schemas.job import JobRecord
from .connection import Broker
from .rpc import call

CHECKPOINT_DEADLINE_S = 600.0
_LIVE = frozenset({"RUNNING", "PAUSED"})


async def write_checkpoint(broker: Broker, record: JobRecord) -> str:
    """Have the learner of a job write a checkpoint between two steps; return its folder there.

    Raises StateError for a job that does not train, StorageError when the disk is full,
    DeadlineError after ten minutes.
    """
    if not record.trains or record.state not in _LIVE:
        what = f"is {record.state}" if record.trains else "trains nothing"
        raise StateError(
            f"job {record.name} {what}, so there is no checkpoint to write",
            hint="ask while a training job runs; one that ends has written its last checkpoint",
        )
    reply = await call(
        broker,
        record.scope.control("learner"),
        ControlRequest(verb="checkpoint", reason="asked for"),
        ControlReply,
        timeout_s=CHECKPOINT_DEADLINE_S,
        waiting_for=f"the learner's checkpoint of {record.name}",
    )
    folder = reply.detail["folder"]
    if folder is None:
        raise StorageError(
            f"the learner of {record.name} could not write a checkpoint",
            hint=f"its last event says why: `tinkermq watch {record.name}`",
        )
    return str(folder)
