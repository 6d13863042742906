"""Where new weights are received, and in which form an engine is given them."""

import inspect
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.devices import bound_memory, first_device, let_segments_grow
from tinkermq.actors.weights.job_weights import transport_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.login import Login
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


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}])
def test_segments_of_a_gpus_memory_grow_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    let_segments_grow()  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    let_segments_grow()
    assert settings == ([] if given else ["expandable_segments:True"])


@pytest.mark.parametrize(
    ("gpu", "generators", "changes", "expected"),
    [
        ("GPU-1", ["shared"], {}, "nccl"),
        ("MIG-1", ["shared"], {}, "nccl"),
        ("GPU-1", ["here", "here"], {}, "nccl"),
        ("MIG-1", ["here"], {}, "object"),  # NCCL connects no instances
        ("GPU-1", ["here", "a CPU"], {}, "object"),
        ("GPU-1", ["here", "elsewhere"], {}, "object"),  # the broker is at 127.0.0.1
        ("GPU-1", [], {}, "object"),
        ("", ["shared"], {}, "object"),  # a CPU share
        ("", ["a CPU"], {}, "object"),
        ("GPU-1", ["shared"], {"weights": {"transport": "file"}}, "file"),
        ("", ["a CPU"], {"weights": {"transport": "nccl"}}, "nccl"),
    ],
)
async def test_weights_go_from_memory_to_memory_where_learner_and_generators_have_gpus(
    broker: Broker,
    scope: JobScope,
    monkeypatch: pytest.MonkeyPatch,
    gpu: str,
    generators: list[str],
    changes: dict[str, Any],
    expected: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    config = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}, **changes})
    context = await job_context(broker, scope, "learner", config)
    actors = [ActorPlacement(name="learner", role="learner", node="here", gpus=bool(gpu))]
    for number, place in enumerate(generators):
        actors.append(
            ActorPlacement(
                name=f"generator-{number}",
                role="generator",
                slots=int(place != "shared"),
                shares="learner",
                node="elsewhere" if place == "elsewhere" else "here",
                gpus=place != "a CPU",
            )
        )
    changed = {"actors": actors, "output_roots": ["/runs"]}
    context.record = context.record.model_copy(update=changed)
    assert transport_of(context) == expected
    if (
        expected == "nccl" and "shared" not in generators and not changes
    ):  # other users could listen
        monkeypatch.setattr(Login, "is_authenticated", True)
        assert transport_of(context) == "object"
    await context.service.stop()
