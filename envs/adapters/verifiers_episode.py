"""One episode of a verifiers environment, worked at between the turns of the policy."""

import asyncio
import atexit
import functools
from typing import Any

from ...schemas.wire.errors import GameError
from .verifiers_agent import PolicyAgent


class VerifiersEpisode:
    """An environment at work on a task, until it asks the policy for a turn or has ended."""

    def __init__(self, vf: Any, env: Any, task: Any) -> None:
        self._vf = vf
        self._env = env
        self._task = task
        self._agent: PolicyAgent | None = None
        self._asked: asyncio.Future[list[Any]] = _event_loop().create_future()
        self._answer: asyncio.Future[str]
        self._run = _event_loop().create_task(self._play())
        self._run.add_done_callback(_look)

    def start(self) -> list[Any] | None:
        """Return the messages before the policy's first turn; None when it never gets one."""
        return self._advance()

    def answer(self, text: str) -> list[Any] | None:
        """Give the policy's turn; return the messages before its next, None when it was the last.

        Raises whatever the environment raises.
        """
        self._asked = _event_loop().create_future()
        self._answer.set_result(text)
        return self._advance()

    @property
    def trace(self) -> Any:
        """The finished record of the policy's run, with its rewards."""
        assert self._agent is not None
        (trace,) = self._agent.traces
        return trace

    def cancel(self) -> None:
        """Give the episode up: its environment ends when the loop turns next."""
        loop = self._run.get_loop()
        if not self._run.done() and not loop.is_closed():
            self._run.cancel()

    def _advance(self) -> list[Any] | None:
        waiting = asyncio.wait((self._run, self._asked), return_when=asyncio.FIRST_COMPLETED)
        _event_loop().run_until_complete(waiting)
        if self._agent is not None and self._agent.refusal is not None:
            self.cancel()
            raise self._agent.refusal
        if self._run.done():
            self._run.result()
            return None
        return self._asked.result()

    async def _play(self) -> None:
        """Run the episode as verifiers does."""
        vf, env, task = self._vf, self._env, self._task
        agents = vf.Agents(env.config, self._make_agent)
        await env.setup(agents)
        await env.run(task, agents)
        assert self._agent is not None
        made = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=made)
        episode.traces = self._agent.traces
        await env.finalize(task, episode)

    def _make_agent(self, name: str, config: Any) -> PolicyAgent:
        self._agent = PolicyAgent(self._vf, name, config, self._ask)
        return self._agent

    def _ask(self, messages: list[Any]) -> "asyncio.Future[str]":
        if self._asked.done():
            raise GameError("the environment asks the policy for two turns at a time")
        self._asked.set_result(messages)
        self._answer = _event_loop().create_future()
        return self._answer


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop in which all environments of this process work, one at a time."""
    loop = asyncio.new_event_loop()
    atexit.register(_close, loop)
    return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End what episodes that were given up have left."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


def _look(run: "asyncio.Task[None]") -> None:
    """Look at an error that nobody may ask for any more."""
    if not run.cancelled():
        run.exception()
