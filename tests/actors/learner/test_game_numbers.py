"""What games tell becomes one number of the job, whichever host played them."""

import asyncio
from contextlib import AsyncExitStack, nullcontext

import numpy as np
import pytest
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S

GAME = EnvConfig(game="guess", hosts=2)


async def hosted(broker: Broker, scope: JobScope, stack: AsyncExitStack) -> None:
    """Serve the game until the stack is left."""
    host, stopping = EnvironmentHost(broker, scope, GAME, drain_s=0.01), asyncio.Event()
    group = await stack.enter_async_context(asyncio.TaskGroup())
    group.create_task(host.run(stopping))
    stack.callback(stopping.set)
    await asyncio.wait_for(host.ready.wait(), PATIENCE_S)


async def play(hosts: Environments, task: int, sample: int) -> tuple[str, dict[str, int], float]:
    """Guess 0, 1, 2 …, or 3 and onwards; return the host, the last info and the return."""
    started = await hosts.reset(f"e{task}-{sample}", Start("train", None, task))
    for turn in range(3):
        guess = str(turn + 3 * sample)
        result = await hosts.step(started.host, f"e{task}-{sample}", turn, guess)
        if result.done:
            return started.host, result.info, result.reward
    raise AssertionError("the game goes on after three tries")


async def test_two_hosts_tell_one_success_rate_and_one_mean(
    broker: Broker, scope: JobScope
) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await hosted(broker, scope, stack)
        hosts = Environments(broker, scope, GAME, lambda _: nullcontext())
        names = [(task, sample) for task in range(20) for sample in range(2)]
        played = await asyncio.gather(*(play(hosts, *name) for name in names))
    assert len({host for host, _, _ in played}) == 2
    groups: list[Group] = []
    for task in range(20):
        pair = played[2 * task : 2 * task + 2]
        groups.append(
            make_group(
                [
                    make_trajectory([1], [([2], [])], [reward], info=info, host=host)
                    for host, info, reward in pair
                ],
                task,
            )
        )
    numbers = group_numbers(groups, 0, 8, success_reward=0.5)
    assert numbers["game/success_rate"] == np.mean([reward for _, _, reward in played])
    assert 0 < numbers["game/success_rate"] < 1
    tries = [info["tries"] for _, info, _ in played]
    assert numbers["game/tries"] == pytest.approx(np.mean(tries))
