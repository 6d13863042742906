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
    choose_gpu_use,
    gpu_use_of,
    held_bytes,
)
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.control import GpuTurn, GpuTurnRequest
from tinkermq.schemas.plan.cards import find_card
from tinkermq.schemas.wire.errors import ConfigError, EngineError, NobodyAnswersError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context

H100 = find_card("H100")


def config(**sections: Any) -> JobConfig:
    """Return the configuration of a job."""
    return JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}, **sections})


def job_of(size: str, **sections: Any) -> JobConfig:
    """Return a job that trains a model of a known shape, with vLLM."""
    generator = {"engine": "vllm", **sections.pop("generator", {})}
    model = {"path": f"Qwen/Qwen2.5-{size}-Instruct"}
    return config(model=model, generator=generator, **sections)


PASSES = {"learner": {"microbatch_tokens": 8192}}


@pytest.mark.parametrize(
    ("size", "sections", "sleeps"),
    [
        ("0.5B", {}, False),
        ("1.5B", {}, True),  # its passes are as large as the GPU holds
        ("1.5B", PASSES, False),
        ("3B", PASSES, False),
        ("7B", {"lora": {"rank": 32}}, True),
        ("7B", {"learner": {"cpu_offload": True}}, True),
    ],
)
def test_both_overlap_where_they_fit_and_take_turns_where_they_do_not(
    size: str, sections: dict[str, Any], sleeps: bool
) -> None:
    job = job_of(size, **sections)
    held = held_bytes(job, H100, [], [])
    use = choose_gpu_use(job, held, H100.memory_bytes)
    assert use.sleeps == sleeps
    assert use.memory_share is not None
    of_engine = use.memory_share * H100.memory_bytes
    assert of_engine >= held.engine + 0.09 * H100.memory_bytes  # a cache, too
    of_learner = held.stored if sleeps else held.step
    assert of_learner + of_engine <= 0.95 * H100.memory_bytes
    assert held.step <= 0.95 * H100.memory_bytes


def test_a_model_that_does_not_fit_beside_itself_is_refused() -> None:
    job = job_of("7B")
    with pytest.raises(
        ConfigError, match=r"do not fit on one GPU of 80 GiB: the learner holds 85\.1 from step to"
    ):
        choose_gpu_use(job, held_bytes(job, H100, [], []), H100.memory_bytes)


def test_a_share_and_a_way_that_the_user_names_are_taken() -> None:
    for sleep, sleeps in (("always", True), ("never", False)):
        job = job_of("3B", generator={"memory_share": 0.3, "sleep": sleep})
        held = held_bytes(job, H100, [], [])
        assert choose_gpu_use(job, held, H100.memory_bytes) == GpuUse(0.3, sleeps)


def test_parameters_are_counted_of_a_model_whose_shape_is_not_known() -> None:
    job, quarter = config(), round(0.25 * H100.memory_bytes)
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1))
    model[0].requires_grad_(False)  # as beside an adapter
    held = held_bytes(job, H100, [model], [])
    assert (held.stored, held.engine) == (2 * 100 + 18 * 11, 2 * 111)
    assert held.step == held.stored + quarter
    critic = torch.nn.Linear(50, 1, bias=False)
    with_critic = held_bytes(job, H100, [model], [critic])
    assert with_critic.stored == held.stored + 18 * 50
    with_reference = held_bytes(config(algorithm={"kl_coef": 0.1}), H100, [model], [])
    assert with_reference.stored == held.stored + 2 * 111
    assert with_reference.engine == with_critic.engine == held.engine
    offloaded = held_bytes(config(learner={"cpu_offload": True}), H100, [model], [])
    assert offloaded.stored == 2 * 100


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
