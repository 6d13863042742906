"""Ranks that hang while their actors answer: which one, and where."""

import asyncio
import os
import signal
import time

import pytest
import torch.distributed as dist
from tinkermq.actors.learner.ranks import processes
from tinkermq.actors.learner.ranks.processes import PlacedRanks, RankActor, _RankProcess, _Waits
from tinkermq.actors.training.parallel import Meeting, Parallel
from tinkermq.actors.training.progress import num_collectives
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context
from tests.support.waiting import until


def test_the_rank_for_which_the_others_wait_is_named_once() -> None:
    waits = _Waits()
    late = {}
    for now in range(0, 200, 5):
        # Until 20 all go on, then rank-1 misses the next collective until 100.
        count = min(now, 20) if now < 100 else now
        others = min(now, 25) if now < 100 else now
        for name in waits.late({"rank-1": count, "rank-2": others, "learner": others}, now):
            late[now] = name
    assert late == {70: "rank-1"}
    assert waits.late({"rank-1": 1, "learner": 1}, 1000) == []  # all compute


@pytest.mark.parametrize(
    ("longest_s", "deadline_s"), [(None, 600), (0.1, 180), (60, 300), (500, 600)]
)
def test_a_rank_has_several_times_the_longest_duration_of_its_phase(
    longest_s: float | None, deadline_s: float
) -> None:
    assert processes.deadline_s(longest_s) == deadline_s


def test_collectives_of_training_are_counted_and_those_of_saves_are_not() -> None:
    import torch

    parallel = Parallel.join(0, LearnerConfig(), Meeting.open())
    try:
        before = num_collectives()
        dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1), group=parallel.in_background.group)
        assert num_collectives() == before + 1
        assert num_collectives(of_saves=True) == 1
    finally:
        parallel.leave()
    assert num_collectives() == 0


@pytest.mark.full
async def test_a_rank_whose_process_hangs_is_named_with_its_order(
    broker: Broker, scope: JobScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HANG_S", 3.0)
    config = JobConfig.model_validate({"model": {"path": "m"}, "env": {"game": "g"}})
    context = await job_context(broker, scope, "rank", config)
    context.name = "rank-1"
    actor = RankActor(context)
    ranks = PlacedRanks(await job_context(broker, scope, "learner", config))
    ranks._learner, ranks._processes = "", {"rank-1": actor._id}
    serving = asyncio.create_task(actor.serve())
    process = actor._process = _RankProcess.start(1)

    async def error() -> str:
        state = await ranks._read_state("rank-1")
        assert state is not None
        return state.error

    def age_s() -> float:
        return time.monotonic() - process.progress.at

    await until(lambda: age_s() < 2.5, "the process to run")
    os.kill(process.process.pid, signal.SIGSTOP)
    await until(lambda: age_s() > 3.5, "the process to be silent")
    place = "rank-1 on h in no phase of an order"
    assert f"{place}: its process hangs: it has not run for" in await error()
    os.kill(process.process.pid, signal.SIGCONT)
    await until(lambda: age_s() < 2.5, "the process to run again")
    context.stopping.set()
    await serving
    await ranks._context.service.stop()
    await context.service.stop()
