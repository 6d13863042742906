"""The operation log: the first of a number wins, and what is trimmed is gone."""

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.operations import OperationLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.names import ModelName, OperationName
from tinkermq.schemas.tinker.operation import ModelOperation, OperationResult
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S

MODEL = ModelName("s1", 0)


@pytest.fixture
async def log(broker: Broker):
    scope = JobScope("local", "operations")
    await create_job_streams(broker, scope, LimitsConfig(), operations=True)
    yield OperationLog(broker, scope)
    await delete_job_streams(broker, scope)


def operation(seq: int, body: bytes = b"{}", model: ModelName = MODEL) -> ModelOperation:
    return ModelOperation(kind="optim_step", model=str(model), seq=seq, body=body)


async def test_the_first_of_a_number_wins_and_order_is_as_it_came(log: OperationLog) -> None:
    assert await log.append("ada", operation(2, b"first"))
    assert await log.append("ada", operation(1))
    assert not await log.append("ada", operation(2, b"second"))
    assert await log.append("bob", operation(2, b"bob's"))  # another user's model of the same name
    told = [(user, one.seq, one.body) for user, one in (await log.read_all())[0]]
    assert told == [("ada", 2, b"first"), ("ada", 1, b"{}"), ("bob", 2, b"bob's")]


async def test_trimming_takes_the_named_numbers_of_one_model(log: OperationLog) -> None:
    for seq in (1, 3, 2):
        await log.append("ada", operation(seq))
    await log.append("bob", operation(1))
    await log.trim("ada", MODEL, through_seq=2, since_seq=0)
    assert [(user, one.seq) for user, one in (await log.read_all())[0]] == [("ada", 3), ("bob", 1)]
    assert await log.find("ada", OperationName(MODEL, 2)) is None


async def test_a_result_is_stored_once_and_goes_with_its_model(log: OperationLog) -> None:
    name = OperationName(MODEL, 1)
    assert await log.put_result("ada", name, OperationResult(state="done", body=b"1"))
    assert not await log.put_result("ada", name, OperationResult(state="done", body=b"2"))
    found = await log.result("ada", name)
    assert found is not None
    assert found.body == b"1"
    assert await log.result("bob", name) is None
    await log.forget("ada", MODEL)
    assert await log.result("ada", name) is None


async def test_what_is_no_operation_is_told_beside_those_that_are(
    log: OperationLog, broker: Broker
) -> None:
    scope = JobScope("local", "operations")
    await log.append("ada", operation(7))
    bad_id = ModelOperation(kind="optim_step", model="../..", seq=2, body=b"").to_bytes()
    for subject, payload in (
        (scope.operation("ada", "s1", 0, 8), operation(7).to_bytes()),
        (scope.operation("ada", "s1", 0, 9), b"garbage"),
        (scope.operation("ada", "s2", 0, 2), bad_id),
        (scope.operation("ada", "s1", "x", 1), b""),
        (scope.all_operations.replace(">", "nobody"), b""),
    ):
        await broker.append(subject, payload, deadline_s=PATIENCE_S, waiting_for="the test")
    operations, unreadable = await log.read_all()
    assert [one.seq for _, one in operations] == [7]
    named = [("ada", OperationName(MODEL, 8)), ("ada", OperationName(MODEL, 9))]
    named += [("ada", OperationName(ModelName("s2", 0), 2))]
    assert [(one.user, one.name) for one in unreadable[:3]] == named
    assert [one.name for one in unreadable[3:]] == [None, None]
    assert "says that it is s1:train:0:7" in unreadable[0].reason
    assert "entry 2 of the operation log" in unreadable[0].reason
    with pytest.raises(MessageError):
        await log.find("ada", OperationName(MODEL, 9))
