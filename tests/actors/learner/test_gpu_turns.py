"""How a learner and an engine share a GPU, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from tinkermq.actors.generator.gpu_turns import LearnerTurns, with_share
from tinkermq.actors.learner import gpu_turns
from tinkermq.actors.learner.gpu_turns import (
    GpuTurns,
    GpuUse,
    ModelBytes,
    choose_gpu_use,
    count_bytes,
    gpu_use_of,
)
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.control import GpuTurn, GpuTurnRequest
from tinkermq.schemas.wire.errors import ConfigError, EngineError, NobodyAnswersError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context

GIB = 1 << 30
H100 = 80 * GIB


def config(**sections: Any) -> JobConfig:
    """Return the configuration of a job."""
    return JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}, **sections})


def bytes_of(billions: float, **sections: Any) -> tuple[JobConfig, ModelBytes]:
    """Return a job in bfloat16 that trains so many parameters, and what it holds."""
    job = config(
        learner={"dtype": "bfloat16", **sections.pop("learner", {})},
        generator={"dtype": "bfloat16", **sections.pop("generator", {})},
        **sections,
    )
    model = torch.nn.Linear(1000, round(billions * 1e6), bias=False, device="meta")
    return job, count_bytes(job, [model])


def test_what_a_model_holds_is_counted() -> None:
    _, held = bytes_of(1)
    assert (held.learner, held.engine) == (18 * 10**9, 2 * 10**9)
    job = config()
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1))
    model[0].requires_grad_(False)  # as beside an adapter
    held = count_bytes(job, [model])
    assert (held.learner, held.engine) == (4 * 100 + 16 * 11, 4 * 111)
    critic = torch.nn.Linear(50, 1, bias=False)
    with_critic = count_bytes(job, [model], [critic])
    assert with_critic.learner == held.learner + 16 * 50
    with_reference = count_bytes(config(algorithm={"kl_coef": 0.1}), [model])
    assert with_reference.learner == held.learner + 4 * 111
    assert with_reference.engine == with_critic.engine == held.engine
    _, offloaded = bytes_of(1, learner={"cpu_offload": True})
    assert offloaded.learner == 0


@pytest.mark.parametrize(
    ("billions", "sleeps"), [(0.5, False), (1.5, False), (3.0, True), (3.4, True)]
)
def test_both_overlap_where_they_fit_and_take_turns_where_they_do_not(
    billions: float, sleeps: bool
) -> None:
    job, held = bytes_of(billions)
    use = choose_gpu_use(job, held, H100)
    assert use.sleeps == sleeps
    assert use.memory_share is not None
    of_engine = use.memory_share * H100
    assert of_engine >= held.engine + 0.09 * H100  # its weights, and a cache
    activations = 0 if sleeps else 0.25 * H100
    assert held.learner + activations + of_engine <= 0.95 * H100


def test_a_model_that_does_not_fit_beside_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not fit on one GPU of 80 GiB: .*126.8, .*14.1"):
        choose_gpu_use(*bytes_of(7.564), H100)
    job, held = bytes_of(7.564, learner={"cpu_offload": True})
    assert not choose_gpu_use(job, held, H100).sleeps


def test_a_share_and_a_way_that_the_user_names_are_taken() -> None:
    job, held = bytes_of(0.5, generator={"memory_share": 0.3, "sleep": "always"})
    assert choose_gpu_use(job, held, H100) == GpuUse(0.3, True)
    job, held = bytes_of(3, generator={"memory_share": 0.3, "sleep": "never"})
    assert choose_gpu_use(job, held, H100) == GpuUse(0.3, False)


def test_on_a_cpu_an_engine_sleeps_when_it_is_told_to() -> None:
    assert gpu_use_of(config(), []) == GpuUse(None, False)
    assert gpu_use_of(config(generator={"sleep": "always"}), []) == GpuUse(None, True)


def test_engines_are_started_with_the_share_that_the_learner_leaves() -> None:
    turn = GpuTurn(number=0, asleep=False, version=0, memory_share=0.4, sleeps=True)
    generator = with_share(config(generator={"engine": "vllm"}), turn).generator
    assert (generator.memory_share, generator.sleep) == (0.4, "always")
    alone = with_share(config(), turn.model_copy(update={"sleeps": False})).generator
    assert alone.sleep == "never"


@pytest.fixture
async def turns(broker: Broker, scope: JobScope) -> AsyncIterator[GpuTurns]:
    """The turns of a learner whose engine has to sleep, served."""
    context = await job_context(broker, scope, "learner", config())
    context.step = 4
    made = GpuTurns(context, GpuUse(0.5, True))
    await made.serve()
    yield made
    await context.service.stop()


async def ask(broker: Broker, scope: JobScope, *, asleep: bool, seen: int) -> GpuTurn:
    """Ask as a generator does."""
    return await call(
        broker,
        scope.gpu_turn("learner"),
        GpuTurnRequest(asleep=asleep, seen=seen),
        GpuTurn,
        timeout_s=5.0,
        waiting_for="the learner",
    )


async def test_a_learner_trains_once_the_engine_has_told_that_it_sleeps(
    broker: Broker, scope: JobScope, turns: GpuTurns
) -> None:
    told: list[str] = []

    async def train() -> None:
        async with turns.training():
            told.append("trained")

    first = await ask(broker, scope, asleep=False, seen=-1)
    assert (first.number, first.asleep, first.memory_share, first.sleeps) == (0, False, 0.5, True)
    waiting = asyncio.ensure_future(ask(broker, scope, asleep=False, seen=0))
    training = asyncio.create_task(train())
    ordered = await waiting
    assert ordered.asleep
    again = asyncio.ensure_future(ask(broker, scope, asleep=False, seen=ordered.number))
    await asyncio.sleep(0.1)
    assert not told  # it is told again that the engine is awake
    again.cancel()
    woken = await ask(broker, scope, asleep=True, seen=ordered.number)
    await training
    assert told == ["trained"]
    assert (woken.asleep, woken.version) == (False, 4)


async def test_that_an_engine_slept_in_an_earlier_turn_does_not_count(
    broker: Broker, scope: JobScope, turns: GpuTurns
) -> None:
    async def train() -> None:
        async with turns.training():
            pass

    training = asyncio.create_task(train())
    ordered = await ask(broker, scope, asleep=False, seen=0)
    asleep = asyncio.ensure_future(ask(broker, scope, asleep=True, seen=ordered.number))
    await training
    assert not (await asleep).asleep
    second = asyncio.create_task(train())
    await asyncio.sleep(0)
    late = await ask(broker, scope, asleep=True, seen=ordered.number)  # it was about to wake
    assert late.asleep
    assert not second.done()
    await ask(broker, scope, asleep=True, seen=late.number)
    await second


async def test_a_learner_does_not_wait_for_ever_for_a_generator_that_keeps_the_gpu(
    broker: Broker, scope: JobScope, turns: GpuTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_turns, "_FREE_S", 0.2)
    with pytest.raises(EngineError, match="the generator has not freed the GPU within 0 s"):
        async with turns.training():
            raise AssertionError("it trains beside an engine that is awake")


async def test_a_generator_that_starts_waits_until_the_learner_has_trained(
    broker: Broker, scope: JobScope, turns: GpuTurns
) -> None:
    context = await job_context(broker, scope, "generator", config())
    beginning: asyncio.Task[GpuTurn] | None = None
    started = LearnerTurns(context)

    async def train() -> None:
        nonlocal beginning
        async with turns.training():
            assert beginning is not None
            assert not beginning.done()

    training = asyncio.create_task(train())
    await asyncio.sleep(0)
    beginning = asyncio.create_task(started.begin())
    await training
    assert not (await beginning).asleep
    await context.service.stop()


async def test_a_learner_with_a_gpu_of_its_own_asks_nobody(broker: Broker, scope: JobScope) -> None:
    context = await job_context(broker, scope, "learner", config())
    alone = GpuTurns(context, None)
    await alone.serve()
    async with alone.training():
        pass
    with pytest.raises(NobodyAnswersError):
        await ask(broker, scope, asleep=False, seen=-1)
    await context.service.stop()
