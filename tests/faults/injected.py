"""Faults that tests put into a run from outside."""

import os
import signal
import time

from tinkermq.broker.client.rpc import call
from tinkermq.clients import make_trajectory
from tinkermq.schemas.control import ReserveReply, ReserveRequest
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task

from tests.support.jobs import Job
from tests.support.processes import alive
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

_WRITTEN_S = 5.0
"""For how long a checkpoint is written, at most."""


def episode(reward: float, last_token: int = 13) -> Trajectory:
    """Return an episode of four tokens, as an agent of the user's own makes it."""
    tokens = [10, 11, 12, last_token]
    return make_trajectory(tokens, [0, 0, 1, 1], [0, 0, -5.0, -5.0], reward, version=0)


async def append_untrainable(stack: Stack, job: Job) -> int:
    """Append a group whose tokens the model does not have, as an agent without our client could."""
    reserved = await call(
        stack.broker,
        f"{job.scope.control('learner')}.reserve",
        ReserveRequest(count=1, source="smuggler"),
        ReserveReply,
        timeout_s=10,
        waiting_for="the learner",
    )
    task = Task(task=reserved.tasks[0], seed=0, group_size=2)
    bad = [episode(0), episode(1, last_token=9999)]
    assert await job.rollout_log.append(Group(task=task, trajectories=bad, source="smuggler"))
    return task.task


def kill_after_checkpoint(stack: Stack, job: Job, pid: int) -> int:
    """Kill a learner between a checkpoint and whatever it does next; return the checkpoint's step.

    The broker is halted while the checkpoint is written, so the learner can tell nobody of it. One
    that is not whole by then, because the learner waits for the broker, is let go for the next.
    """
    folder, broker = job.run_dir / "checkpoints", stack.server.pid
    assert broker is not None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        begun = next(folder.glob(".step_*"), None)
        if begun is None:
            continue
        whole = folder / begun.name[1 : len("step_000000") + 1]
        os.kill(broker, signal.SIGSTOP)
        try:
            patience = time.monotonic() + _WRITTEN_S
            while not whole.is_dir() and time.monotonic() < patience:
                assert alive(pid)
            if whole.is_dir():
                os.kill(pid, signal.SIGKILL)
                while alive(pid):
                    pass
                return int(whole.name.removeprefix("step_"))
        finally:
            os.kill(broker, signal.SIGCONT)
    raise AssertionError(f"no checkpoint was written within {PATIENCE_S:g} s")
