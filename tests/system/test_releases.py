"""Releases beside and behind one another.

What an earlier one has written is read, continued and replayed. Processes of another one in a pool
are named, with who is to be updated, and a pool is upgraded under load.
"""

import asyncio
import json
from pathlib import Path

import pytest
from tinkermq.actors.learner.replay import replay
from tinkermq.broker.presence import list_presences, presences
from tinkermq.schemas.version import VERSION

from tests.clients.command import tinkermq
from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.releases import other_release
from tests.support.stack import Stack
from tests.support.waiting import eventually
from tests.support.written import FIXTURES, PAUSED_FROM, SLOW, STEPS, bring_back

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def test_nodes_and_clients_of_another_release_are_told_so(
    stack: Stack, tmp_path: Path
) -> None:
    beside = other_release(tmp_path / "beside", "0.99.0")
    newer = other_release(tmp_path / "newer", "99.0.0", schema_version=2)
    nodes = {"beside": beside, "newer": newer}
    for name, variables in nodes.items():
        stack.start("node", name, variables)
    try:

        async def both_beat() -> bool:
            entries, damaged = await presences(stack.broker).read_all("pool")
            return {f"pool.{name}" for name in nodes} <= {one.key for one in (*entries, *damaged)}

        await eventually(both_beat, "heartbeats of both nodes")
        url = ("--nats-url", stack.server.url)
        doctor = await asyncio.to_thread(tinkermq, "doctor", "--json", *url)
        found = {check["name"]: check for check in json.loads(doctor.out)["checks"]}
        assert found["releases"]["detail"] == "beside runs 0.99.0"
        assert f"this client is tinkermq {VERSION}" in found["releases"]["hint"]
        words = f"schema version 2, of a newer tinkermq; {VERSION} reads 1"
        assert f"pool.newer of tmq-actors: Presence has {words}" in found["records"]["detail"]
        client = await asyncio.to_thread(tinkermq, "pool", *url, env=newer)
    finally:
        for name in nodes:
            stack.terminate(name)
    assert client.code == 1
    assert words.replace(VERSION, "99.0.0") not in client.err
    assert f"schema version 2, of a newer tinkermq; {VERSION} reads 1" in client.err


@pytest.mark.parametrize("archive", sorted(FIXTURES.glob("written_by_*.tar.xz")), ids=str)
async def test_a_run_that_a_release_has_paused_is_read_continued_and_replayed(
    tmp_path: Path, archive: Path
) -> None:
    stack = Stack(tmp_path)
    record, same_machine = await bring_back(archive, stack)
    async with stack:
        job = Job(stack, record)
        stack.jobs.append(job)
        assert (await job.read()).state == "PAUSED"
        before, logged = await job.batches(), await job.entries()
        assert len(before) >= PAUSED_FROM
        assert all(entry.group is not None for entry in logged)
        await job.resume()
        await job.until("COMPLETED")
        assert (await job.batches())[: len(before)] == before
        assert [entry.payload for entry in await job.entries()][: len(logged)] == [
            entry.payload for entry in logged
        ]
        assert [metric.step for metric in await job.metrics()] == list(range(1, STEPS + 1))
        await assert_every_task_once(job)
        again = await replay(stack.broker, job.record)
        assert again.steps == STEPS
        assert again.identical or not same_machine, again.differing


@pytest.mark.long
async def test_a_pool_under_load_is_upgraded_role_by_role_and_loses_no_group(
    tmp_path: Path, model: Path
) -> None:
    newer = other_release(tmp_path / "newer", "0.99.0")
    async with Stack(tmp_path / "stack", slots=2) as stack:
        stack.start("node", "second")
        await stack.until_nodes(2)
        fast = tmp_path / "fast"
        slow = {**SLOW, "kwargs": {"delay_s": 5.0, "until": str(fast)}}
        job = await stack.submit(
            small_job(model, env=slow, generator={"count": 2}, training={"num_steps": 200})
        )

        async def runs(releases: set[str]) -> bool:
            beats = [one.value.release for one in await list_presences(stack.broker)]
            return set(beats) == releases and (await job.read()).state == "RUNNING"

        for role, name in (
            ("scheduler", "scheduler"),
            ("nats-server", ""),
            ("node", "second"),
            ("node", "node"),
        ):
            step = len(await job.batches())
            await stack.restart(role, name, newer)
            await job.until_step(step + 3)
            running = {"0.99.0"} if name == "node" else {VERSION, "0.99.0"}
            await job.eventually(lambda running=running: runs(running), f"{role} {name} to run")
        fast.touch()
        await job.until("COMPLETED")
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
