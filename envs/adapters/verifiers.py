"""Environments of verifiers: tasksets of one agent, in one turn or many.

The environment's own code runs the episode, sets up, finalises and scores; the policy is its agent.
Tasks that need tools, a container or a second model are refused with the reason.
"""

import functools
import json
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ...schemas.wire.errors import GameError
from ..extra import extra
from ..game import AbstractGame, StepResult
from ..running.global_random import GlobalRandom
from .verifiers_agent import check_task
from .verifiers_episode import VerifiersEpisode


class VerifiersGame(AbstractGame):
    """Play a verifiers environment of one agent."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    needs = extra("verifiers", "verifiers")

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        env: str = "",
        env_config: Mapping[str, Any] | None = None,
        num_tasks: int = 1024,
    ) -> None:
        """Choose a taskset by its id, as verifiers does, and its configuration.

        `env` is the id of an environment other than the taskset's own, `env_config` further keys of
        its configuration. Each episode draws one of the first `num_tasks` tasks.
        """
        self._vf = self.needs.load("v1")
        chosen = {**(env_config or {}), "id": env, "taskset": {**(config or {}), "id": taskset}}
        self._env, self._tasks = _load(self._vf, json.dumps(chosen, sort_keys=True), num_tasks)
        self._taskset = taskset
        self._dice: GlobalRandom
        self._task: Any = None
        self._system = ""
        self._episode: VerifiersEpisode

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a task and a seed."""
        number = self.rng.randrange(len(self._tasks))
        return {"number": number, "seed": self.rng.getrandbits(31)}

    def reset(self, *, number: int = 0, seed: int = 0, **_: Any) -> str:
        """Start the environment on a task and return what it tells the policy first."""
        self._task = self._tasks[number]
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._episode = VerifiersEpisode(self._vf, self._env, self._task)
            weakref.finalize(self, self._episode.cancel)
            shown = self._episode.start()
        if shown is None:
            raise GameError(f"{self._taskset} was over before the policy's first turn")
        self._system = "\n\n".join(_text(one) for one in shown if one.role == "system")
        told = [one for one in shown if one.role != "system"]
        if len(told) != 1 or told[0].role != "user":
            roles = ", ".join(one.role for one in told) or "nothing"
            raise GameError(f"a prompt of {self._taskset} is {roles}, it must be one user message")
        return _text(told[0])

    def step(self, action: str) -> StepResult:
        """Give the environment the policy's turn and go on to its next one, or to the end."""
        with self._dice.lent():
            shown = self._episode.answer(action)
        if shown is not None:
            told = "\n\n".join(_text(one) for one in shown)
            return StepResult(told, 0.0, done=False, info={"type": self._taskset})
        trace = self._episode.trace
        scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
        info = {**trace.metrics, **scores, "type": self._taskset}
        return StepResult("", float(trace.reward), done=True, info=info)

    def get_system_prompt(self) -> str:
        """Return the task's own system prompt."""
        return self._system

    def get_initial_user_message(self) -> str:
        """Return nothing: the task's prompt says it all."""
        return ""

    def get_interaction_name(self) -> str:
        """Return the taskset's id."""
        return self._taskset

    def get_state(self) -> dict[str, Any]:
        """Return the taskset and the task's number."""
        number = None if self._task is None else self._task.data.idx
        return {"taskset": self._taskset, "task": number}


@functools.lru_cache(maxsize=8)
def _load(vf: Any, chosen: str, num_tasks: int) -> tuple[Any, list[Any]]:
    """Return the environment of a configuration and its first tasks."""
    config = vf.resolve_env_config(json.loads(chosen))
    agents = list(vf.configs.agent.agent_config_fields(config))
    if len(agents) != 1:
        raise GameError(
            f"the environment {config.env_id} has the agents {', '.join(agents)}",
            hint="here it can have one, the policy",
        )
    with GlobalRandom(0).lent():
        env = vf.load_environment(config)
        tasks = list(env.taskset.take(num_tasks))
    if not tasks:
        raise GameError(f"the taskset {config.taskset.id} has no tasks")
    check_task(vf, tasks[0])
    return env, tasks


def _text(message: Any) -> str:
    if not isinstance(message.content, str):
        raise GameError(f"a {message.role} message is no text but parts: {message.content!r:.80}")
    return message.content
