"""A function of the user's that is an agent: whatever it does ends its own episode."""

import asyncio
import math
import threading
from typing import Any

import pytest
from tinkermq.clients.base import LoopThread
from tinkermq.clients.hosting.agent_environment import AgentEnvironment, AgentEpisode
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.leases import EpisodeLease

from tests.support.waiting import PATIENCE_S


class NoException(BaseException):
    """What `except Exception` does not catch."""


class Unsayable(Exception):
    """Raises as it is shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "NoException": NoException("mine"),
    "CancelledError": asyncio.CancelledError(),
    "BaseExceptionGroup": BaseExceptionGroup("g", [NoException("x")]),
    "StopIteration": StopIteration(),
    "Unsayable": Unsayable(),
    "ValueError": ValueError("cut \ud83d"),
}
"""What a function raises, by the name that the error has of it."""
RETURNED: dict[str, Any] = {
    "a text": "1.0",
    "not a number": math.nan,
    "infinite": -math.inf,
    "complex": 1j,
    "a list": [1.0],
    "an unknown key": {"reward": 1.0, "points": 3},
    "an object in info": {"reward": 1.0, "info": {"x": [object()]}},
    "half a character in info": {"reward": 1.0, "info": {"x": "\ud83d"}},
    "a number as a key": {"reward": 1.0, "info": {1: 2}},
    "info that is no map": {"reward": 1.0, "info": 7},
}


async def played(program: Any) -> EpisodeLease:
    """Let a function play an episode to its end."""
    environment = AgentEnvironment(program)
    given = EpisodeLease(ProgramEpisode("e-1", {}), [], "http://127.0.0.1:1", {})
    episode = AgentEpisode(given, asyncio.get_running_loop())
    environment.start_episode(episode, given)
    async with asyncio.timeout(PATIENCE_S):
        await given.episode.said_end.wait()
    return given


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
async def test_whatever_a_function_raises_is_a_crash_of_its_episode(
    name: str, is_async: bool
) -> None:
    def plain(task: Any, model: Any) -> float:
        raise RAISED[name]

    async def waiting(task: Any, model: Any) -> float:
        await asyncio.sleep(0)
        raise RAISED[name]

    given = await played(waiting if is_async else plain)
    assert name in given.error
    assert "raise RAISED[name]" in given.error
    given.error.encode()
    assert given.episode.reward is None


@pytest.mark.parametrize("name", RETURNED)
async def test_what_is_no_worth_is_a_crash_of_its_episode(name: str) -> None:
    given = await played(lambda task, model: RETURNED[name])
    assert "Error" in given.error
    assert given.episode.reward is None
    assert given.episode.info == {}


@pytest.mark.parametrize("reward", [1, 0.5, True])
async def test_what_is_a_worth_is_one_however_the_function_is_written(reward: Any) -> None:
    async def later() -> Any:
        return {"reward": reward, "success": True, "info": {"n": (1, 2)}}

    given = await played(lambda task, model: later())
    assert given.error == ""
    assert given.episode.reward == float(reward)
    assert given.episode.info == {"success": True, "n": [1, 2]}


async def test_an_episode_that_is_dropped_ends_its_function() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def program(task: Any, model: Any) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    environment = AgentEnvironment(program)
    given = EpisodeLease(ProgramEpisode("e-1", {}), [], "http://127.0.0.1:1", {})
    environment.start_episode(AgentEpisode(given, asyncio.get_running_loop()), given)
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        for drop in given.on_drop:
            drop()
        await cancelled.wait()
        await asyncio.gather(*environment._tasks, return_exceptions=True)
    assert given.error == ""


def test_a_task_that_exits_ends_no_loop_of_other_episodes() -> None:
    loop = LoopThread("test")

    async def exits() -> None:
        raise SystemExit(4)

    async def program(task: Any, model: Any) -> float:
        await asyncio.create_task(exits())
        return 1.0

    try:
        assert "SystemExit: 4" in loop.run(played(program)).error
        assert loop.run(played(lambda task, model: 1.0)).episode.reward == 1.0
    finally:
        ended = threading.Thread(target=loop.close)
        ended.start()
        ended.join(PATIENCE_S)
        assert not ended.is_alive()
