"""A job that does not train is not asked for a checkpoint."""

import pytest
from tinkermq.broker.calls import write_checkpoint
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.errors import StateError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        ("infer", "RUNNING", "trains nothing"),
        ("train", "QUEUED", "is QUEUED"),
        ("sft", "COMPLETED", "is COMPLETED"),
    ],
)
async def test_a_job_that_does_not_train_has_no_checkpoint_to_write(
    broker: Broker, kind: str, state: str, told: str
) -> None:
    changes = {"kind": kind, "state": state}
    record = new_record(JobScope("local", "a")).model_copy(update=changes)
    with pytest.raises(StateError, match=f"job run-of-a {told}"):
        await write_checkpoint(broker, record)
