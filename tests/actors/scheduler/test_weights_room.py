"""A learner asks the scheduler for room for its versions; the bound is that of its model."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from tinkermq.actors.learner.evaluations import MOST_EVALUATIONS
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.runtime import JobContext
from tinkermq.actors.training.parallel import snapshot, snapshot_bytes
from tinkermq.actors.weights.history import WeightHistory
from tinkermq.actors.weights.publisher import Publisher, num_versions
from tinkermq.actors.weights.store import room_for
from tinkermq.actors.weights.tensors import CopiedWeights, layout
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import WEIGHTS_BYTES, create_shared, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.user_records import UserStore, create_user_stores
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.user import QuotaReply, UserRecord
from tinkermq.schemas.weights import WeightsBound, WeightsRoom
from tinkermq.schemas.wire.errors import BrokerError, StateError, StorageError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc
from torch import nn
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.actors.scheduler.conftest import Stack
from tests.support.contexts import job_context
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full

LARGE = 1 << 31


def config_of(**sections: object) -> JobConfig:
    given = {"model": {"path": "m"}, "env": {"game": "bandit"}, **sections}
    return JobConfig.model_validate(given)


async def bound_of(stack: Stack, job: JobRecord) -> int:
    info = await stream_info(stack.broker, f"OBJ_{job.scope.object_weights}")
    return int(info["config"]["max_bytes"])


async def ask(stack: Stack, job: str, wanted: int, least: int = 1) -> int:
    answer = await call(
        stack.broker,
        rpc("local", "scheduler", "weights-room"),
        WeightsRoom(job=job, wanted_bytes=wanted, least_bytes=least),
        WeightsBound,
        timeout_s=PATIENCE_S,
        waiting_for="room",
    )
    return answer.num_bytes


def publisher_of(context: JobContext, models: Mapping[str, nn.Module]) -> Publisher:
    """Return what publishes these models; no version is."""
    size = partial(snapshot_bytes, models)
    return Publisher(
        context, lambda *_: CopiedWeights(), size, kind="full", num_evaluated=MOST_EVALUATIONS
    )


async def test_a_learner_gets_the_bound_of_its_model_and_what_it_may_hold_counts(
    stack: Stack,
) -> None:
    job = await stack.running()
    assert await bound_of(stack, job) == WEIGHTS_BYTES
    with torch.device("meta"):
        models = {MAIN: nn.Linear(1 << 15, 1 << 15, bias=False)}
    config = config_of(generator={"dtype": "bfloat16"})
    context = await job_context(stack.broker, job.scope, "learner", config)
    publisher = publisher_of(context, models)
    await publisher.reserve()
    wanted, _ = num_versions(config, MOST_EVALUATIONS, differences=True)
    assert await bound_of(stack, job) == room_for(wanted, LARGE)
    held = (await stack.until(job, lambda now: now.stored_bytes > LARGE)).stored_bytes
    assert held > room_for(wanted, LARGE)
    await publisher.reserve()  # has it already
    assert await bound_of(stack, job) == room_for(wanted, LARGE)


async def test_what_a_killed_learner_has_left_takes_no_room(stack: Stack) -> None:
    job = await stack.running()
    context = await job_context(stack.broker, job.scope, "learner", config_of())
    bucket = job.scope.object_weights
    objects = ObjectStore(stack.broker, bucket)
    await objects.put("unpublished", [memoryview(b"1" * 9999)], deadline_s=PATIENCE_S)
    await stack.broker.append(
        f"$O.{bucket}.C.killed", b"2" * 9999, deadline_s=PATIENCE_S, waiting_for="a part"
    )
    await publisher_of(context, {MAIN: nn.Linear(1, 1)}).reserve()
    assert (await stream_info(stack.broker, f"OBJ_{bucket}"))["state"]["messages"] == 0


async def test_jobs_that_ask_for_room_at_once_keep_to_the_quota_together(stack: Stack) -> None:
    first, other = await stack.running(slots=4), await stack.submit()
    other = await stack.until(other, "RUNNING")
    held = sum([(await stack.get(job)).stored_bytes for job in (first, other)])
    await create_user_stores(stack.broker)
    quota = held + 3 * LARGE // 2
    await UserStore(stack.broker).create(
        UserRecord(user="local", key_hash="", created=0.0, max_stored_bytes=quota)
    )

    async def is_known() -> bool:
        told = await stack.ask_for("quota", Empty(), QuotaReply)
        return told.max_stored_bytes == quota

    await eventually(is_known, "the scheduler to know of the quota")
    asked = (ask(stack, job.job, LARGE, LARGE) for job in (first, other))
    granted = await asyncio.gather(*asked, return_exceptions=True)
    assert sorted(type(one).__name__ for one in granted) == ["QuotaError", "int"]


async def test_of_a_server_without_that_much_room_a_learner_gets_the_least_or_an_error(
    tmp_path: Path,
) -> None:
    with NatsServer(tmp_path / "small", max_store_bytes=64 << 30) as server:
        async with await connect(server.url, name="client") as broker:
            await create_shared(broker)
            small = Stack(broker, tmp_path)
            job = await small.running()
            assert await ask(small, job.job, 1 << 40, 2 << 30) == 2 << 30
            assert await bound_of(small, job) == 2 << 30
            with pytest.raises(BrokerError, match="need 549,755,813,888 bytes") as raised:
                await ask(small, job.job, 1 << 40, 1 << 39)
            assert "raise max_file_store" in raised.value.hint
            small.do(job, "learner", "done")
            await small.until(job, "COMPLETED")
            with pytest.raises(StateError, match="is COMPLETED and publishes no weights"):
                await ask(small, job.job, 1 << 30)
            await small.close()


async def test_a_disk_that_cannot_hold_the_least_is_named_at_the_start(
    stack: Stack, tmp_path: Path
) -> None:
    config = config_of(weights={"transport": "file", "folder": str(tmp_path)})
    with torch.device("meta"):
        models = {MAIN: nn.Linear(1 << 24, 1 << 24, bias=False)}
    job = await stack.running()
    context = await job_context(stack.broker, job.scope, "learner", config)
    with pytest.raises(StorageError, match=r"the disk of weights\.folder has room for"):
        await publisher_of(context, models).reserve()


@pytest.mark.parametrize(
    ("sections", "differences", "versions"),
    [
        ({"env": {"game": "bandit", "num_val": 0}}, False, (3, 2)),
        ({}, False, (8, 3)),
        ({}, True, (10, 5)),
        ({"self_play": {"past_share": 0.5, "pool_size": 4}}, False, (12, 7)),
        ({"self_play": {"past_share": 0.5, "pool_size": 4}}, True, (18, 13)),
    ],
)
def test_versions_that_may_be_needed_follow_from_the_configuration(
    sections: dict[str, object], differences: bool, versions: tuple[int, int]
) -> None:
    config = config_of(**sections)
    assert num_versions(config, MOST_EVALUATIONS, differences=differences) == versions


def test_tied_tensors_count_once_and_lie_in_one_buffer() -> None:
    first, second, other = nn.Linear(3, 8), nn.Linear(3, 8, bias=False), nn.Linear(1, 1)
    second.weight = first.weight
    models = {MAIN: nn.Sequential(first, second), "role": other}
    assert snapshot_bytes(models, torch.bfloat16) == 2 * (24 + 8 + 2)
    tensors = snapshot(models, torch.bfloat16)
    views = {name: cast("memoryview", one.data) for name, one in tensors.items()}
    assert sum(len(view) for view in views.values()) == 68
    assert len({id(view.obj) for view in views.values()}) == 1
    for name, one in (("0.weight", first.weight), ("role/bias", other.bias)):
        raw = one.detach().bfloat16().flatten().view(torch.uint8).numpy().tobytes()
        assert bytes(views[name]) == raw


def test_what_a_model_holds_in_float32_is_published_in_it() -> None:
    config = Glm4MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    models: dict[str, nn.Module] = {MAIN: Glm4MoeForCausalLM(config)}
    tensors = snapshot(models, torch.bfloat16)
    wide = [name for name, one in tensors.items() if one.dtype == "float32"]
    assert wide == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    num_bytes = sum(len(cast("memoryview", one.data)) for one in tensors.values())
    assert num_bytes == snapshot_bytes(models, torch.bfloat16)
    history = WeightHistory(enabled=True, full_snapshot_every=4)
    assert history.keeps(layout(tensors))
    assert not history.keeps(layout(snapshot(models, torch.float32)))
