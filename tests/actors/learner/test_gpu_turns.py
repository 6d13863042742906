"""How a learner and an engine share a GPU, and whose turn it is."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from tinkermq.actors.generator.generator import LearnerTurns, with_share
from tinkermq.actors.learner import memory
from tinkermq.actors.learner.memory import GpuTurns, gpu_use_of, models_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.control import GpuTurn, GpuTurnRequest
from tinkermq.schemas.plan.cards import GpuCard, find_card
from tinkermq.schemas.plan.settings import (
    GpuUse,
    HeldBytes,
    choose_gpu_use,
    choose_learner_settings,
    find_models,
    held_bytes,
)
from tinkermq.schemas.wire.errors import ConfigError, EngineError, NobodyAnswersError
from tinkermq.schemas.wire.subjects import JobScope
from torch import nn

from tests.support.contexts import job_context
from tests.support.waiting import PATIENCE_S

H100 = find_card("H100")


def config(**sections: Any) -> JobConfig:
    """Return the configuration of a job."""
    return JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}, **sections})


def job_of(size: str, **sections: Any) -> JobConfig:
    """Return a job that trains a model of a known shape, with vLLM."""
    generator = {"engine": "vllm", **sections.pop("generator", {})}
    model = {"path": f"Qwen/Qwen2.5-{size}-Instruct"}
    return config(model=model, generator=generator, **sections)


def held_by(
    job: JobConfig,
    *models: nn.Module,
    critics: Sequence[nn.Module] = (),
    card: GpuCard = H100,
) -> HeldBytes:
    """Return what learner and engine of a job hold on a card, as the learner estimates it."""
    found = find_models(job) or models_of(job, models, critics)
    return held_bytes(job, found, card, choose_learner_settings(job, found, card, shared=True))


@pytest.mark.parametrize(
    ("size", "gpu", "sections", "sleeps"),
    [
        ("0.5B", "H100", {}, False),
        ("3B", "H100", {}, False),
        ("7B", "H100", {"lora": {"rank": 32}}, False),
        ("7B", "H100", {"learner": {"cpu_offload": True}}, False),
        ("14B", "H100", {"lora": {"rank": 16}}, True),
        ("1.5B", "A100 40GB", {}, True),
        ("3B", "L4", {"lora": {"rank": 16}}, True),
    ],
)
def test_both_overlap_where_they_fit_and_take_turns_where_they_do_not(
    size: str, gpu: str, sections: dict[str, Any], sleeps: bool
) -> None:
    job, card = job_of(size, **sections), find_card(gpu)
    held = held_by(job, card=card)
    use = choose_gpu_use(job, held, card.memory_bytes)
    assert use.sleeps == sleeps
    assert use.memory_share is not None
    of_engine = use.memory_share * card.memory_bytes
    assert of_engine >= held.engine + 0.09 * card.memory_bytes  # a cache, too
    of_learner = held.stored if sleeps else held.step
    assert of_learner + of_engine <= 0.95 * card.memory_bytes
    assert held.step <= 0.95 * card.memory_bytes


def test_a_model_that_does_not_fit_beside_itself_is_refused() -> None:
    job = job_of("7B")
    with pytest.raises(
        ConfigError, match=r"do not fit on one GPU of 80 GiB: the learner holds 85\.1 from step to"
    ):
        choose_gpu_use(job, held_by(job), H100.memory_bytes)


def test_a_share_and_a_way_that_the_user_names_are_taken() -> None:
    for sleep, sleeps in (("always", True), ("never", False)):
        job = job_of("3B", generator={"memory_share": 0.3, "sleep": sleep})
        assert choose_gpu_use(job, held_by(job), H100.memory_bytes) == GpuUse(0.3, sleeps)


def test_parameters_are_counted_of_a_model_whose_shape_is_not_known() -> None:
    """By the same terms as those of a known one: 12 bytes of each trained weight stay."""
    job, quarter = config(), round(0.25 * H100.memory_bytes)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 1))
    model[0].requires_grad_(False)  # as beside an adapter
    held = held_by(job, model)
    assert held.stored == 2 * 100 + 12 * 11
    assert held.step - held.stored - quarter >= 4 * 11  # gradients, CUDA
    critic = nn.Linear(50, 1, bias=False)
    with_critic = held_by(job, model, critics=[critic])
    assert with_critic.stored == held.stored + 12 * 50
    with_reference = held_by(config(algorithm={"kl_coef": 0.1}), model)
    assert with_reference.stored == held.stored + 2 * 100
    assert with_reference.engine == with_critic.engine == held.engine
    larger = held_by(job, nn.Linear(1000, 1000, bias=False))
    assert larger.engine - held.engine >= 2 * (10**6 - 100)
    offloaded = held_by(config(learner={"cpu_offload": True}), model)
    assert offloaded.stored == 0


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
        timeout_s=PATIENCE_S,
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
    monkeypatch.setattr(memory, "_FREE_S", 0.2)
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
