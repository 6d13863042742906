"""A pool whose GPUs are known refuses what none of them holds, at submission and in a dry run."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.checks import CheckReply
from tinkermq.schemas.node import Gpu, NodeStatus, NodeSync
from tinkermq.schemas.wire.errors import PlacementError
from tinkermq.schemas.wire.subjects import BUCKET_NODES, node

from tests.actors.scheduler.conftest import Stack

SEVEN_B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
H100 = "NVIDIA H100 80GB HBM3", 81559 << 20
B200 = "NVIDIA B200", 183359 << 20


@asynccontextmanager
async def node_of(stack: Stack, name: str, *gpus: tuple[str, int]) -> AsyncIterator[None]:
    """Have a node with some GPUs, none of which computes; without any its slots are CPU shares."""
    found = [
        Gpu(index=index, model=model, memory_bytes=memory)
        for index, (model, memory) in enumerate(gpus)
    ]
    kind = "gpu" if gpus else "cpu"
    status = NodeStatus(node=name, host="h", slots=2, slot_kind=kind, gpus=found, time=time.time())

    async def sync(_: NodeSync) -> NodeStatus:
        return status

    async with await Service.start(stack.broker, name=name, description="a node") as service:
        await service.endpoint("sync", node(name, "sync"), NodeSync, sync)
        await Bucket(stack.broker, BUCKET_NODES, NodeStatus).put(name, status)
        yield


@pytest.fixture
def seven_b(tmp_path: Path) -> dict[str, Any]:
    """The section of a model of 7 B weights, of which there is no weight."""
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEVEN_B))
    return {"path": str(folder)}


async def _memory(stack: Stack, **config: Any) -> list[tuple[bool, str]]:
    reply = await stack.ask_for("try", stack.request(**config), CheckReply)
    return [(item.ok, item.detail) for item in reply.results if item.name == "memory"]


async def test_a_job_that_no_gpu_of_the_pool_holds_is_refused_with_figures(
    stack: Stack, seven_b: dict[str, Any]
) -> None:
    await stack.scheduler()
    async with node_of(stack, "small", H100, H100):
        await stack.until_nodes(1)
        with pytest.raises(PlacementError, match="optimiser states take 56") as caught:
            await stack.submit(model=seven_b)
        assert "H100 has 76.5 GiB for it" in caught.value.message
        assert "lora.rank" in caught.value.hint
        [(ok, text)] = await _memory(stack, model=seven_b)
        assert not ok
        assert "optimiser states take 56" in text
        assert await stack.jobs.list_jobs() == []


async def test_a_dry_run_tells_the_plan_for_the_gpus_that_hold_the_job(
    stack: Stack, seven_b: dict[str, Any]
) -> None:
    await stack.scheduler()
    async with node_of(stack, "small", H100, H100), node_of(stack, "large", B200, B200):
        await stack.until_nodes(2)
        [(ok, text)] = await _memory(stack, model=seven_b)
        assert ok
        assert text.startswith("2xB200, a model of 7.")
        assert "a step: " in text


async def test_nothing_is_estimated_where_a_job_may_run_on_a_cpu(
    stack: Stack, seven_b: dict[str, Any]
) -> None:
    await stack.scheduler()
    async with node_of(stack, "small", H100, H100), node_of(stack, "cpus"):
        await stack.until_nodes(2)
        assert await _memory(stack, model=seven_b) == []
