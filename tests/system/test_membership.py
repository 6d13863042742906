"""Generators and environment hosts join a running job and leave it; the run goes on."""

import asyncio
import signal
from pathlib import Path

import pytest
from tinkermq.actors.runtime import EXIT_DRAINED

from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_no_task_twice
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


async def members(job: Job, since: int) -> tuple[set[str], set[str]]:
    """Return the generators and the environment hosts that made the groups after `since`."""
    groups = [entry.group for entry in await job.entries(since) if entry.group is not None]
    hosts = {episode.host for group in groups for episode in group.sampled}
    return {group.source for group in groups}, hosts


async def test_generators_and_environment_hosts_come_and_go_while_a_job_runs(
    stack: Stack, model: Path
) -> None:
    env = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.4}, "num_val": 0}
    training = {"num_steps": 10_000, "max_staleness": 4, "save_freq": 0}
    config = small_job(model, env=env, training=training, generator={"max_episodes": 8})
    job = await stack.submit(config)
    await job.until_step(2)
    assert await _shares_work(job, generators={"generator-0"}, num_hosts=1)

    await job.scale("generator", 2)
    await job.scale("environment", 2)
    helper = stack.start_by_hand("generator", job, "by-hand")
    try:
        everybody = {"generator-0", "generator-1", "by-hand"}
        assert await _shares_work(job, generators=everybody, num_hosts=2)

        helper.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(helper.wait, PATIENCE_S) == EXIT_DRAINED
    finally:
        helper.kill()
        helper.wait()
    await job.scale("generator", 1)
    await job.scale("environment", 1)

    async def only_the_first() -> bool:
        return set(await job.actors()) == {"learner", "generator-0", "environment-0"}

    await job.eventually(only_the_first, "the others to leave")
    assert await _shares_work(job, generators={"generator-0"}, num_hosts=1)
    await job.stop(complete=True)
    await job.until("COMPLETED")
    await assert_no_task_twice(job)


async def _shares_work(job: Job, generators: set[str], num_hosts: int) -> bool:
    """Wait until exactly these make the groups that come from now on."""
    since = await job.rollout_log.last_seq()

    async def seen() -> bool:
        nonlocal since
        sources, hosts = await members(job, since)
        if sources - generators or len(hosts) > num_hosts:  # what leavers had begun
            since = await job.rollout_log.last_seq()
        await asyncio.sleep(0.3)
        return sources == generators and len(hosts) == num_hosts

    return await job.eventually(seen, f"groups by {generators} and {num_hosts} hosts")
