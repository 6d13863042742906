"""A rank that is killed, hangs or is slow in each phase: the run goes on, and says which and where.

A rank announces its phases in a file in memory. A test stops the process until it stands in the
phase that is asked for.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tinkermq.actors.training.progress import RankProgress

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.processes import halt
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]

PHASES = ("meet", "forward", "backward", "gather", "publish", "write")
AT_ONCE_S, WITHIN_S = 20.0, 60.0
"""Time until a rank that died, or hangs, is named: looks and answers, and a minute."""


def stands_in(pid: int, phase: str) -> bool:
    """Stop the process of a rank if it is in a phase, and leave it so if it stands in it."""
    descriptor = psutil.Process(pid).cmdline()[-1]
    with Path(f"/proc/{pid}/fd/{descriptor}").open("rb") as file:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            if phase not in RankProgress.read(file.fileno())[3:]:
                continue
            halt(pid)
            if phase in RankProgress.read(file.fileno())[3:]:
                return True
            os.kill(pid, signal.SIGCONT)
    return False


async def stopped_in(job: Job, phase: str, gate: Gate) -> int:
    """Let the run go on until the process of rank 1 stands in a phase; return its number."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        gate.let(int((await job.read()).version or 0) + 3)
        try:
            for child in psutil.Process(await job.pid("rank-1")).children():
                if await asyncio.to_thread(stands_in, child.pid, phase):
                    return child.pid
        except (psutil.Error, OSError):  # it ends, or has not begun
            await asyncio.sleep(0.05)
    raise AssertionError(f"rank 1 did not stand in {phase!r} within {PATIENCE_S:g} s")


async def begun(stack: Stack, model: Path, gate: Gate) -> Job:
    """Begin a run of two ranks that saves after each step."""
    training = {"num_steps": 40, "save_freq": 1, "keep_last": 2}
    learner = {"slots": 2, "ranks": 2}
    env = gate.env(1)
    return await stack.submit(small_job(model, env=env, learner=learner, training=training))


async def assert_failed_and_goes_on(
    job: Job, phase: str, number: int, why: str, within_s: float
) -> None:
    """Wait until the failure of rank 1 in a phase is named, and training has begun again."""
    at = time.time()
    event = await job.until_event("rank_failed", number)
    assert event.data["actor"] == "rank-1"
    host = os.uname().nodename
    assert f"rank-1 on {host} in {phase}" in event.message.replace("forward of step 1 and ", "")
    assert why in event.message
    assert event.time - at < within_s
    await job.until_event("training_started", number + 1)


@pytest.mark.parametrize(
    ("fault", "why", "within_s"),
    [
        (signal.SIGKILL, "ended with code -9", AT_ONCE_S),
        pytest.param(signal.SIGSTOP, "it has not run for", WITHIN_S, marks=pytest.mark.long),
    ],
)
@pytest.mark.full
async def test_a_rank_that_dies_or_hangs_is_named_with_its_phase_and_the_run_goes_on(
    stack: Stack,
    model: Path,
    gate: Gate,
    fault: signal.Signals,
    why: str,
    within_s: float,
) -> None:
    job = await begun(stack, model, gate)
    for number, phase in enumerate(PHASES, 1):
        os.kill(await stopped_in(job, phase, gate), fault)
        await assert_failed_and_goes_on(job, phase, number, why, within_s)
    gate.open()
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
