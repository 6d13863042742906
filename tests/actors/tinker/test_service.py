"""The trainer's service: what was answered takes effect once and in order, whatever ends it."""

import asyncio
from pathlib import Path

import pytest
import torch
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.operations import OperationLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.names import OperationName
from tinkermq.schemas.tinker.operation import ModelOperation, OperationTaken
from tinkermq.schemas.wire.errors import (
    FencedError,
    MessageError,
    NotFoundError,
    StateError,
)

from tests.support.models import make_tiny_model
from tests.support.tinker import BASE
from tests.support.tinker_service import END, MODEL, SCOPE, Trainer, create, loss, step_body
from tests.support.waiting import PATIENCE_S

torch.set_num_threads(1)
_BEFORE = f"tinker://{MODEL}/weights/before"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("service") / "base")


@pytest.fixture
async def trainer(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> Trainer:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    return Trainer(own_server.url, own_broker, base, tmp_path / "states")


async def test_a_trainer_that_ends_anywhere_goes_on_to_the_same_bits(trainer: Trainer) -> None:
    """What one trainer does at once is done by five that end suddenly, and in another order."""
    async with trainer.running():
        assert (await trainer.send("create_model", 0, create())).request_id == f"{MODEL}:0"
        await trainer.train(1, 6)
        undisturbed = await trainer.weights(13)
        curves = (await trainer.curves()).points
    assert await trainer.log.read_all() == ([], [])  # all of it is in a state
    trainer.begin_anew()
    await trainer.log.forget("ada", END)
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await trainer.send("optim_step", 2, step_body(2))
        await trainer.send("forward_backward", 1, loss(1))
    async with trainer.running(drains=False):
        assert not (await trainer.send("forward_backward", 1, loss(99))).is_new
        await trainer.train(3, 1)
    async with trainer.running():
        await trainer.train(5, 1)
        await trainer.send("forward_backward", 7, loss(7))
        await trainer.result(7)  # its gradients are in no state: they are computed again
    async with trainer.running(drains=False):
        await trainer.send("optim_step", 8, step_body(8))
    async with trainer.running(drains=False):
        await trainer.train(9, 2)
        assert await trainer.weights(13) == undisturbed
        shown = await trainer.curves()
        assert shown.points == curves
        assert (shown.shown.steps, len(curves["series"]["loss:sum"]["y"])) == (6, 6)
    kinds = {event.kind for event in await read_events(trainer.broker, SCOPE)}
    assert "replay_differs" not in kinds


async def test_what_is_wrong_is_told_by_the_result_and_leaves_no_hole(trainer: Trainer) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        await trainer.send("forward_backward", 1, loss(1))
        await trainer.send("forward_backward", 2, loss(2, "stable_reinforce"))
        await trainer.send("optim_step", 3, step_body(3))
        await trainer.send("forward_backward", 4, b"\xff")
        await trainer.send("optim_step", 5, {"model_id": MODEL, "seq_id": 5, "adam_params": 3})
        failed = [await trainer.result(seq) for seq in (2, 3, 4, 5)]
        assert {(one.state, one.category) for one in failed} == {("failed", "user")}
        assert "loss_fn=importance_sampling" in failed[0].error
        assert "since operation 2 failed" in failed[1].error
        assert "is no ForwardBackwardRequest" in failed[2].error
        assert "adam_params" in failed[3].error
        await trainer.send("optim_step", 6, step_body(6))
        assert "since operation 4 failed" in (await trainer.result(6)).error
        before = await trainer.weights(7, "before")
        held = await trainer.checkpoint(_BEFORE)
        assert (held.base, held.rank) == (BASE, 4)
        for path, user in ((f"tinker://{MODEL}/weights/none", "ada"), (_BEFORE, "bob")):
            with pytest.raises(NotFoundError, match="there is no checkpoint"):
                await trainer.checkpoint(path, user)
        await trainer.train(8, 1)
        assert (await trainer.result(9)).state == "done"
        assert await trainer.weights(10, "behind") != before


async def test_models_of_others_and_what_cannot_be_are_refused_before_the_log(
    trainer: Trainer,
) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        assert (await trainer.result(0)).state == "done"
        for ask in (trainer.info("bob"), trainer.result(0, "bob"), _as_bob(trainer)):
            with pytest.raises(NotFoundError):
                await ask
        with pytest.raises(MessageError, match="cannot be create_model"):
            await trainer.send("create_model", 1, create())
        with pytest.raises(MessageError, match="cannot be missing"):
            await trainer.send("missing", 1, {})
        told = [seq for _, one in (await trainer.log.read_all())[0] for seq in [one.seq]]
        assert told == [0]
        for session, body, words in (
            ("s2", create("s2", rank=17), "rank 17 is not offered"),
            ("s3", create("s3", base="other"), "no base model 'other' here"),
        ):
            model = f"{session}:train:0"
            await trainer.send("create_model", 0, body, model=model)
            assert words in (await trainer.result(0, model=model)).error
            await trainer.send("optim_step", 1, step_body(1), model=model)
            assert "was never made" in (await trainer.result(1, model=model)).error


async def _as_bob(trainer: Trainer) -> OperationTaken:
    return await trainer.send("optim_step", 1, step_body(1), "bob")


async def test_a_number_that_never_comes_fails_and_those_behind_it_go_on(trainer: Trainer) -> None:
    async with trainer.running(gap_s=0.5):
        await trainer.send("create_model", 0, create())
        await trainer.send("optim_step", 2, step_body(2))
        waiting = await trainer.result(2, wait_s=0.1)
        assert waiting.state == "pending"
        assert "waits for operation 1, which has not come" in waiting.queue_reason
        assert (await trainer.result(2)).state == "done"
        assert "never came" in (await trainer.result(1)).error
        assert not (await trainer.send("forward_backward", 1, loss(1))).is_new


async def test_garbage_in_the_log_ends_one_model_and_nothing_else(trainer: Trainer) -> None:
    """Of a pool without users anybody may write there."""

    async def write(seq: int, payload: bytes, model: str = "s1", log: str = "operation") -> None:
        subject = getattr(SCOPE, log)("ada", model, 0, seq)
        await trainer.broker.append(subject, payload, deadline_s=PATIENCE_S, waiting_for="it")

    async with trainer.running(drains=False, gap_s=0.5):
        await trainer.send("create_model", 0, create())
        await trainer.train(1, 1)
        assert (await trainer.result(2)).state == "done"
        await write(4, b"garbage")
        await trainer.send("forward_backward", 3, loss(3))
        await trainer.send("optim_step", 5, step_body(5))
        ended = await trainer.result(5)
        assert (ended.state, ended.category) == ("failed", "server")
        assert "since operation 4 is not known" in ended.error
    await write(1, b"garbage", model="s2")
    await write(
        0, ModelOperation(kind="optim_step", model="s3:train:0", seq=0, body=b"").to_bytes(), "s3"
    )
    await write(0, b"garbage", model="s4", log="result")
    async with trainer.running(gap_s=0.5):
        assert (await trainer.result(3)).state == "done"
        assert "since operation 4 is not known" in (await trainer.result(4)).error
        with pytest.raises(StateError, match=r"entry \d+ of the operation log"):
            await trainer.send("optim_step", 6, step_body(6))
        await trainer.send("create_model", 0, create("s2"), model="s2:train:0")
        with pytest.raises(MessageError, match="cannot be read"):
            await trainer.send("optim_step", 1, step_body(1), model="s2:train:0")
        with pytest.raises(MessageError, match="cannot be optim_step"):
            await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        await trainer.send("create_model", 0, create("s4"), model="s4:train:0")
        await trainer.send("create_model", 0, create("s5"), model="s5:train:0")
        assert (await trainer.result(0, model="s5:train:0")).state == "done"
    kinds = [event.kind for event in await read_events(trainer.broker, SCOPE)]
    assert kinds.count("operation_unreadable") == 3  # s1 by either trainer, s2
    assert "result_unreadable" in kinds


async def test_what_computes_has_the_threads_of_the_configuration(trainer: Trainer) -> None:
    async with trainer.running(threads=2) as service:
        await trainer.send("create_model", 0, create())
        await trainer.result(0)
        thread = service.worker._thread
        assert await asyncio.wrap_future(thread.submit(torch.get_num_threads)) == 2
    torch.set_num_threads(1)


async def test_a_trainer_that_another_has_replaced_neither_applies_nor_writes(
    trainer: Trainer,
) -> None:
    """The first one is cut off with operations in its memory; the second one takes over."""
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await trainer.train(1, 2)
        assert (await trainer.result(4)).state == "done"
        log = OperationLog(trainer.broker, SCOPE)
        await log.claim()
        await trainer.send("optim_step", 5, step_body(5))
        with pytest.raises(FencedError, match="another trainer of job"):
            await asyncio.wait_for(trainer.task or asyncio.Future(), PATIENCE_S)
    assert await trainer.log.result("ada", OperationName(END, 5)) is None
    async with trainer.running():
        assert (await trainer.result(5)).state == "done"
        other = ModelOperation(kind="optim_step", model=MODEL, seq=6, body=b"{}")
        await trainer.log.append("ada", other)  # as a trainer does that is not yet fenced off
        assert (await trainer.result(6)).category == "user"
