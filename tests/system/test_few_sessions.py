"""Jobs whose environments have few sessions: those of episodes that are given up are given back."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.envs.adapters.openenv_server import Behaviour, observed, serving
from tests.support.configs import small_job
from tests.support.proofs import assert_every_task_once
from tests.support.stack import Stack

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.full]

NUM_SESSIONS = 3
NUM_BAD = 12
"""First starts of episodes that a server disturbs."""
MESSAGE = {"type": "error", "data": {"message": "no", "code": "BROKEN"}}


async def test_tasks_given_up_while_their_episodes_begin_leave_the_sessions_to_the_next_job(
    stack: Stack, model: Path
) -> None:
    starts = itertools.count()
    began: dict[int, int] = {}

    def number(message: dict[str, Any]) -> int:
        return began.setdefault(id(message), next(starts))

    def delay_s(message: dict[str, Any]) -> float:
        """Every fourth start fails at once, while the others of its group still wait."""
        is_bad = message["type"] == "reset" and number(message) < NUM_BAD
        return 0.7 if is_bad and number(message) % 4 else 0.0

    def answer(message: dict[str, Any]) -> Any:
        if message["type"] == "step":
            return observed({"reply": "well"}, 1.0, True)
        at = began.pop(id(message), NUM_BAD)
        return MESSAGE if at < NUM_BAD and at % 4 == 0 else None

    behaviour = Behaviour(max_sessions=NUM_SESSIONS, delay_s=delay_s, answer=answer)
    with serving(behaviour) as (url,):
        config = small_job(
            model,
            env={"game": "openenv", "kwargs": {"url": url}, "lease_s": 3600},
            rollout={"max_tries": 1},
            training={"num_steps": 2, "batch_size": 2},
        )
        first, second = await stack.submit(config), await stack.submit(config)
        for job in (first, second):
            await job.until("COMPLETED")
            await assert_every_task_once(job)
        given_up = await first.events("task_given_up") + await second.events("task_given_up")
        assert given_up
    assert behaviour.most_open <= NUM_SESSIONS
