"""The trainer's service: what was answered takes effect once and in order, whatever ends it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.tinker.applying import Applying
from tinkermq.actors.tinker.checkpoints.kept import KeptByTrainer
from tinkermq.actors.tinker.service import TrainerService
from tinkermq.actors.tinker.states import States
from tinkermq.actors.tinker.wire import schema
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.operations import OperationLog
from tinkermq.broker.programs.server import NatsServer
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    AwaitResult,
    ModelInfo,
    ModelOperation,
    OperationKind,
    OperationResult,
    OperationTaken,
)
from tinkermq.schemas.tinker.sessions import ModelCurves
from tinkermq.schemas.wire.errors import MessageError, NobodyAnswersError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.contexts import job_context
from tests.support.models import make_tiny_model
from tests.support.tinker import BASE, open_trainer
from tests.support.waiting import PATIENCE_S

torch.set_num_threads(1)
SCOPE = JobScope("local", "service")
MODEL = "s1:train:0"
END = ModelName("s1", 0)
_BEFORE = f"tinker://{MODEL}/weights/before"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("service") / "base")


class Trainer:
    """A trainer in the test's process, and a client of it."""

    def __init__(self, url: str, broker: Broker, base: Path, folder: Path) -> None:
        self._url = url
        self.broker = broker
        self.log = OperationLog(broker, SCOPE)
        self._folder = folder
        self.states = States(folder)
        self._base = base

    def begin_anew(self) -> None:
        """Let the next trainer find no states."""
        self._folder = self._folder.with_name("others")
        self.states = States(self._folder)

    @contextlib.asynccontextmanager
    async def running(
        self, *, drains: bool = True, gap_s: float = 600.0, max_bytes: int = 1 << 30
    ) -> AsyncIterator[None]:
        """Serve; without `drains` the end is as sudden as that of a process."""
        async with await connect(self._url, name="trainer") as broker:
            config = JobConfig.model_validate(
                {
                    "model": {"path": str(self._base)},
                    "env": {"game": "", "hosts": 0, "num_val": 0},
                    "tinker": {"base": BASE},
                }
            )
            context = await job_context(broker, SCOPE, "trainer", config)
            adapters = await asyncio.to_thread(open_trainer, self._base, max_rank=16)
            about = ModelInfo(model="-", base=BASE, folder=str(self._base), arch="qwen3", rank=1)
            kept = KeptByTrainer(self._folder, max_bytes=max_bytes)
            applying = Applying(adapters, self.states, kept, about)
            service = TrainerService(context, adapters, applying, self.states, kept, gap_s=gap_s)
            task = asyncio.create_task(service.run())
            try:
                yield
                if drains:
                    context.stopping.set()
                    await asyncio.wait_for(task, PATIENCE_S)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await context.service.stop(0)

    async def send(
        self, kind: OperationKind, seq: int, body: Any, user: str = "ada", model: str = MODEL
    ) -> OperationTaken:
        """Submit an operation as soon as a trainer is there."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        operation = ModelOperation(kind=kind, model=model, seq=seq, body=raw)
        return await self._ask(user, "submit", operation, OperationTaken)

    async def result(
        self, seq: int, user: str = "ada", model: str = MODEL, wait_s: float = PATIENCE_S
    ) -> OperationResult:
        """Wait for a result."""
        wanted = AwaitResult(model=model, seq=seq, wait_s=wait_s)
        return await self._ask(user, "result", wanted, OperationResult)

    async def info(self, user: str = "ada") -> ModelInfo:
        """Ask what the model is."""
        return await self._ask(user, "info", AboutModel(model=MODEL), ModelInfo)

    async def checkpoint(self, path: str, user: str = "ada") -> ModelInfo:
        """Ask what a checkpoint holds."""
        return await self._ask(user, "checkpoint", AboutCheckpoint(path=path), ModelInfo)

    async def curves(self) -> ModelCurves:
        """Ask for the metrics of the model's steps."""
        return await self._ask("ada", "curves", AboutModel(model=MODEL), ModelCurves)

    async def _ask(self, user: str, method: str, request: Any, reply: Any) -> Any:
        subject = rpc(user, f"tinker-{SCOPE.job}", method)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await call(
                        self.broker,
                        subject,
                        request,
                        reply,
                        timeout_s=2 * PATIENCE_S,
                        waiting_for="the trainer",
                    )
                except NobodyAnswersError:  # it is starting
                    await asyncio.sleep(0.02)

    async def train(self, first: int, steps: int) -> None:
        """Send steps, each of a loss and an update, whose numbers begin with `first`."""
        for step in range(steps):
            seq = first + 2 * step
            await self.send("forward_backward", seq, loss(seq))
            await self.send("optim_step", seq + 1, step_body(seq + 1))

    async def weights(self, seq: int, name: str = "end") -> bytes:
        """Save the adapter as an operation, and return its file."""
        body = {"model_id": MODEL, "seq_id": seq, "path": name}
        await self.send("save_weights", seq, body)
        assert (await self.result(seq)).state == "done"
        folder = self.states.place_of("ada", CheckpointName(END, "weights", name))
        return (folder / "adapter_model.safetensors").read_bytes()


def create(session: str = "s1", rank: int = 4, base: str = BASE) -> dict[str, Any]:
    lora = {"rank": rank, "seed": 7}
    return {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": lora}


def step_body(seq: int) -> dict[str, Any]:
    return {"model_id": MODEL, "seq_id": seq, "adam_params": {"learning_rate": 0.01}}


def loss(seq: int, loss_fn: str = "cross_entropy") -> bytes:
    """Return a request whose data depends on its number."""
    rng = np.random.default_rng(seq)
    message = schema.ForwardBackwardRequest(model_id=MODEL, seq_id=seq, loss_fn=loss_fn)
    for _ in range(3):
        tokens = rng.integers(8, 264, 13)
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        for name, array, dtype in (
            ("target_tokens", tokens[1:].astype("<i8"), 2),
            ("weights", np.ones(12, "<f4"), 1),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), dtype
            tensor.shape.append(12)
    return message.SerializeToString()


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
    assert (await trainer.log.read_all())[-1][1].seq == 13  # what stands behind the last step
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
        before = await trainer.weights(6, "before")
        held = await trainer.checkpoint(_BEFORE)
        assert (held.base, held.rank) == (BASE, 4)
        for path, user in ((f"tinker://{MODEL}/weights/none", "ada"), (_BEFORE, "bob")):
            with pytest.raises(NotFoundError, match="there is no checkpoint"):
                await trainer.checkpoint(path, user)
        await trainer.train(7, 1)
        assert (await trainer.result(8)).state == "done"
        assert await trainer.weights(9, "behind") != before


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
        told = [seq for _, one in await trainer.log.read_all() for seq in [one.seq]]
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
