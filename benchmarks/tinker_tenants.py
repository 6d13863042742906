"""Many users of one Tinker service: their memory, speed and turns, and the bytes of their logs.

    python -m benchmarks.tinker_tenants

Trainers run as a user has them, in a stack of processes; clients speak to them over the broker,
with bodies as the SDK sends them (protobuf, zstd). Compared are tenants on one base with as many
services that have a base each; models mixed in one pass with the same alone; a light tenant alone
and beside one with ten times the load; and
sessions on room for fewer adapters with the same sessions on room for all.
"""

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from tinkermq.actors.policy.tiny_models import make_model
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.streams import stream_info
from tinkermq.broker.presence import list_presences
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from tinkermq.schemas.tinker.operation import (
    AwaitResult,
    ModelOperation,
    OperationKind,
    OperationResult,
    OperationTaken,
)
from tinkermq.schemas.wire.errors import NobodyAnswersError
from tinkermq.schemas.wire.subjects import rpc

from benchmarks.processes import rss_mb
from benchmarks.report import Report, parser
from benchmarks.stack import Stack

BASE, VOCAB, RANK = "org/base", 24576, 8
_START_S = 120.0


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    width: int
    layers: int
    tenants: int
    steps: int
    datums: int
    tokens: int
    """Of each datum."""
    sessions: int
    room: int
    """Adapters in memory."""


FULL = Size(512, 8, 8, 2, 2, 64, 64, 8)
QUICK = Size(64, 2, 2, 2, 2, 32, 4, 2)


class Service:
    """One service, and clients of it."""

    def __init__(self, stack: Stack, record: JobRecord, base: str) -> None:
        self._stack = stack
        self.record = record
        self.base = base

    async def ask(self, user: str, method: str, request: Any, reply: Any) -> Any:
        """Ask the trainer for a user."""
        subject = rpc(user, f"tinker-{self.record.job}", method)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return await call(
                    self._stack.connection,
                    subject,
                    request,
                    reply,
                    timeout_s=_START_S,
                    waiting_for="the trainer",
                )
            except NobodyAnswersError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def mb(self) -> float:
        """Return the resident memory of its processes."""
        entries = await list_presences(self._stack.connection, f"{self.record.scope.key}.")
        return sum(rss_mb(entry.value.pid) or 0.0 for entry in entries)

    async def log_bytes(self) -> dict[str, int]:
        """Return what its streams hold."""
        scope, found = self.record.scope, dict[str, int]()
        for name in (scope.stream_operation, scope.stream_result):
            found[name] = int((await stream_info(self._stack.connection, name))["state"]["bytes"])
        return found


class Client:
    """A program of one user with one model."""

    def __init__(self, service: Service, user: str, session: str, size: Size) -> None:
        self._service, self._user, self._size = service, user, size
        self._model = f"{session}:train:0"
        self._session = session
        self._seq = 0
        self.sent_bytes = 0

    async def make(self) -> None:
        """Make the model."""
        lora = {"rank": RANK, "seed": 7}
        body = {"session_id": self._session, "model_seq_id": 0, "base_model": self._service.base}
        await self._send("create_model", json.dumps({**body, "lora_config": lora}).encode())
        await self._wait()

    async def step(self, passes: int = 1) -> float:
        """Make one step, the update sent before the losses are known; return its seconds."""
        began = time.perf_counter()
        for _ in range(passes):
            self._seq += 1
            await self._send("forward_backward", self._loss(), is_zstd=True)
        self._seq += 1
        params = {"adam_params": {"learning_rate": 1e-4}}
        body = {"model_id": self._model, "seq_id": self._seq, **params}
        await self._send("optim_step", json.dumps(body).encode())
        await self._wait()
        return time.perf_counter() - began

    async def _send(self, kind: OperationKind, body: bytes, *, is_zstd: bool = False) -> None:
        operation = ModelOperation(
            kind=kind, model=self._model, seq=self._seq, body=body, is_zstd=is_zstd
        )
        self.sent_bytes += len(operation.to_bytes())
        await self._service.ask(self._user, "submit", operation, OperationTaken)

    async def _wait(self) -> None:
        wanted = AwaitResult(model=self._model, seq=self._seq, wait_s=60)
        while True:
            found = await self._service.ask(self._user, "result", wanted, OperationResult)
            if found.state == "failed":
                raise RuntimeError(found.error)
            if found.state == "done":
                return

    def _loss(self) -> bytes:
        rng, size = np.random.default_rng(self._seq), self._size
        made = wire.ForwardBackwardRequest(
            model_id=self._model, seq_id=self._seq, loss_fn="cross_entropy"
        )
        for _ in range(size.datums):
            ids = rng.integers(8, VOCAB, size.tokens + 1)
            datum = made.data.add()
            datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
            for name, array, dtype in (
                ("target_tokens", ids[1:].astype("<i8"), 2),
                ("weights", np.ones(size.tokens, "<f4"), 1),
            ):
                tensor = datum.loss_fn_inputs[name]
                tensor.dense, tensor.dtype = array.tobytes(), dtype
                tensor.shape.append(size.tokens)
        packed: bytes = pa.Codec("zstd").compress(made.SerializeToString(), asbytes=True)
        return packed


class Pools:
    """A stack, and the services that are started in it."""

    def __init__(self, stack: Stack, folder: Path, size: Size) -> None:
        self._stack, self._size = stack, size
        self.folder = folder / "base"
        model: Any = make_model(
            kind="llama", width=size.width, layers=size.layers, heads=4, vocab_size=VOCAB
        )
        model.save_pretrained(self.folder)
        self._runs = folder / "runs"
        self._num = 0

    async def start(self, *, threads: int, **tinker: Any) -> Service:
        """Start a service; who asks it waits until it is there."""
        self._num += 1
        base = f"{BASE}-{self._num}"
        config = {
            "model": {"path": str(self.folder), "tokenizer": str(self.folder)},
            "env": {"game": "", "hosts": 0, "num_val": 0},
            "learner": {"threads": threads},
            "generator": {"count": 0},
            "tinker": {"base": base, "micro_batch_tokens": self.micro_tokens} | tinker,
            "output_dir": str(self._runs),
        }
        record = await Pool(self._stack.connection).submit(config, kind="tinker")
        return Service(self._stack, record, base)

    @property
    def micro_tokens(self) -> int:
        """A pass over one client's data is one micro-batch."""
        return self._size.datums * self._size.tokens

    async def stop(self, *services: Service) -> None:
        """End services."""
        for service in services:
            await Pool(self._stack.connection).stop(service.record.job, now=True)

    async def clients(self, services: list[Service], count: int, users: int) -> list[Client]:
        """Make clients, by turns of the services and of users."""
        self._num += 1
        made = [
            Client(services[n % len(services)], f"user{n % users}", f"s{self._num}-{n}", self._size)
            for n in range(count)
        ]
        await asyncio.gather(*(one.make() for one in made))
        return made


async def train(clients: list[Client], steps: int) -> float:
    """Let all clients make steps at the same time; return the seconds."""

    async def run(client: Client) -> None:
        for _ in range(steps):
            await client.step()

    began = time.perf_counter()
    await asyncio.gather(*(run(one) for one in clients))
    return time.perf_counter() - began


async def one_base(pools: Pools, size: Size, report: Report) -> None:
    """Compare tenants of one service, mixed and not, with services of one tenant each."""
    cores = os.cpu_count() or 1
    mixed = {
        "mixed_micro_batches": True,
        "micro_batch_tokens": size.tenants * pools.micro_tokens,
    }
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("one", 1, {}),
        ("one, mixed", 1, mixed),
        (f"{size.tenants}", size.tenants, {}),
    ]
    rows: list[list[str]] = []
    found: list[tuple[float, float]] = []
    for name, num, tinker in kinds:
        threads = max(1, cores // num)
        starting = (pools.start(threads=threads, **tinker) for _ in range(num))
        services = list(await asyncio.gather(*starting))
        clients = await pools.clients(services, size.tenants, size.tenants)
        await train(clients, 1)
        seconds = await train(clients, size.steps)
        mb = sum([await one.mb() for one in services])
        speed = size.tenants * size.steps * pools.micro_tokens / seconds
        found.append((mb, speed))
        rows.append([name, str(size.tenants), f"{mb:,.0f} MB", f"{speed:,.0f}"])
        await pools.stop(*services)
    report.table("tenants on one base", ["services", "tenants", "memory", "tokens/s"], rows)
    (mb, speed), (_, speed_mixed), (mb_each, speed_each) = found
    report.at_most("memory, against a base for each", mb / mb_each, 0.25)
    report.at_least("tokens/s, against a base for each", speed / speed_each, None)
    report.at_least("tokens/s mixed, against a base for each", speed_mixed / speed_each, 0.9)


def mixed_difference(folder: Path, size: Size, report: Report) -> None:
    """Compare log-probs of models that learned beside each other with those of the same alone."""
    told: list[list[np.ndarray]] = []
    for mixed in (False, True):
        trainer = AdapterTrainer.open(str(folder), base_model=BASE, mixed=mixed)
        models = [f"m{n}" for n in range(size.tenants)]
        for model in models:
            trainer.create(model, LoraSpec(RANK))
        told.append([])
        for step in range(size.steps + 1):
            losses = [
                trainer.begin(model, _data(size, (step, n)), "cross_entropy")
                for n, model in enumerate(models)
            ]
            while left := [one for one in losses if one.num_left]:
                trainer.advance(left)
            for model, loss in zip(models, losses, strict=True):
                trainer.optim_step(model, AdamParams(1e-3))
                told[-1] += loss.result().logprobs
    apart = max(float(np.abs(a - b).max()) for a, b in zip(*told, strict=True))
    what = f"largest difference of a log-prob, mixed and alone, after {size.steps} steps"
    report.at_most(what, apart, 1e-3)


def _data(size: Size, seed: tuple[int, int]) -> list[Datum]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(8, VOCAB, (size.datums, size.tokens + 1))
    ones = np.ones(size.tokens, np.float32)
    return [
        Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:], "weights": ones}) for row in ids
    ]


async def fairness(pools: Pools, service: Service, size: Size, report: Report) -> None:
    """Time a light tenant's steps, alone and beside one whose steps have ten passes."""
    light, heavy = await pools.clients([service], 2, 2)
    await light.step()
    alone = median([await light.step() for _ in range(2 * size.steps)])

    async def load() -> None:
        while True:
            await heavy.step(10)

    loading = asyncio.create_task(load())
    beside = median([await light.step() for _ in range(2 * size.steps)])
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    most = None if size is QUICK else 2.0  # steps of milliseconds tell nothing
    report.at_most("a light step beside ten times its load", beside / alone, most)


async def room(pools: Pools, service: Service, size: Size, report: Report) -> None:
    """Train more sessions than adapters fit; measure the bytes of the log on the way."""
    small = await pools.start(threads=1, adapters_in_memory=size.room)
    took: list[float] = []
    for one in (service, small):
        clients = await pools.clients([one], size.sessions, 8)
        took.append(await train(clients, size.steps))
        if one is service:
            await log_bytes(service, clients, pools, size, report)
        await pools.stop(one)
    what = f"{size.sessions} sessions on room for {size.room} adapters, against room for all"
    report.at_most(what, took[1] / took[0], None)


async def log_bytes(
    service: Service, clients: list[Client], pools: Pools, size: Size, report: Report
) -> None:
    """Measure what was sent for a trained token, and what the log holds of it once it is idle."""
    tokens = size.sessions * size.steps * pools.micro_tokens
    sent = sum(one.sent_bytes for one in clients)
    report.at_most("sent to the log for a trained token", sent / tokens, None, "B")
    operations, results = (await service.log_bytes()).values()
    deadline = time.monotonic() + 30
    while operations and time.monotonic() < deadline:  # idle models are written to disk
        await asyncio.sleep(0.5)
        operations, results = (await service.log_bytes()).values()
    report.at_most("log for a trained token, trimmed", operations / tokens, None, "B")
    report.at_most("results for a trained token, kept a day", results / tokens, None, "B")


async def measure(size: Size, report: Report) -> None:
    """Measure everything in one stack."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        async with Stack(folder, slots=64) as stack:
            pools = Pools(stack, folder, size)
            service = await pools.start(threads=1)
            await fairness(pools, service, size, report)
            await room(pools, service, size, report)
            await asyncio.to_thread(mixed_difference, pools.folder, size, report)
            if size is not QUICK:
                await one_base(pools, size, report)


def main() -> None:
    """Parse the arguments, measure, and report."""
    arguments = parser(__doc__).parse_args()
    report = Report("tinker_tenants", "Many users of a Tinker service", quick=arguments.quick)
    asyncio.run(measure(QUICK if arguments.quick else FULL, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
