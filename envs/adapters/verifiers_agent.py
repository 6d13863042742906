"""The policy as an agent of a verifiers environment.

The environment's own `run` drives the episode. Whenever it asks the agent for a turn, it waits
until the policy has written one: the policy is the agent, no endpoint and no program stand between.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from ...schemas.wire.errors import GameError

Reply = Callable[[list[Any]], "asyncio.Future[str]"]
"""Shows messages to the policy; the future is its answer."""


class PolicyAgent:
    """Stands for the one agent of an environment, for one episode."""

    def __init__(self, vf: Any, name: str, config: Any, reply: Reply) -> None:
        self.config = config
        self.trainable = True
        self.traces: list[Any] = []
        """Traces of the runs that have ended."""
        self._vf = vf
        self._name = name
        self.refusal: GameError | None = None
        """Why the episode cannot go on: a thing was asked of the agent that it has not."""
        self._reply = reply
        self._num_runs = 0

    async def run(self, task: Any, **unsupported: Any) -> Any:
        """Play a task in one turn and score it; return its trace."""
        async with self.interaction(task, **unsupported) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **unsupported: Any) -> AsyncIterator["PolicyTurns"]:
        """Hold a run open, turn by turn; its end finishes and scores the task."""
        check_task(self._vf, task)
        self._num_runs += 1
        if self._num_runs > 1 or any(value is not None for value in unsupported.values()):
            self.refusal = GameError(
                "the environment runs its agent more than once in an episode, or in a box",
                hint="play environments that are one conversation with one agent",
            )
            raise self.refusal
        trace = self._new_trace(task)
        invoke = self._vf.utils.decorators.invoke
        hooks = {"trace": trace, "runtime": None}
        await invoke(task.setup, hooks)
        turns = PolicyTurns(self._vf, task, trace, self._reply, self.config.max_turns)
        yield turns
        await invoke(task.finalize, hooks)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self.traces.append(trace)

    def _new_trace(self, task: Any) -> Any:
        vf = self._vf
        made = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=self.config, name=self._name)
        return vf.Trace(task=made, state=vf.state.state_cls(type(task))(), agent=agent)


class PolicyTurns:
    """A run that is held open: what `agent.interaction(task)` yields."""

    def __init__(self, vf: Any, task: Any, trace: Any, reply: Reply, max_turns: int | None) -> None:
        self.trace = trace
        self._vf = vf
        self._task = task
        self._reply = reply
        self._max_turns = max_turns
        self._told: list[Any] = []
        """Messages that the policy has not seen."""
        if task.data.system_prompt is not None:
            self._told.append(vf.SystemMessage(content=task.data.system_prompt))

    async def turn(self, message: Any = None) -> Any:
        """Show the policy the user's turn, or at first the task's prompt; return its answer."""
        vf = self._vf
        self._told += self._messages(message)
        if await self._stopped():
            return vf.Segment(messages=[], terminated=True)
        answer = vf.AssistantMessage(content=await self._reply(self._told))
        for told in self._told:
            self._add(told, sampled=False)
        self._told = []
        self._add(answer, sampled=True)
        return vf.Segment(messages=[answer], root_reply=answer.content)

    def _messages(self, message: Any) -> list[Any]:
        if message is None:
            message = self._task.data.prompt
        if isinstance(message, str):
            return [self._vf.UserMessage(content=message)]
        parse = self._vf.dialects.parse_message
        messages = cast("list[Any]", message or [])
        return [parse(one) if isinstance(one, dict) else one for one in messages]

    async def _stopped(self) -> bool:
        """Whether a limit or one of the task's own `@stop` conditions ends the run."""
        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
        elif self.trace.nodes:
            for stop in self._task.hooks("stop"):
                found = self._vf.utils.decorators.invoke(stop, {self._vf.Trace: self.trace})
                if await found if inspect.isawaitable(found) else found:
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
