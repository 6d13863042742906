"""Learner and generator on one slot: the engine sleeps while the learner trains; nothing is lost.

On a CPU the engine of transformers really frees the memory of its weights and caches, by the same
messages as on a GPU.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinkermq.broker.client.rpc import call
from tinkermq.schemas.control import GpuTurn, GpuTurnRequest
from tinkermq.schemas.wire.errors import StateError, TinkermqError

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import (
    assert_every_task_once,
    assert_no_task_twice,
    assert_replay_is_identical,
)
from tests.support.stack import Stack
from tests.system.test_resume import assert_repeats

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

NCCL = pytest.param("nccl", marks=pytest.mark.long)
GAME = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.05}, "num_val": 0}


def colocated(model: Path, sleep: str, **training: Any) -> dict[str, Any]:
    """Return a job whose learner and generator share a slot."""
    config = small_job(model, env=GAME, training=training, generator={"sleep": sleep})
    return {**config, "placement": "colocated"}


async def num_sleeps(job: Job) -> float:
    """Return how often the engine has slept, as the generator's heartbeat tells."""
    presence = (await job.actors()).get("generator-0")
    return 0.0 if presence is None else presence.numbers.get("sleeps", 0.0)


async def until_turn(job: Job, *, asleep: bool) -> GpuTurn:
    """Wait until the learner trains, or does not; asked as a generator that is awake would.

    Each answer comes with the next turn, so that none is missed, however short it is.
    """
    seen = -1

    async def there() -> GpuTurn | None:
        nonlocal seen
        try:
            turn = await call(
                job.stack.broker,
                job.scope.gpu_turn("learner"),
                GpuTurnRequest(asleep=False, seen=seen),
                GpuTurn,
                timeout_s=10.0,
                waiting_for="the learner",
                idempotent=True,
            )
        except TinkermqError:
            seen = -1
            return None
        seen = turn.number
        return turn if turn.asleep == asleep and turn.number > 2 else None

    return await job.eventually(there, f"a turn with asleep={asleep}")


async def assert_nothing_lost(job: Job) -> None:
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def test_the_engine_sleeps_in_each_step_and_wakes_with_the_new_version(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(colocated(model, "always"))
    await job.until_step(8)
    slept = await job.eventually(lambda: num_sleeps(job), "a sleep")
    record = await job.read()
    holders = {actor.name: (actor.node, actor.devices) for actor in record.actors}
    assert holders["learner"] == holders["generator-0"]
    assert sum(actor.slots for actor in record.actors) == 1
    assert slept >= 1
    await assert_nothing_lost(job)
    for entry in await job.entries():
        assert entry.group is not None
        for trajectory in entry.group.trajectories:
            assert (np.diff(trajectory.versions[trajectory.mask == 1]) >= 0).all()
    lags = [metric.values["staleness/lag_max"] for metric in await job.metrics()]
    assert max(lags) <= 2


async def test_versions_are_validated_by_an_engine_that_sleeps_in_between(
    stack: Stack, model: Path
) -> None:
    config = colocated(model, "always", num_steps=8, test_freq=3)
    config["env"] = {**GAME, "num_val": 12}
    job = await stack.submit(config)
    await assert_nothing_lost(job)
    assert sorted(await job.validations()) == [0, 3, 6, 8]


@pytest.mark.parametrize("transport", ["object", NCCL])
async def test_conversations_are_validated_by_an_engine_on_the_learners_slot(
    stack: Stack, model: Path, tmp_path: Path, transport: str
) -> None:
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "arm 0-6"}, {"role": "assistant", "content": "3"}]
    chats.write_text(json.dumps({"messages": said}) + "\n")
    config = small_job(model)
    job = await stack.submit(
        {
            "model": config["model"],
            "sft": {"data": [str(chats)]},
            "env": {**GAME, "num_val": 12},
            "training": {"num_steps": 6, "batch_size": 4, "test_freq": 2},
            "weights": {"transport": transport},
            "placement": "colocated",
        }
    )
    await job.until("COMPLETED")
    record = await job.read()
    assert record.is_colocated
    assert sum(actor.slots for actor in record.actors) == 1
    assert sorted(await job.validations()) == [0, 2, 4, 6]
    await assert_replay_is_identical(job)


@pytest.mark.faults
@pytest.mark.parametrize("transport", ["object", NCCL])
async def test_a_generator_and_a_learner_killed_while_the_engine_sleeps(
    stack: Stack, model: Path, transport: str
) -> None:
    """The engine has given up its weights: it gets them again, by nccl from a learner alone."""
    config = colocated(model, "always", num_steps=32)
    job = await stack.submit({**config, "weights": {"transport": transport}})
    await until_turn(job, asleep=True)
    await job.kill("generator-0")
    await job.until_step(6)
    await until_turn(job, asleep=True)
    await job.kill("learner")
    await job.until_event("training_recovered")
    await assert_nothing_lost(job)
    assert len(await job.events("generator_ready")) == 2


@pytest.mark.faults
async def test_a_generator_and_a_learner_killed_while_the_engine_generates(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(colocated(model, "always", num_steps=32))
    await until_turn(job, asleep=False)
    await job.kill("learner")
    await job.until_event("training_recovered")
    await until_turn(job, asleep=False)
    await job.kill("generator-0")
    await job.until_event("generator_ready", count=2)
    await assert_nothing_lost(job)


async def test_both_compute_at_the_same_time_where_they_fit(stack: Stack, model: Path) -> None:
    job = await stack.submit(colocated(model, "never", num_steps=4))
    await assert_nothing_lost(job)
    presence = (await job.actors()).get("generator-0")
    assert presence is None or "sleeps" not in presence.numbers
    assert (await job.read()).is_colocated


@pytest.mark.long
async def test_an_on_policy_run_whose_engine_sleeps_in_each_step_plays_the_same_again(
    stack: Stack, model: Path
) -> None:
    config = colocated(model, "always", num_steps=6, max_staleness=0)
    config["generator"]["kv_on_swap"] = "recompute"
    await assert_repeats(stack, config)


async def test_a_job_is_stopped_while_its_engine_sleeps_and_has_one_generator(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(colocated(model, "always", num_steps=400))
    await until_turn(job, asleep=True)
    with pytest.raises(StateError, match="on which there is room for one"):
        await job.scale("generator", 2)
    await job.stop(complete=True)
    await job.until("COMPLETED")
    await assert_no_task_twice(job)
