"""SIGKILL to each actor in the middle of a run: the run finishes by itself, and nothing is lost.

After each run the batch records, the rollout log and the checkpoint prove that every task was
trained once or dropped for a recorded reason, and training the run again from its log gives the
same bits.
"""

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tinkermq.actors.learner.start import task_order
from tinkermq.actors.training.functions.calls import OwnFunctions
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.jetstream.streams import stream_subjects
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.config.load_config import parse_config

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.processes import alive
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}


async def assert_nothing_lost(job: Job) -> None:
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


@pytest.mark.full
async def test_a_generator_and_then_an_environment_host_killed_amid_episodes(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await stack.submit(small_job(model, env=gate.env(4), training={"num_steps": 20}))
    await job.until_step(4)
    killed = await job.kill("generator-0")
    assert await TaskQueue(stack.broker, job.scope).pending_numbers(), "it held no task"
    gate.let(11)  # of which some are no one's any more
    await job.until_step(7)
    await job.eventually(gate.holds, "an episode that is held")
    assert not alive(killed)
    await job.kill("environment-0")
    gate.open()
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    assert len(await job.events("generator_ready")) == 2
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    failures = [blame for group in groups for one in group.sampled for blame in one.failures]
    assert {blame.code for blame in failures} == {"host_gone"}


async def test_a_learner_killed_after_recording_a_batch_and_before_a_checkpoint(
    stack: Stack, model: Path, gate: Gate
) -> None:
    training = {"save_freq": 9, "num_steps": 15}
    job = await stack.submit(small_job(model, env=gate.env(2), training=training))
    await job.until_step(2)
    pid, seen = await job.pid("learner"), len(await job.batches())
    gate.let(5)
    while len(await job.batches()) == seen:
        pass
    assert await job.kill("learner") == pid  # the step of the newest record is not done yet
    first = await job.until_event("training_recovered")
    assert first.data["step"] == 0
    gate.let(11)
    await job.until_event("checkpoint_saved")
    told = await job.until_step(10)  # the last checkpoint is that of step 9, and long will be
    await job.kill("learner")
    gate.open()
    second = await job.until_event("training_recovered", count=2)
    assert second.data["step"] == 9
    assert int(second.message.split()[1]) >= told.step - 9
    await assert_nothing_lost(job)
    told_steps = [metric.step for metric in await job.metrics()]
    assert list(dict.fromkeys(told_steps)) == list(range(1, 16))  # one may be told twice …
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line)["step"] for line in lines]
    assert written == list(range(1, 16))  # … but is written once


@pytest.mark.full
async def test_a_node_that_hangs_while_its_learner_trains_on_hands_its_job_over(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with Stack(tmp_path) as stack:
        job = await stack.submit(small_job(model, env=gate.env(4), training={"num_steps": 20}))
        await job.until_step(4)
        [hanging] = [pid for pid in stack.pids if "--name" in psutil.Process(pid).cmdline()]
        stack.start("node", "other")
        await stack.until_nodes(2)
        os.kill(hanging, signal.SIGSTOP)
        gate.let(10)
        lost = await job.until_event("job_lost")
        assert lost.message == "node 'node' of the learner was silent for too long"
        await job.until_event("training_started", count=2)
        gate.open()
        await assert_nothing_lost(job)
        assert job.record.losses == 1


PPO = {
    "rollout": {"max_turns": 3, "max_response_tokens": 64},
    "algorithm": {"advantage": "gae", "sample": "turn", "gamma": 0.9, "filter_equal_rewards": True},
    "critic": {"lr": 1e-3, "warmup_steps": 2},
    "training": {"curriculum": "success_rate", "curriculum_tasks": 6},
}


@pytest.mark.full
async def test_a_learner_killed_amid_ppo_over_turns_with_a_curriculum(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await stack.submit(small_job(model, env=gate.env(7, "HeldGuess"), **PPO))
    await job.until_step(5)
    await job.until_event("checkpoint_saved")  # with its critic, at step 3
    await job.kill("learner")
    gate.open()
    recovered = await job.until_event("training_recovered")
    assert recovered.data["step"] >= 3
    await assert_nothing_lost(job)  # replays the critic, too
    last = (await job.metrics())[-1].values
    assert last["critic/grad_norm"] > 0
    assert last["training/num_samples"] > last["rollout/episodes"]
    assert await assert_choices_are_those_of_the_log(job) > 40


async def assert_choices_are_those_of_the_log(job: Job) -> int:
    """Work out the curriculum's choices again, from the log alone; return how many there were."""
    config = parse_config(job.record.config)
    groups = {entry.seq: entry.group for entry in await job.entries() if entry.group is not None}
    curriculum = task_order(config, None, LearnerState(), OwnFunctions({}))
    num_right = 0
    for record in [None, *await job.batches()]:
        if record is not None:
            for dropped in record.dropped:
                if dropped.seq in groups and dropped.reason == "equal_rewards":
                    curriculum.pass_over(groups[dropped.seq], dropped.reason)
            curriculum.learn([groups[seq] for seq in record.seqs])
        version = 0 if record is None else record.step
        for task in [group.task for group in groups.values() if group.task.chosen_at == version]:
            assert task.index is not None
            chosen = curriculum.choose(task.index, version)
            assert (chosen.item, chosen.seed) == (task.item, task.seed)
            num_right += 1
    return num_right


@pytest.mark.full
@pytest.mark.parametrize("evaluator", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_who_validates_killed_in_the_middle_of_a_validation(
    stack: Stack, model: Path, evaluator: bool
) -> None:
    job = await stack.submit(
        small_job(
            model,
            env={**SLOW, "num_val": 24},
            evaluation={"samples": 8, "slots": int(evaluator)},
            generator={"count": 2, "max_episodes": 32},
            training={"test_freq": 6},
        )
    )
    stream, results = job.scope.stream_validation, job.scope.validation_result("*", "*")

    async def some_are_played() -> bool:
        return bool(await stream_subjects(stack.broker, stream, results))

    await job.until_streams()
    await job.eventually(some_are_played, "a validation")
    await job.kill("evaluator-0" if evaluator else "generator-0")
    await assert_nothing_lost(job)
    validations = await job.validations()
    assert set(validations) == {0, 6, 12}
    assert {values["val/num_episodes"] for values in validations.values()} == {24 * 8}


@pytest.mark.full
async def test_a_learner_killed_in_the_middle_of_a_validation_loses_none_of_it(
    stack: Stack, model: Path
) -> None:
    config = small_job(model, env={**SLOW, "num_val": 24}, training={"test_freq": 6})
    job = await stack.submit(config)
    stream, results = job.scope.stream_validation, job.scope.validation_result(6, "*")

    async def some_are_played() -> bool:
        return bool(await stream_subjects(stack.broker, stream, results))

    await job.until_streams()
    await job.eventually(some_are_played, "the validation of version 6")
    await job.kill("learner")
    await assert_nothing_lost(job)
    validations = await job.validations()
    assert set(validations) == {0, 6, 12}
    assert {values["val/num_episodes"] for values in validations.values()} == {24}


@pytest.mark.full
async def test_a_scheduler_and_then_a_broker_killed_while_the_job_trains(
    stack: Stack, model: Path, gate: Gate
) -> None:
    job = await stack.submit(small_job(model, env=gate.env(3), training={"num_steps": 18}))
    await job.until_step(3)
    before = {name: await job.pid(name) for name in ("learner", "generator-0", "environment-0")}
    stack.kill("scheduler")
    gate.let(7)
    await job.until_step(7)  # training needs no scheduler
    stack.start("scheduler")
    await stack.until_nodes()
    stack.kill("nats-server")
    await asyncio.sleep(1)
    stack.server.start()
    gate.let(11)
    await job.until_step(11)
    assert {name: await job.pid(name) for name in before} == before
    gate.open()
    await assert_nothing_lost(job)


@pytest.mark.full
async def test_a_node_killed_with_all_its_actors(stack: Stack, model: Path, gate: Gate) -> None:
    job = await stack.submit(small_job(model, env=gate.env(4)))
    await job.until_step(4)
    before = {actor.pid for actor in (await job.actors()).values()}
    stack.kill("node")
    stack.start("node")
    gate.open()
    await assert_nothing_lost(job)
    assert not [pid for pid in before if alive(pid)]
    assert len(await job.events("training_started")) == 2
    assert (await job.read()).attempt == 1
