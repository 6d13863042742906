"""The staleness bound holds in whole runs, whatever the stragglers do, and nothing deadlocks.

In runs with stragglers one episode in 24 ends after several training steps.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.schemas.rollout import Group, num_too_old
from tinkermq.schemas.task import BatchRecord

from tests.support.configs import UNHURRIED, small_job
from tests.support.jobs import Job
from tests.support.models import plain_logprobs
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

LATE = {"num_val": 0, "workers": 64, "step_timeout_s": 3600}
COIN = {"game": "tests.support.games:FirstLetter", "num_val": 0}


RunOf = Callable[[str], Awaitable[Job]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run_of(
    shared_stack: Stack, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunOf]:
    """Return the run of a name, which starts when a test first asks for it."""
    stack, runs = shared_stack, dict[str, Job]()

    def late(game: str, after: int, most_s: float = 60.0) -> dict:
        file = str(tmp_path_factory.mktemp("late") / "begun")
        kwargs = {"file": file, "after": after, "most_s": most_s}
        return {**LATE, "game": f"tests.support.gate:{game}", "kwargs": kwargs}

    def straggling(max_staleness: int, policy: str) -> dict:
        # a learner that waits for them gets no more episodes meanwhile
        env = late("LateBandit", 80 + 16 * max_staleness, 0.5 if policy == "wait" else 60.0)
        training = {"num_steps": 16, "max_staleness": max_staleness, "staleness_policy": policy}
        return small_job(model, env=env, training={**training, "save_freq": 0})

    configs = {
        "on_policy": small_job(
            model,
            env=COIN,
            algorithm={"filter_equal_rewards": True},
            generator={"adapt_episodes": True},
            training={"max_staleness": 0, "num_steps": 10},
        ),
        "drop_1": straggling(1, "drop"),
        "drop_4": straggling(4, "drop"),
        "wait_1": straggling(1, "wait"),
        "train_1": straggling(1, "train"),
        "mask_1": small_job(
            model,
            env=late("LateEcho", 12),
            rollout={"max_turns": 4, "max_response_tokens": 48},
            training={"num_steps": 16, "max_staleness": 1, "staleness_policy": "mask"},
        ),
    }

    async def start(name: str) -> Job:
        if name not in runs:
            runs[name] = await stack.submit(configs[name])
        return runs[name]

    yield start
    await stack.stop_all()


async def trained(job: Job) -> list[tuple[BatchRecord, list[Group]]]:
    """Wait for a run's end, prove it, and return what each step trained."""
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    groups = {entry.seq: entry.group for entry in await job.entries() if entry.group is not None}
    return [(record, [groups[seq] for seq in record.seqs]) for record in await job.batches()]


def lags(steps: list[tuple[BatchRecord, list[Group]]]) -> list[int]:
    """Return the lag of every group that was trained."""
    return [record.step - 1 - group.min_version for record, groups in steps for group in groups]


def stale(steps: list[tuple[BatchRecord, list[Group]]]) -> set[int | None]:
    """Return the numbers of the tasks that were dropped for their age."""
    return {item.task for record, _ in steps for item in record.dropped if item.reason == "stale"}


async def test_without_staleness_every_token_is_on_policy(run_of: RunOf, model: Path) -> None:
    job = await run_of("on_policy")
    steps = await trained(job)
    assert set(lags(steps)) == {0}
    for metric in await job.metrics():
        measured = {name for name in metric.values if name.startswith("staleness/num_tokens/")}
        assert measured <= {"staleness/num_tokens/lag_0"}
        if measured:
            assert metric.values["staleness/abs_log_ratio/lag_0"] < 1e-4
            assert abs(metric.values["staleness/max_ratio/lag_0"] - 1) < 1e-4
    await asyncio.to_thread(_assert_first_batch_is_of_the_initial_model, model, steps[0][1])


async def test_a_generator_shows_how_many_groups_its_cache_admits(
    shared_stack: Stack, model: Path
) -> None:
    config = small_job(model, env=UNHURRIED, generator={"adapt_episodes": True})
    job = await shared_stack.submit(config)

    async def limits() -> list[float]:
        actors = (await job.actors()).values()
        return [
            actor.numbers["groups_limit"] for actor in actors if "groups_limit" in actor.numbers
        ]

    assert await job.eventually(limits, "a generator's groups_limit") == [64 / 4]
    await job.stop(now=True)


def _assert_first_batch_is_of_the_initial_model(model: Path, groups: list[Group]) -> None:
    """Compare the behaviour log-probs of every token with a plain forward pass."""
    policy = load_causal_lm(str(model), dtype=torch.float32)
    for episode in (episode for group in groups for episode in group.sampled):
        start = int(np.argmax(episode.mask))
        expected = plain_logprobs(policy, episode.token_ids[:start], episode.token_ids[start:])
        assert np.abs(expected - episode.logprobs[start:]).max() < 1e-4


async def test_groups_that_teach_nothing_give_their_credits_back(run_of: RunOf) -> None:
    steps = await trained(await run_of("on_policy"))
    reasons = {item.reason for record, _ in steps for item in record.dropped}
    assert reasons == {"equal_rewards"}
    for _, groups in steps:
        assert all(len({episode.reward for episode in group.sampled}) > 1 for group in groups)


@pytest.mark.parametrize("bound", [1, pytest.param(4, marks=pytest.mark.long)])
async def test_no_group_over_the_bound_is_trained_under_drop(run_of: RunOf, bound: int) -> None:
    steps = await trained(await run_of(f"drop_{bound}"))
    assert 0 < max(lags(steps)) <= bound
    assert {item.reason for record, _ in steps for item in record.dropped} <= {"stale"}


async def test_a_group_dropped_for_its_age_is_issued_again(run_of: RunOf) -> None:
    job = await run_of("drop_1")
    dropped = stale(await trained(job))
    assert dropped, "there was no straggler"
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    tasks = {group.task.task: group.task for group in groups}
    again = {task.reissue_of: task for task in tasks.values() if task.reissue_of is not None}
    assert set(again) == dropped
    for number, task in again.items():
        assert (task.index, task.seed) == (tasks[number].index, tasks[number].seed)
        assert task.task > number


async def test_wait_trains_every_group_within_the_bound(run_of: RunOf) -> None:
    steps = await trained(await run_of("wait_1"))
    assert max(lags(steps)) <= 1
    assert not [item for record, _ in steps for item in record.dropped]


async def test_train_keeps_a_group_whatever_its_age(run_of: RunOf) -> None:
    steps = await trained(await run_of("train_1"))
    assert max(lags(steps)) > 1
    assert not [item for record, _ in steps for item in record.dropped]


async def test_mask_leaves_out_old_tokens_and_keeps_their_episodes(run_of: RunOf) -> None:
    job = await run_of("mask_1")
    steps = await trained(job)
    assert max(lags(steps)) > 1
    assert [record.oldest for record, _ in steps] == [0, 0, *range(1, 15)]
    masked = [
        sum(num_too_old(group.sampled, record.oldest) for group in groups)
        for record, groups in steps
    ]
    assert sum(masked) > 0
    for record, groups in steps:
        assert all(group.max_version >= record.oldest for group in groups)
    metrics = {int(one.values["training/global_step"]): one.values for one in await job.metrics()}
    assert [int(metrics[step]["staleness/masked_tokens"]) for step in range(3, 17)] == masked[2:]
    assert all(values["staleness/lag_max"] <= 1 for values in metrics.values())
    await assert_replay_is_identical(job)
