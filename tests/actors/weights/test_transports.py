"""Where new weights are received, and in which form an engine is given them."""

import inspect
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.devices import bound_memory, first_device
from tinkermq.actors.weights.job_weights import transport_of
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import ActorPlacement
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context


def test_a_process_takes_no_more_of_a_gpu_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, torch.device]] = []
    known = inspect.signature(torch.cuda.set_per_process_memory_fraction)

    def bound(*args: Any) -> None:
        known.bind(*args)
        bounds.append(args)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bound)
    bound_memory(torch.device("cpu"), 0.5)
    bound_memory(first_device(1), None)
    bound_memory(first_device(1), 0.5)
    assert bounds == [(0.5, torch.device("cuda", 0))]


@pytest.mark.parametrize(
    ("gpu", "shares", "changes", "expected"),
    [
        ("GPU-1", True, {}, "nccl"),
        ("MIG-1", True, {}, "nccl"),
        ("GPU-1", False, {}, "object"),  # each has a GPU of its own
        ("", True, {}, "object"),  # a CPU share
        ("GPU-1", True, {"weights": {"transport": "file"}}, "file"),
        ("", False, {"weights": {"transport": "nccl"}}, "nccl"),
    ],
)
async def test_weights_go_from_memory_to_memory_where_learner_and_generator_share_a_gpu(
    broker: Broker,
    scope: JobScope,
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    shares: bool,
    changes: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    config = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}, **changes})
    context = await job_context(broker, scope, "learner", config)
    guest = ActorPlacement(
        name="generator-0", role="generator", slots=int(not shares), shares="learner", node="n"
    )
    changed = {"actors": [guest], "output_roots": ["/runs"]}
    context.record = context.record.model_copy(update=changed)
    assert transport_of(context) == expected
    await context.service.stop()
