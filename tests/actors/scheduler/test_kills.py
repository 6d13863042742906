"""SIGKILL to the scheduler, the node and the broker: the jobs go on."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tinkermq.broker.feed import read_events
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.job import StopRequest

from tests.actors.scheduler.conftest import FAST, Stack
from tests.support.processes import alive
from tests.support.waiting import PATIENCE_S, eventually, until

pytestmark = pytest.mark.full

MAX_IDLE_MB = 100


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.faults
async def test_a_killed_scheduler_changes_nothing_and_the_next_goes_on(stack: Stack) -> None:
    job, first = await stack.running_under_process()
    waiting = await stack.submit(name="waiting")
    before = await stack.actors()
    first.kill()
    await first.wait()
    records = {one.job: one for one in await stack.jobs.list_jobs()}
    await stack.scheduler()
    after = await stack.until_actors("learner", "generator-0")
    assert {name: actor.pid for name, actor in after.items()} == {
        name: actor.pid for name, actor in before.items()
    }
    same = await stack.get(job)
    moving = {"version", "untold"}
    assert same.model_dump(exclude=moving) == records[job.job].model_dump(exclude=moving)
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    await stack.until(waiting, "RUNNING")


@pytest.mark.faults
async def test_what_happened_while_no_scheduler_ran_is_caught_up(stack: Stack) -> None:
    job, first = await stack.running_under_process()
    first.kill()
    await first.wait()
    stack.do(job, "learner", "done")
    await stack.until_obeyed(job, "learner")
    await stack.scheduler()
    await stack.until(job, "COMPLETED")


@pytest.mark.faults
async def test_a_move_whose_scheduler_was_killed_before_it_told_is_told_by_the_next(
    stack: Stack,
) -> None:
    job, first = await stack.running_under_process()
    told = await stack.events(job)
    first.kill()
    await first.wait()
    await stack.jobs.transition(await stack.jobs.get(job.user, job.job), "LOST", "a test", "n1")
    assert await read_events(stack.broker, job.scope) == told
    await stack.scheduler()
    await stack.until(job, "RUNNING")
    kinds = [event.kind for event in (await stack.events(job))[len(told) :]]
    assert kinds == ["job_lost", "job_queued", "job_starting", "job_running"]


@pytest.mark.faults
async def test_a_killed_node_takes_its_actors_and_its_successor_starts_them_again(
    stack: Stack,
) -> None:
    await stack.scheduler()
    first = await stack.node_process()
    await stack.until_nodes(1)
    job = await stack.until(await stack.submit(), "RUNNING")
    before = await stack.actors()
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    await stack.node_process()
    await stack.until_actors("learner", "generator-0")

    async with asyncio.timeout(PATIENCE_S):
        while True:
            after = await stack.actors()
            fresh = [one.pid for one in after.values() if one.state == "running"]
            if len(fresh) == 2 and not {one.pid for one in before.values()} & set(fresh):
                break
            await asyncio.sleep(0.05)
    pids = [actor.pid for actor in before.values() if actor.pid]
    await until(lambda: not any(map(alive, pids)), "the actors to have died with their node")
    await stack.until(job, "RUNNING")


@pytest.mark.faults
async def test_a_node_that_stays_silent_loses_its_job_to_another(stack: Stack) -> None:
    await stack.scheduler(replace(FAST, silent_s=5.0))
    first = await stack.node_process("n1")
    await stack.until_nodes(1)
    job = await stack.until(await stack.submit(), "RUNNING")
    first.kill()
    await first.wait()
    await stack.until(job, "QUEUED")
    events = await stack.events(job)
    lost = next(event for event in events if event.kind == "job_lost")
    assert lost.message == "node 'n1' of the learner was silent for too long"
    await stack.node("n2")
    job = await stack.until(job, "RUNNING")
    assert {actor.node for actor in job.actors} == {"n2"}


@pytest.mark.faults
async def test_the_learner_of_a_node_that_hangs_is_told_to_leave_its_job(stack: Stack) -> None:
    await stack.scheduler(replace(FAST, silent_s=5.0))
    hanging = await stack.node_process("n1")
    await stack.until_nodes(1)
    job = await stack.until(await stack.submit(), "RUNNING")
    await stack.answer_as_learner(job)
    os.kill(hanging.pid, signal.SIGSTOP)
    await stack.until(job, "QUEUED")
    await eventually(lambda: _is_told(stack), "the learner to be told")
    assert stack.told == ["hand_over"]


async def _is_told(stack: Stack) -> bool:
    return bool(stack.told)


@pytest.mark.faults
async def test_a_broker_that_is_away_costs_no_job(stack: Stack, own_server: NatsServer) -> None:
    job = await stack.running()
    before = await stack.actors()
    own_server.kill()
    await asyncio.sleep(0.5)
    own_server.start()
    after = await stack.until_actors("learner", "generator-0")
    assert after["learner"].pid == before["learner"].pid
    await stack.answer_as_learner(job)
    await stack.ask("stop", StopRequest(job=job.job))
    await stack.until(job, "CANCELLED")


async def test_an_idle_scheduler_and_an_idle_node_are_small(stack: Stack) -> None:
    scheduler = await stack.scheduler_process()
    node = await stack.node_process()
    await stack.until_nodes(1)
    assert resident_mb(scheduler.pid) < MAX_IDLE_MB
    assert resident_mb(node.pid) < MAX_IDLE_MB
    for process in (scheduler, node):
        process.terminate()
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
