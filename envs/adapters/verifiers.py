"""Environments of verifiers: tasksets of one agent, in one turn or many.

The environment's own code runs the episode, sets up, finalises and scores; the policy is its agent.
Tasks that need tools, a container or a second model are refused with the reason.
"""

import asyncio
import atexit
import contextlib
import functools
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, Literal, cast

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..registry import extra
from ..running.episodes import retrieve_error
from ..running.global_random import GlobalRandom

# The policy as an agent of a verifiers environment.
#
# The environment's own `run` drives the episode. Whenever it requests a turn of the agent, it waits
# until the policy has written one: the policy is the agent, without an endpoint or a program
# between them.

Reply = Callable[[list[Any]], "asyncio.Future[str]"]
"""Shows messages to the policy; the future is its answer."""


class PolicyAgent:
    """The one agent of an environment, for one episode."""

    def __init__(self, vf: Any, name: str, config: Any, reply: Reply) -> None:
        self.config = config
        self.trainable = True
        self.traces: list[Any] = []
        """Traces of the runs that have ended."""
        self._vf = vf
        self._name = name
        self.refusal: GameError | None = None
        """The error of a request that the agent does not support."""
        self._reply = reply
        self._num_runs = 0

    async def run(self, task: Any, **unsupported: Any) -> Any:
        """Play a task in one turn and score it; return its trace."""
        async with self.interaction(task, **unsupported) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **unsupported: Any) -> AsyncIterator["PolicyTurns"]:
        """Keep a run open, turn by turn; its end finishes and scores the task."""
        check_task(self._vf, task)
        self._num_runs += 1
        if self._num_runs > 1 or any(value is not None for value in unsupported.values()):
            self.refusal = GameError(
                "the environment runs its agent more than once in an episode, or in a box",
                hint="play environments that are one conversation with one agent",
            )
            raise self.refusal
        vf = self._vf
        made = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=self.config, name=self._name)
        trace = vf.Trace(task=made, state=vf.state.state_cls(type(task))(), agent=agent)
        invoke = self._vf.utils.decorators.invoke
        hooks = {"trace": trace, "runtime": None}
        await invoke(task.setup, hooks)
        turns = PolicyTurns(self._vf, task, trace, self._reply, self.config.max_turns)
        yield turns
        await invoke(task.finalize, hooks)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self.traces.append(trace)


class PolicyTurns:
    """An open run: the result of `agent.interaction(task)`."""

    def __init__(self, vf: Any, task: Any, trace: Any, reply: Reply, max_turns: int | None) -> None:
        self.trace = trace
        self._vf = vf
        self._task = task
        self._reply = reply
        self._max_turns = max_turns
        self._unsent: list[Any] = []
        """Messages that the policy has not seen."""
        if task.data.system_prompt is not None:
            self._unsent.append(vf.SystemMessage(content=task.data.system_prompt))

    async def turn(self, message: Any = None) -> Any:
        """Show the policy the user's turn, or at first the task's prompt; return its answer."""
        vf = self._vf
        self._unsent += self._messages(message)
        if await self._stopped():
            return vf.Segment(messages=[], terminated=True)
        answer = vf.AssistantMessage(content=await self._reply(self._unsent))
        for message in self._unsent:
            self._add(message, sampled=False)
        self._unsent = []
        self._add(answer, sampled=True)
        return vf.Segment(messages=[answer], root_reply=answer.content)

    def _messages(self, message: Any) -> list[Any]:
        if message is None:
            message = self._task.data.prompt
        if isinstance(message, str):
            return [self._vf.UserMessage(content=message)]
        parse = self._vf.dialects.parse_message
        messages = cast("list[Any]", message or [])
        return [parse(item) if isinstance(item, dict) else item for item in messages]

    async def _stopped(self) -> bool:
        """Return whether a limit or one of the task's own `@stop` conditions ends the run."""
        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
        elif self.trace.nodes:
            for stop in self._task.hooks("stop"):
                stops = self._vf.utils.decorators.invoke(stop, {self._vf.Trace: self.trace})
                if await stops if inspect.isawaitable(stops) else stops:
                    self.trace.stop(stop.__name__)
        return self.trace.stop_condition is not None

    def _add(self, message: Any, *, sampled: bool) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(self._vf.MessageNode(parent=parent, message=message, sampled=sampled))


def check_task(vf: Any, task: Any) -> None:
    """Raise GameError for a task that needs more than a conversation."""
    scoring = [*task.hooks("reward"), *task.hooks("metric")]
    lacks = {
        "a container": task.NEEDS_CONTAINER or task.data.image is not None,
        "tools": bool(task.toolsets(task.config)),
        "interception": bool(vf.utils.decorators.discover_decorated(task, "intercept")),
        "a runtime to score in": any(_wants_runtime(function) for function in scoring),
    }
    needs = [what for what, needed in lacks.items() if needed]
    if needs:
        raise GameError(
            f"tasks of {type(task).__name__} need {' and '.join(needs)}",
            hint="play here what is a conversation; verifiers runs others itself, as a program: "
            "agent.command=[{python}, -m, tinkermq.envs.adapters.verifiers_program, TASKSET]",
        )


def _wants_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# One episode of a verifiers environment, which runs between the turns of the policy.


class VerifiersEpisode:
    """An environment that runs a task until it needs the policy's turn or has ended."""

    def __init__(self, vf: Any, env: Any, task: Any) -> None:
        self._vf = vf
        self._env = env
        self._task = task
        self._agent: PolicyAgent | None = None
        self._prompt: asyncio.Future[list[Any]] = _event_loop().create_future()
        self._answer: asyncio.Future[str]
        self._run = _event_loop().create_task(self._play())
        self._run.add_done_callback(retrieve_error)

    def start(self) -> list[Any] | None:
        """Return the messages before the policy's first turn; None without any turn."""
        return self._advance()

    def answer(self, text: str) -> list[Any] | None:
        """Pass on the policy's turn; return the messages before its next one, None after the last.

        Raises any exception of the environment.
        """
        self._prompt = _event_loop().create_future()
        self._answer.set_result(text)
        return self._advance()

    @property
    def trace(self) -> Any:
        """The finished record of the policy's run, with its rewards."""
        assert self._agent is not None
        (trace,) = self._agent.traces
        return trace

    def cancel(self) -> None:
        """Abandon the episode: its environment ends in the next iteration of the event loop."""
        loop = self._run.get_loop()
        if not self._run.done() and not loop.is_closed():
            self._run.cancel()

    def _advance(self) -> list[Any] | None:
        waiting = asyncio.wait((self._run, self._prompt), return_when=asyncio.FIRST_COMPLETED)
        _event_loop().run_until_complete(waiting)
        if self._agent is not None and self._agent.refusal is not None:
            self.cancel()
            raise self._agent.refusal
        if self._run.done():
            self._run.result()
            return None
        return self._prompt.result()

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
        self._agent = PolicyAgent(self._vf, name, config, self._prompt_policy)
        return self._agent

    def _prompt_policy(self, messages: list[Any]) -> "asyncio.Future[str]":
        if self._prompt.done():
            raise GameError("the environment asks the policy for two turns at a time")
        self._prompt.set_result(messages)
        self._answer = _event_loop().create_future()
        return self._answer


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all environments of this process; one runs at a time."""
    loop = asyncio.new_event_loop()
    atexit.register(_close, loop)
    return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks of abandoned episodes."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


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
        self._episode: VerifiersEpisode | None = None

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a task and a seed."""
        number = self.rng.randrange(len(self._tasks))
        return {"number": number, "seed": self.rng.getrandbits(31)}

    def reset(self, *, number: int = 0, seed: int = 0, **_: Any) -> str:
        """Start the environment on a task and return its first messages for the policy."""
        self._task = self._tasks[number]
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._episode = VerifiersEpisode(self._vf, self._env, self._task)
            shown = self._episode.start()
        if shown is None:
            raise GameError(f"{self._taskset} was over before the policy's first turn")
        self._system = "\n\n".join(_text(message) for message in shown if message.role == "system")
        rest = [message for message in shown if message.role != "system"]
        if len(rest) != 1 or rest[0].role != "user":
            roles = ", ".join(message.role for message in rest) or "nothing"
            raise GameError(f"a prompt of {self._taskset} is {roles}, it must be one user message")
        return _text(rest[0])

    def step(self, action: str) -> StepResult:
        """Pass on the policy's turn and run to its next one, or to the end."""
        assert self._episode is not None
        with self._dice.lent():
            shown = self._episode.answer(action)
        if shown is not None:
            text = "\n\n".join(map(_text, shown))
            return StepResult(text, 0.0, done=False, info={"type": self._taskset})
        trace = self._episode.trace
        scores = {
            name: reward.score for name, reward in trace.rewards.items() if reward is not None
        }
        info = {**trace.metrics, **scores, "type": self._taskset}
        return StepResult("", float(trace.reward), done=True, info=info)

    def close(self) -> None:
        """Abandon the environment, unless it has ended."""
        if self._episode is not None:
            with self._dice.lent():
                self._episode.cancel()

    def get_system_prompt(self) -> str:
        """Return the task's own system prompt."""
        return self._system

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
        raise GameError(
            f"a {message.role} message has parts and not one text: {message.content!r:.80}"
        )
    return message.content
