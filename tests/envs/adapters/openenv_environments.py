"""Environments written with the package openenv, as its users write them.

For uvicorn: `openenv_environments:tools` and `openenv_environments:tasks`.
"""

# pyright: reportMissingImports=false

import os
import random
from typing import Any, ClassVar

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

MAX_SESSIONS = int(os.environ.get("MAX_SESSIONS", "64"))


class CounterEnvironment(MCPEnvironment):
    """A counter that is to reach a number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.value = self.goal = 0

        @server.tool
        def add(amount: int) -> str:
            """Add an amount to the counter."""
            self.value += amount
            return f"the counter is {self.value}"

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("this tool fails")

        super().__init__(server)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **_: Any
    ) -> Observation:
        self.goal = random.Random(seed).randint(2, 9)
        return Observation(metadata={"goal": self.goal})

    def _step_impl(self, action: Action, timeout_s: Any = None, **_: Any) -> Observation:
        raise ValueError("call a tool")

    async def step_async(self, action: Action, timeout_s: Any = None, **_: Any) -> Observation:
        seen = await super().step_async(action, timeout_s)
        seen.done = self.value >= self.goal
        seen.reward = 1.0 if self.value == self.goal else None
        return seen

    @property
    def state(self) -> State:
        return State(step_count=self.value)


class AnswerAction(Action):
    """Answer the question."""

    number: int = Field(ge=0, description="The sum.")
    unit: str = ""


class QuestionObservation(Observation):
    """A question, or what is said of an answer."""

    text: str


class SumsEnvironment(Environment[AnswerAction, QuestionObservation, State]):
    """Sums of two numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    TASKS: ClassVar = {"train": [(n, n + 1) for n in range(20)], "test": [(50, 3), (60, 4)]}

    def __init__(self) -> None:
        self.sum = (0, 0)

    def list_splits(self) -> list[str]:
        return list(self.TASKS)

    def list_tasks(self, split: str) -> list[Any]:
        return self.TASKS[split]

    def num_tasks(self, split: str) -> int:
        return len(self.TASKS[split])

    def get_task(self, split: str, index: int) -> Any:
        return self.TASKS[split][index]

    def reset(  # type: ignore[override]
        self, seed: int | None = None, split: str = "train", index: int = 0, **_: Any
    ) -> QuestionObservation:
        self.sum = self.TASKS[split][index]
        return QuestionObservation(text=f"{split} {index}: {self.sum[0]} + {self.sum[1]} = ?")

    def step(self, action: AnswerAction, **_: Any) -> QuestionObservation:  # type: ignore[override]
        if action.unit == "broken":
            raise RuntimeError("the environment broke")
        if action.unit == "huge":
            return QuestionObservation(text="x" * (50 << 20))
        if action.unit == "dead":
            os._exit(1)
        right = action.number == sum(self.sum)
        return QuestionObservation(text="right" if right else "wrong", reward=right, done=True)

    @property
    def state(self) -> State:
        return State()


tools = create_app(
    CounterEnvironment,
    CallToolAction,
    CallToolObservation,
    env_name="counter",
    max_concurrent_envs=MAX_SESSIONS,
)
tasks = create_app(
    SumsEnvironment,
    AnswerAction,
    QuestionObservation,
    env_name="sums_env",
    max_concurrent_envs=MAX_SESSIONS,
)
