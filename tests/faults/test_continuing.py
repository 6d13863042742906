"""A generator killed, or stopped for a while, amid long episodes: another goes on with them.

With real processes: the task that is being played loses its generator by SIGKILL, or by SIGSTOP,
whose generator wakes when the task is over.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tinkermq.broker.jetstream.direct_get import get_all
from tinkermq.schemas.rollout import Group, Segment

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack

pytestmark = [pytest.mark.full, pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

Record = dict[int, list[Segment]]
"""Segments by the number of their episode."""


def job_of_held_episodes(model: Path, gate: Path, **rollout: int) -> dict:
    """Return a job of episodes that are written down as they go, and wait for a file to end."""
    return small_job(
        model,
        env={
            "game": "tests.support.games:HeldEcho",
            "kwargs": {"until": str(gate)},
            "num_val": 0,
            "workers": 32,
        },
        rollout={
            "group_size": 3,
            "max_prompt_tokens": 64,
            "max_turns": 4,
            "max_turn_tokens": 40,
            "max_response_tokens": 256,
            **rollout,
        },
        generator={"count": 2, "max_episodes": 8, "ack_wait_s": 2, "segment_tokens": 8},
        training={"num_steps": 4, "batch_size": 1, "staleness_policy": "wait"},
    )


async def records(job: Job) -> dict[int, Record]:
    """Return what is written down now, by task."""
    stream, subject = job.scope.stream_segment, job.scope.segment("*")
    found: dict[int, Record] = {}
    for message in await get_all(job.stack.broker, stream, subject):
        task, episode = (int(part) for part in message.subject.split(".")[-2:])
        segment = Segment.from_bytes(message.payload)
        found.setdefault(task, {}).setdefault(episode, []).append(segment)
    return found


def num_tokens(record: Record) -> int:
    return sum(int(segment.mask.sum()) for some in record.values() for segment in some)


async def begun_task(job: Job, least: int = 40) -> tuple[int, Record]:
    """Return a task of which so many tokens are written down, and what is."""

    async def there() -> tuple[int, Record] | None:
        found = await records(job)
        return next((one for one in found.items() if num_tokens(one[1]) >= least), None)

    await job.until_streams()
    return await job.eventually(there, "a task that has begun")


def actor_of(record: Record) -> str:
    """Return the generator that wrote a record last."""
    return next(iter(record.values()))[-1].writer.rsplit("-", 2)[0]


async def group_of(job: Job, task: int) -> Group:
    """Wait for the group of a task."""

    async def there() -> Group | None:
        entry = await job.rollout_log.find(task)
        return None if entry is None else entry.group

    return await job.eventually(there, f"the group of task {task}")


async def refused(job: Job, task: int, generator: str) -> None:
    """Wait until a generator has been refused a task, of perhaps several that it held."""

    async def there() -> bool:
        told = await job.events("task_fenced")
        return any((one.data["task"], one.source) == (task, generator) for one in told)

    await job.eventually(there, f"{generator} to be refused task {task}")


def assert_begins_with(group: Group, record: Record) -> None:
    """Assert that the recorded tokens are in the group, with log-probs and versions."""
    assert group.tokens_continued >= num_tokens(record) > 0
    for number, segments in record.items():
        episode = group.trajectories[number]
        assert episode.num_tries == 1
        for one in segments:
            there = slice(one.start, one.end)
            np.testing.assert_array_equal(episode.token_ids[there], one.token_ids)
            np.testing.assert_array_equal(episode.logprobs[there], one.logprobs)
            np.testing.assert_array_equal(episode.versions[there], one.versions)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_another_generator_goes_on_and_the_one_that_wakes_is_refused(
    stack: Stack, model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    gate = tmp_path / "open"
    job = await stack.submit(job_of_held_episodes(model, gate))
    task, left = await begun_task(job)
    lost = actor_of(left)
    pid = await job.pid(lost)
    os.kill(pid, how)
    gate.touch()
    group = await group_of(job, task)
    assert_begins_with(group, left)
    if how == signal.SIGSTOP:
        assert group.source != lost
        os.kill(pid, signal.SIGCONT)
        await refused(job, task, lost)

    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    continued = {event.data["task"]: event.data for event in await job.events("task_continued")}
    assert task in continued
    told = sum(metric.values["rollout/continued_tokens"] for metric in await job.metrics())
    assert told == sum(data["tokens"] for data in continued.values())
    assert await records(job) == {}, "what is over is still written down"


async def test_an_oversampled_run_is_replayed_to_the_bit(stack: Stack, model: Path) -> None:
    config = job_of_held_episodes(model, Path(), oversample=3)
    config["env"] = {"game": "tests.support.games:CoinGame", "num_val": 0}
    config["generator"] = {**config["generator"], "count": 1, "segment_tokens": 0}
    job = await stack.submit(config)
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    assert all(len(group.trajectories) == len(group.tokens_cut) == 3 for group in groups)
    for metric in await job.metrics():
        told = {key.rpartition("/")[2]: value for key, value in metric.values.items()}
        assert told["kept_length"] < told["estimated_length"]
        assert metric.values["rollout/wasted_share"] > 0
