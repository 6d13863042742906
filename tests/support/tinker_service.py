"""A trainer's service in the test's process, and a client of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders
from tinkermq.actors.tinker.adapter_cache import AdapterStates
from tinkermq.actors.tinker.apply import OperationApplier
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.service import TrainerService
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.operations import OperationLog
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    AwaitResult,
    ModelCurves,
    ModelInfo,
    ModelOperation,
    OperationKind,
    OperationResult,
    OperationTaken,
)
from tinkermq.schemas.wire.errors import NobodyAnswersError
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.contexts import job_context
from tests.support.tinker import BASE, open_trainer
from tests.support.waiting import PATIENCE_S

SCOPE = JobScope("local", "service")
MODEL = "s1:train:0"
END = ModelName("s1", 0)


class Trainer:
    """A trainer in the test's process, and a client of it."""

    def __init__(self, url: str, broker: Broker, base: Path, folder: Path) -> None:
        self._url = url
        self.broker = broker
        self.log = OperationLog(broker, SCOPE)
        self._folder = folder
        self.states = AdapterStates(folder)
        self._base = base
        self.task: asyncio.Task[None] | None = None

    def begin_anew(self) -> None:
        """Let the next trainer find no states."""
        self._folder = self._folder.with_name("others")
        self.states = AdapterStates(self._folder)

    @property
    def folders(self) -> CheckpointFolders:
        """The named checkpoints of the trainer."""
        return CheckpointFolders(self._folder)

    @contextlib.asynccontextmanager
    async def running(
        self,
        *,
        drains: bool = True,
        gap_s: float = 600.0,
        max_bytes: int = 1 << 30,
        threads: int = 1,
        **tinker: Any,
    ) -> AsyncIterator[TrainerService]:
        """Serve; without `drains` the end is as sudden as that of a process."""
        async with await connect(self._url, name="trainer") as broker:
            config = JobConfig.model_validate(
                {
                    "model": {"path": str(self._base)},
                    "env": {"game": "", "hosts": 0, "num_val": 0},
                    "learner": {"threads": threads},
                    "tinker": {"base": BASE, **tinker},
                }
            )
            context = await job_context(broker, SCOPE, "trainer", config)
            mixed = config.tinker.mixed_micro_batches
            adapters = await asyncio.to_thread(open_trainer, self._base, max_rank=16, mixed=mixed)
            about = ModelInfo(model="-", base=BASE, folder=str(self._base), arch="qwen3", rank=1)
            catalogue = Catalogue(self._folder, max_bytes=max_bytes)
            applying = OperationApplier(adapters, catalogue, about)
            service = TrainerService(
                context, adapters, applying, self.states, catalogue, gap_s=gap_s
            )
            task = self.task = asyncio.create_task(service.run())
            try:
                yield service
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
        return await self.ask(user, "submit", operation, OperationTaken)

    async def result(
        self, seq: int, user: str = "ada", model: str = MODEL, wait_s: float = 60.0
    ) -> OperationResult:
        """Wait for a result, at most a minute: the longest that the service accepts."""
        wanted = AwaitResult(model=model, seq=seq, wait_s=wait_s)
        return await self.ask(user, "result", wanted, OperationResult)

    async def info(self, user: str = "ada") -> ModelInfo:
        """Ask what the model is."""
        return await self.ask(user, "info", AboutModel(model=MODEL), ModelInfo)

    async def checkpoint(self, path: str, user: str = "ada") -> ModelInfo:
        """Ask what a checkpoint holds."""
        return await self.ask(user, "checkpoint", AboutCheckpoint(path=path), ModelInfo)

    async def curves(self) -> ModelCurves:
        """Ask for the metrics of the model's steps."""
        return await self.ask("ada", "curves", AboutModel(model=MODEL), ModelCurves)

    async def ask(self, user: str, method: str, request: Any, reply: Any) -> Any:
        """Ask for something as soon as a trainer is there."""
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
        folder = self.folders.find("ada", CheckpointName(END, "weights", name)).folder
        return (folder / "adapter_model.safetensors").read_bytes()


def create(session: str = "s1", rank: int = 4, base: str = BASE) -> dict[str, Any]:
    lora = {"rank": rank, "seed": 7}
    return {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": lora}


def step_body(seq: int) -> dict[str, Any]:
    return {"model_id": MODEL, "seq_id": seq, "adam_params": {"learning_rate": 0.01}}


def loss(seq: int, loss_fn: str = "cross_entropy") -> bytes:
    """Return a request whose data depends on its number."""
    rng = np.random.default_rng(seq)
    message = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=seq, loss_fn=loss_fn)
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
