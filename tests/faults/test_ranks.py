"""A rank that is killed, hangs or is slow in each phase: the run goes on, and says which and where.

Two ranks, of which rank 0 is the learner. A fault is placed at the begin of a phase, by the audit
event of it (`tests/support/at_phase`).
"""

import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from tinkermq.schemas.metric import Event

from tests.support.configs import REPOSITORY, small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.full]

PHASES = ("meet", "forward", "backward", "gather", "publish", "write")
WITHIN_S = 60.0
"""Within which a rank that died or hangs is named."""
ANSWERS = 0
"""Of a fault: the thread hangs, while its process runs and answers."""


@dataclass
class Faults:
    """A run whose ranks fail in phases, one after the other."""

    job: Job
    gate: Gate
    file: Path
    num_started: int = 1

    async def put(self, rank: int, phase: str, fault: int) -> int:
        """Put a fault into a rank; return the number of its process once it is there."""
        self.file.with_suffix(".new").write_text(f"{rank} {phase} {fault}")
        self.file.with_suffix(".new").rename(self.file)
        if phase == "meet":
            await self.job.kill("learner")
        caught = self.file.with_suffix(".pid")

        async def is_there() -> bool:
            self.gate.let(int((await self.job.read()).version or 0) + 1)
            return caught.exists()

        await self.job.eventually(is_there, f"rank {rank} in {phase}")
        pid = int(caught.read_text())
        caught.unlink()
        return pid

    async def named(self, kind: str, actor: str, phase: str) -> Event:
        """Wait for the event that names an actor with its host and phase, within a minute."""
        began, place = time.time(), f"{actor} on {os.uname().nodename} in "

        async def there() -> Event | None:
            for event in await self.job.events(kind):
                if event.time > began - 1 and place in event.message and phase in event.message:
                    return event
            return None

        event = await eventually(there, f"{kind} of {actor} in {phase}")
        assert event.time - began < WITHIN_S, event
        return event

    async def lives_on(self, actor: str) -> None:
        """Wait for the next heartbeat of an actor."""
        last = (await self.job.actors())[actor].time

        async def has_sent() -> bool:
            return (await self.job.actors())[actor].time > last

        await self.job.eventually(has_sent, f"a heartbeat of {actor}")

    async def learner_is_silent(self) -> bool:
        """Return whether the run says that the learner sends no heartbeat."""
        record = await self.job.read()
        return any("learner has sent no heartbeat" in actor.trouble for actor in record.actors)

    async def started_again(self) -> None:
        """Wait until training has begun once more than before."""
        self.num_started += 1
        await self.job.until_event("training_started", self.num_started)

    async def end(self) -> None:
        """Let the run end; all was trained once, and is the same when it is trained again."""
        self.gate.open()
        await self.job.until("COMPLETED")
        await assert_every_task_once(self.job)
        await assert_replay_is_identical(self.job)


@pytest_asyncio.fixture
async def faults(
    tmp_path: Path, model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Faults]:
    """Return a run of two ranks that saves after each step."""
    monkeypatch.setenv("TEST_FAULT", str(tmp_path / "fault"))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests/support/at_phase"))
    async with Stack(tmp_path, slots=3) as stack:
        training = {"num_steps": 10, "save_freq": 1, "keep_last": 2}
        learner = {"slots": 2, "ranks": 2}
        algorithm = {"entropy_coef": 0.01}  # there is a backward pass where all rewards are equal
        config = small_job(
            model, env=gate.env(1), learner=learner, training=training, algorithm=algorithm
        )
        job = await stack.submit(config)
        await job.until_event("training_started")
        yield Faults(job, gate, tmp_path / "fault")


async def test_ranks_that_are_slow_go_on_and_one_that_is_killed_is_named(faults: Faults) -> None:
    for rank in (0, 1):
        for phase in PHASES[1:]:
            pid = await faults.put(rank, phase, signal.SIGSTOP)
            await faults.lives_on(("rank-1", "learner")[rank])
            os.kill(pid, signal.SIGCONT)
    assert not await faults.job.events("rank_failed")
    await faults.put(1, "backward", signal.SIGKILL)
    event = await faults.named("rank_failed", "rank-1", "backward")
    assert "its process ended with code -9" in event.message
    await faults.started_again()
    await faults.end()


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
async def test_a_rank_that_dies_in_a_phase_is_named_and_the_run_goes_on(
    faults: Faults, phase: str
) -> None:
    await faults.put(1, phase, signal.SIGKILL)
    event = await faults.named("rank_failed", "rank-1", phase)
    assert "its process ended with code -9" in event.message
    await faults.started_again()
    await faults.put(0, phase, signal.SIGKILL)
    await faults.started_again()
    await faults.end()


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
async def test_a_rank_that_hangs_in_a_phase_is_named_and_the_run_goes_on(
    faults: Faults, phase: str
) -> None:
    await faults.put(1, phase, signal.SIGSTOP)
    event = await faults.named("rank_failed", "rank-1", phase)
    assert "its process hangs: it has not run for" in event.message
    await faults.started_again()
    learner = await faults.put(0, phase, signal.SIGSTOP)
    if phase in ("meet", "write"):  # no rank was looked at yet, or has an order
        await faults.job.eventually(faults.learner_is_silent, "the report of its node")
    else:  # the other rank waits where the learner does
        event = await faults.named("rank_late", "rank-1", "")
        assert "learner hangs, or its machine is away" in event.message
    os.kill(learner, signal.SIGCONT)
    await faults.end()


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
async def test_a_rank_that_hangs_in_a_phase_while_its_process_answers_is_named(
    faults: Faults, phase: str
) -> None:
    for rank, actor in enumerate(("learner", "rank-1")):
        await faults.put(rank, phase, ANSWERS)
        await faults.named("rank_late", actor, phase)
        faults.file.with_suffix(".held").write_text("go on")
    assert not await faults.job.events("rank_failed")
    await faults.end()
