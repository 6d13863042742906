"""The broker's store loses what it had confirmed: an older copy of it, or a block that is cut.

As after a loss of power, since nats-server confirms before its disk has a message. Whoever runs
meanwhile knows more than the broker, and so do the checkpoints in the run's folder.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.metric import LOST_STEPS
from tinkermq.schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS, BUCKET_NODES

from tests.support.configs import REPOSITORY, small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.proofs import (
    assert_every_position_once,
    assert_every_task_once,
    assert_replay_is_identical,
)
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

NUM_STEPS = 24
HALF = pytest.param(0.5, marks=pytest.mark.long, id="half")
NOTHING = pytest.param(0.0, id="all")


async def _started(stack: Stack, model: Path, env: dict[str, Any], **training: object) -> Job:
    training = {"num_steps": NUM_STEPS, "keep_last": 4, **training}
    return await stack.submit(small_job(model, env=env, training=training))


def _copy_store(stack: Stack, copy: Path) -> None:
    """Copy the store of a server that stands still."""
    stack.server.stop()
    shutil.copytree(stack.server.store_dir / "jetstream", copy)
    stack.server.start()


def _set_back(stack: Stack, copy: Path) -> None:
    """Lose what came after the copy."""
    store = stack.server.store_dir / "jetstream"
    stack.server.kill()
    shutil.rmtree(store)
    shutil.copytree(copy, store)
    stack.server.start()


def _cut(stack: Stack, stream: str, share: float) -> None:
    """Leave so much of the last block of a stream of a server that is down."""
    [folder] = stack.server.store_dir.glob(f"**/streams/{stream}")
    block = max(folder.glob("msgs/*.blk"), key=lambda path: int(path.stem))
    os.truncate(block, int(block.stat().st_size * share))


async def _ends_whole(job: Job) -> None:
    await job.until("COMPLETED")
    assert [record.step for record in await job.batches()] == list(range(1, NUM_STEPS + 1))
    await assert_every_task_once(job)
    await assert_every_position_once(job)
    await assert_replay_is_identical(job)
    assert {metric.step for metric in await job.metrics()} == set(range(1, NUM_STEPS + 1))


async def _tells(job: Job) -> bool:
    return any(LOST_STEPS in one.numbers for one in (await job.actors()).values())


async def _asked(stack: Stack, command: str) -> Any:
    """Return what a command prints as JSON."""
    words = [f"{sys.prefix}/bin/tinkermq", command, "--json", "--nats-url", stack.server.url]
    asked = await asyncio.create_subprocess_exec(
        *words, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asked.communicate()
    return json.loads(answer)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(False, id="learner-lives"),
        pytest.param(True, marks=pytest.mark.long, id="learner-dies"),
    ],
)
async def test_a_run_goes_on_from_what_an_older_copy_of_the_store_holds(
    tmp_path: Path, model: Path, gate: Gate, killed: bool
) -> None:
    async with Stack(tmp_path) as stack:
        job = await _started(stack, model, gate.env(7))
        await job.until_step(7)
        _copy_store(stack, tmp_path / "copy")
        gate.let(14)
        await job.until_step(14)
        pid = await job.pid("learner")
        _set_back(stack, tmp_path / "copy")
        if killed:
            os.kill(pid, signal.SIGKILL)
        told = await job.until_event("store_rewound")
        assert told.data["lost_steps"] >= 4
        await job.eventually(lambda: _tells(job), "a heartbeat that tells the lost steps")
        [row] = await _asked(stack, "ps")
        assert "the broker's store was set back and lost" in row["trouble"]
        shown = {
            check["name"]: check["detail"] for check in (await _asked(stack, "doctor"))["checks"]
        }
        assert "1 runs have lost" in shown["logs of runs"]
        record = await job.read()
        assert record.losses == 0
        gate.open()
        await _ends_whole(job)


@pytest.mark.long
async def test_a_run_begins_again_when_the_store_is_from_before_its_first_step(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with Stack(tmp_path) as stack:
        job = await _started(stack, model, gate.env(0))
        await job.until_streams()
        _copy_store(stack, tmp_path / "copy")
        gate.let(7)
        await job.until_step(7)
        _set_back(stack, tmp_path / "copy")
        gate.open()
        told = await job.until_event("store_rewound")
        assert told.data["lost_steps"] >= 4
        await _ends_whole(job)


async def test_a_run_whose_checkpoints_are_all_newer_than_the_store_goes_on_from_the_newest(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with Stack(tmp_path) as stack:
        job = await _started(stack, model, gate.env(8), keep_rollouts=False, keep_last=2)
        await job.until_step(8)
        _copy_store(stack, tmp_path / "copy")
        gate.let(17)
        await job.until_step(17)
        _set_back(stack, tmp_path / "copy")
        gate.open()
        await job.until_event("store_rewound")
        await job.until("COMPLETED")
        steps = CheckpointStore(job.run_dir, keep_last=2, keep_every=0).steps()
        assert steps[-1] == NUM_STEPS
        records = await job.batches()
        trained = [number for record in records for number in record.tasks]
        assert len(trained) == len(set(trained))
        assert records[-1].step == NUM_STEPS


@pytest.mark.parametrize("share", [HALF, NOTHING])
async def test_a_run_goes_on_when_the_last_block_of_its_rollout_log_is_cut(
    tmp_path: Path, model: Path, gate: Gate, share: float
) -> None:
    async with Stack(tmp_path) as stack:
        job = await _started(stack, model, gate.env(12))
        await job.until_step(12)
        stack.server.kill()
        _cut(stack, job.scope.stream_rollout, share)
        stack.server.start()
        gate.open()
        if share:
            await job.until_event("store_rewound")
            await _ends_whole(job)
        else:
            record = await job.until("FAILED")
            assert "was deleted and made again" in record.reason


@pytest.mark.parametrize(
    "restarted",
    [
        pytest.param(False, marks=pytest.mark.long, id="scheduler-lives"),
        pytest.param(True, id="scheduler-dies"),
    ],
)
@pytest.mark.parametrize("share", [HALF, NOTHING])
async def test_runs_whose_records_are_lost_go_on(
    tmp_path: Path, model: Path, share: float, restarted: bool
) -> None:
    async with Stack(tmp_path) as stack:
        ended = await stack.submit(small_job(model, training={"num_steps": 2}))
        await ended.until("COMPLETED")
        gates = [Gate(tmp_path / f"gate-{number}") for number in range(2)]
        live = [await _started(stack, model, one.env(4)) for one in gates]
        for job in live:
            await job.until_step(4)
        stack.server.kill()
        if restarted:
            stack.kill("scheduler")
        for bucket in (BUCKET_JOBS, BUCKET_NODES, BUCKET_ACTORS, BUCKET_EVALS):
            _cut(stack, f"KV_{bucket}", share)
        stack.server.start()
        if restarted:
            stack.start("scheduler")
        for one in gates:
            one.let(8)

        async def all_there() -> bool:
            listed = await JobStore(stack.broker).list_jobs()
            return {job.scope.job for job in (ended, *live)} == {record.job for record in listed}

        await eventually(all_there, "the records to be restored")
        for job in () if share else (ended, *live):  # half a block may hold older records
            assert "record" in (await job.until_event("record_restored")).message
        for one in gates:
            one.open()
        for job in live:
            record = await job.until("COMPLETED")
            assert record.attempt == 1
            assert not any(actor.restarts for actor in record.actors), "its actors computed on"
            await assert_every_task_once(job)
        assert (await ended.read()).state == "COMPLETED"
