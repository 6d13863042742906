"""Weights from a learner's memory into vLLM's workers, by gloo in the place of NCCL."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tinkermq.actors.engine.engine import Engine, KvOnSwap, Sampling
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.weights.broadcast import BroadcastReceiver, Sender
from tinkermq.actors.weights.follower import fetch_version
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.weights import JoinRound, Manifest, Round
from tinkermq.schemas.wire.errors import BrokerError, EngineError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from tests.actors.engine.conftest import InVllm
from tests.support.models import bytes_of, changed, loaded, plain_logprobs
from tests.support.vllm_start import configured

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package")]
PROMPT = np.arange(40, 80, dtype=np.int32)
MEET_S = 3.0


def as_bytes(weights: dict[str, torch.Tensor]) -> dict[str, TensorBytes]:
    """Return tensors as a learner publishes them."""
    return {
        name: TensorBytes("float32", tuple(one.shape), memoryview(one.numpy().tobytes()))
        for name, one in weights.items()
    }


class ObservedSender(Sender):
    """Tells of each request for a place in a round, before that round can begin."""

    on_request: Callable[[], None] | None = None

    async def _join(self, request: JoinRound) -> Round:
        if request.port and self.on_request is not None:
            self.on_request()
        return await super()._join(request)


class Learner:
    """Publishes versions of a model from its memory, and remembers them as models."""

    def __init__(self, broker: Broker, scope: JobScope, folder: Path, model: Any) -> None:
        self.broker, self.scope = broker, scope
        self.sender = ObservedSender(broker, scope, folder, window_s=0.05, meet_s=MEET_S)
        self.store = WeightStore(broker, scope, "nccl", holder=self.sender)
        self.versions: dict[int, PreTrainedModel] = {}
        self._model = model
        self._weights: dict[int, dict[str, torch.Tensor]] = {}

    async def start(self) -> None:
        self.service = await Service.start(self.broker, name="learner", description="a learner")
        await self.sender.open(self.service)
        self.serving = asyncio.create_task(self.sender.serve())

    async def close(self) -> None:
        self.serving.cancel()
        await asyncio.wait([self.serving])
        await self.service.stop(0)

    async def publish(self, version: int) -> Manifest:
        weights = self._weights[version] = changed(self._model, version)
        self.versions[version] = loaded(self._model, weights)
        return await self.store.publish(version, as_bytes(weights))

    def held(self, manifest: Manifest) -> torch.Tensor:
        return self.sender._held[manifest.location].payload


@pytest_asyncio.fixture(loop_scope="package")
async def scope(nats_server: NatsServer) -> AsyncIterator[JobScope]:
    scope = JobScope("local", "transfer")
    async with await connect(nats_server.url, name="streams") as broker:
        await create_job_streams(broker, scope, LimitsConfig())
        yield scope
        await delete_job_streams(broker, scope)


@pytest_asyncio.fixture(loop_scope="package")
async def learner(
    nats_server: NatsServer, scope: JobScope, model: PreTrainedModel, tmp_path: Path
) -> AsyncIterator[Learner]:
    async with await connect(nats_server.url, name="learner") as broker:
        made = Learner(broker, scope, tmp_path, model)
        await made.start()
        yield made
        await made.close()


@pytest_asyncio.fixture(loop_scope="package")
async def store(nats_server: NatsServer, scope: JobScope) -> AsyncIterator[WeightStore]:
    """The weights as a generator opens them."""
    async with await connect(nats_server.url, name="generator") as broker:
        yield WeightStore(broker, scope, "nccl")


@pytest_asyncio.fixture(loop_scope="package")
async def vllm(folder: Path, in_vllm: InVllm) -> AsyncIterator[Any]:
    from tinkermq.actors.engine.vllm.vllm_engine import start_vllm

    engine = await start_vllm(configured(folder), base=await in_vllm(folder))
    async with engine._model._paused(clear_cache=True):
        """Forget what versions of the same numbers have computed in other tests."""
    yield engine
    await engine.close()


async def load_version(
    store: WeightStore, engines: dict[str, Engine], manifest: Manifest, kv: KvOnSwap
) -> None:
    load = await fetch_version(store, engines, manifest)
    await load(kv)


async def check(engine: Engine, learner: Learner, version: int, name: str = "") -> None:
    """Generate, and compare with the model of a version."""
    result = await engine.generate(PROMPT, Sampling(12), request_id=f"{name}{version}")
    assert set(result.versions.tolist()) == {version}
    expected = plain_logprobs(learner.versions[version], PROMPT, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


async def test_versions_go_from_the_learners_memory_into_the_workers_while_requests_run(
    learner: Learner, store: WeightStore, vllm: Any
) -> None:
    engines = {MAIN: vllm}
    await load_version(store, engines, await learner.publish(1), "keep")
    await check(vllm, learner, 1)
    running = [
        asyncio.ensure_future(vllm.generate(PROMPT, Sampling(110), request_id=f"long {n}"))
        for n in range(24)
    ]
    group = vllm._receiver._member.group
    for version in (2, 3):
        await load_version(store, engines, await learner.publish(version), "keep")
        assert vllm._receiver._member.group == group  # formed once
    results = await asyncio.gather(*running)
    assert any(len(set(result.versions.tolist())) > 1 for result in results)
    for result in results:
        assert result.versions.tolist() == sorted(result.versions.tolist())
    await check(vllm, learner, 3)
    assert not list(vllm._files._root.iterdir())  # no file was written


async def test_one_who_joins_and_leaves_between_versions_holds_nobody_up(
    learner: Learner, store: WeightStore, vllm: Any, nats_server: NatsServer, scope: JobScope
) -> None:
    engines = {MAIN: vllm}
    async with await connect(nats_server.url, name="other") as broker:
        receiver = BroadcastReceiver(broker, scope, meet_s=MEET_S)
        other = WeightStore(broker, scope, receiver=receiver)
        for version in (1, 2):
            manifest = await learner.publish(version)
            _, fetched = await asyncio.gather(
                load_version(store, engines, manifest, "keep"), other.fetch(manifest)
            )
            payload = b"".join(bytes_of(one) for one in fetched.values())
            assert payload == bytes(learner.held(manifest).numpy())
            await check(vllm, learner, version)
        receiver.close()
        await load_version(store, engines, await learner.publish(3), "keep")
        await check(vllm, learner, 3)


async def test_damage_is_taken_again_while_vllm_stands_still_and_then_an_error(
    learner: Learner, store: WeightStore, vllm: Any
) -> None:
    engines = {MAIN: vllm}
    await load_version(store, engines, await learner.publish(1), "keep")
    manifest = await learner.publish(2)
    held = learner.held(manifest)
    held[1000] ^= 1
    asked = 0

    def repair() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            held[1000] ^= 1

    learner.sender.on_request = repair
    await load_version(store, engines, manifest, "keep")
    assert asked == 2
    learner.sender.on_request = None
    await check(vllm, learner, 2)
    manifest = await learner.publish(3)
    learner.held(manifest)[1000] ^= 1
    with pytest.raises(BrokerError, match="version 3 is damaged: it has digest"):
        await load_version(store, engines, manifest, "keep")
    with pytest.raises(TimeoutError):  # nothing is generated by weights that are half another's
        await asyncio.wait_for(vllm.generate(PROMPT, Sampling(1), request_id="still"), 0.3)
    await load_version(store, engines, await learner.publish(4), "recompute")
    await check(vllm, learner, 4)


async def test_weights_that_come_in_part_are_taken_whole_by_the_next_round(
    learner: Learner, store: WeightStore, vllm: Any
) -> None:
    from tinkermq.actors.engine.vllm.vllm_engine import update_of

    engines = {MAIN: vllm}
    await load_version(store, engines, await learner.publish(1), "keep")
    manifest = await learner.publish(2)
    update = update_of(manifest.tensors, manifest.num_bytes, digest=manifest.digest)
    path = learner.sender._folder / "part"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(manifest.num_bytes))
    part = len(update["names"]) // 2 + 1  # ends within a layer
    cut = {key: value[:part] for key, value in update.items() if isinstance(value, list)}
    async with vllm._model._swapping_of("", "keep"):
        kind, _ = await vllm._model.take_weights({**update, **cut, "path": str(path)})
        assert kind == "damaged"
    await load_version(store, engines, manifest, "keep")
    await check(vllm, learner, 2)


async def test_a_learner_that_has_gone_ends_the_round_and_vllm_goes_on_with_what_it_has(
    learner: Learner, store: WeightStore, vllm: Any
) -> None:
    engines = {MAIN: vllm}
    await load_version(store, engines, await learner.publish(1), "keep")
    manifest = await learner.publish(2)
    await learner.store.remove(2)
    with pytest.raises(NotFoundError, match="not in the learner's memory"):
        await load_version(store, engines, manifest, "keep")
    await check(vllm, learner, 1)
    outcome = await vllm._model.join_learner({"address": "127.0.0.1", "port": 1})
    assert outcome[0] == "failed"
    assert "cannot be reached from here" in outcome[1]
    await check(vllm, learner, 1, "again")


async def test_weights_that_do_not_fit_are_refused_before_vllm_stands_still(
    learner: Learner, store: WeightStore, vllm: Any
) -> None:
    await load_version(store, {MAIN: vllm}, await learner.publish(1), "keep")
    wrong = {"x": TensorBytes("float32", (1,), memoryview(bytes(4)))}
    manifest = await learner.store.publish(2, wrong)
    with pytest.raises(EngineError, match=r"missing: .*unknown: x"):
        await load_version(store, {MAIN: vllm}, manifest, "keep")
    await check(vllm, learner, 1)


async def test_workers_map_the_version_that_their_machine_shares_and_no_copy_is_made(
    nats_server: NatsServer, scope: JobScope, vllm: Any, model: PreTrainedModel
) -> None:
    async with await connect(nats_server.url, name="object") as broker:
        sharing = WeightStore(broker, scope, shared_bytes=1 << 28)
        big = {"pad": TensorBytes("float32", (1 << 18,), memoryview(bytes(1 << 20)))}
        weights = changed(model, 5)
        manifest = await sharing.publish(5, as_bytes(weights) | big)
        tensors = await WeightStore(broker, scope, shared_bytes=1 << 28).fetch(manifest)
        del tensors["pad"]
        update = vllm._update(5, vllm._checked(tensors))
        assert Path(update["path"]).name.endswith(manifest.digest)
        assert not list(vllm._files._root.iterdir())
        await vllm.load_weights(5, tensors)
        result = await vllm.generate(PROMPT, Sampling(12), request_id="shared")
        expected = plain_logprobs(loaded(model, weights), PROMPT, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
