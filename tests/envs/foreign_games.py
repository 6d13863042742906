"""Games that raise what is no `Exception`, or return what cannot travel, as the action says."""

import asyncio
import enum
import math
import os
import signal
from typing import Any

import numpy as np
from broken_games import CountingGame
from tinkermq.envs import StepResult


class NoException(BaseException):
    """What `except Exception` does not catch."""


class Unsayable(Exception):
    """Raises as it is shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class Colour(enum.Enum):
    RED = 1


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _loop() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["me"] = value
    return value


def _recurse() -> None:
    _recurse()


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "NoException": lambda: NoException("mine"),
    "CancelledError": asyncio.CancelledError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("two", [NoException("a"), KeyError("b")]),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "Unsayable": Unsayable,
    "UnicodeError": lambda: UnicodeError("cut \udcff here"),
}
"""Exceptions by the name that a message has of them."""

RETURNED: dict[str, Any] = {
    "half observation": lambda: StepResult("ok \udcff", 0.0, False),
    "half of an emoji": lambda: StepResult("\ud83d", 0.0, False),
    "long observation": lambda: StepResult("x" * (9 << 20), 0.0, False),
    "bytes observation": lambda: StepResult(b"x", 0.0, False),  # pyright: ignore[reportArgumentType]
    "no observation": lambda: StepResult(None, 0.0, False),  # pyright: ignore[reportArgumentType]
    "no reward": lambda: StepResult("", None, False),  # pyright: ignore[reportArgumentType]
    "text reward": lambda: StepResult("", "1", False),  # pyright: ignore[reportArgumentType]
    "infinite reward": lambda: StepResult("", math.inf, False),
    "NumPy's NaN": lambda: StepResult("", np.float32("nan"), False),  # pyright: ignore[reportArgumentType]
    "complex reward": lambda: StepResult("", 1j, False),  # pyright: ignore[reportArgumentType]
    "huge reward": lambda: StepResult("", 10**400, False),
    "array reward": lambda: StepResult("", np.ones(2), False),  # pyright: ignore[reportArgumentType]
    "number done": lambda: StepResult("", 0.0, 1),  # pyright: ignore[reportArgumentType]
    "array done": lambda: StepResult("", 0.0, np.array([True, False])),  # pyright: ignore[reportArgumentType]
    "list info": lambda: StepResult("", 0.0, False, [1]),  # pyright: ignore[reportArgumentType]
    "object info": lambda: StepResult("", 0.0, False, {"a": [Colour.RED]}),
    "half info": lambda: StepResult("", 0.0, False, {"a": {"b": "\ud83d"}}),
    "key info": lambda: StepResult("", 0.0, False, {"a": {1: 2}}),
    "bytes key info": lambda: StepResult("", 0.0, False, {b"k": 2}),  # pyright: ignore[reportArgumentType]
    "big info": lambda: StepResult("", 0.0, False, {"n": 2**70}),
    "deep info": lambda: StepResult("", 0.0, False, {"x": _deep(505)}),
    "loop info": lambda: StepResult("", 0.0, False, _loop()),
    "long info": lambda: StepResult("", 0.0, False, {"x": "y" * (9 << 20)}),
    "many info": lambda: StepResult("", 0.0, False, {"x": [[] for _ in range(150_000)]}),
    "strange role": lambda: StepResult("", 0.0, False, role=np.array(["user"] * 2)),  # pyright: ignore[reportArgumentType]
    "late": lambda: asyncio.sleep(0),
}
"""What a step returns, by what the action says."""
BLAMED = {
    "half observation": "step's observation has half a character",
    "half of an emoji": "step's observation has half a character",
    "long observation": "step's observation takes 9,437,184 bytes",
    "bytes observation": "step's observation is b'x' (bytes), it must be a str",
    "no observation": "step's observation is None",
    "no reward": "step's reward is None",
    "text reward": "step's reward is '1' (str)",
    "infinite reward": "step's reward is inf",
    "NumPy's NaN": "step's reward is nan",
    "complex reward": "step's reward is 1j (complex)",
    "huge reward": "step's reward is an integer of some",
    "array reward": "step's reward is float64 array of (2,)",
    "number done": "step's done is 1 (int), it must be a bool",
    "array done": "step's done is bool array of (2,)",
    "list info": "step's info is [1] (list), it must be a dict",
    "object info": "step's info['a'][0] is <Colour.RED: 1>",
    "half info": "step's info['a']['b'] has half a character",
    "key info": "step's info['a'] has the key 1 (int)",
    "bytes key info": "step's info has the key b'k'",
    "big info": "step's info['n'] is 1180591620717411303424",
    "deep info": "nests deeper than 64",
    "loop info": "step's info['me'] holds itself",
    "long info": "step's info['x'] takes 9,437,184 bytes",
    "many info": "step's info holds more than 10,000",
    "strange role": "step's role is",
    "late": "coroutine",
}
"""What the message says of it."""


class Foreign(CountingGame):
    """Does what the first action says."""

    def get_system_prompt(self) -> str:
        return "half \ud83d" if self.trouble == "prompt" else "count"

    def get_initial_user_message(self) -> str:
        return "\udcff" if self.trouble == "user" else "Go."

    def reset(self, trouble: str = "", **state: Any) -> str:
        if trouble in RAISED:
            raise RAISED[trouble]()
        first = super().reset(trouble=trouble, **state)
        return (
            f"{first} \udcff"
            if trouble == "first"
            else "x" * (9 << 20)
            if trouble == "long"
            else first
        )

    def misbehave(self, action: str) -> None:
        if action in RAISED:
            raise RAISED[action]()
        if action == "RecursionError":
            _recurse()
        if action == "deaf":  # it serves nobody any more, and lives
            os.closerange(3, 256)
            signal.pause()
        super().misbehave(action)

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return RETURNED[action]() if action in RETURNED else result


class ForeignAsync(Foreign):
    """Waits before it does."""

    async def reset(self, **state: Any) -> str:
        await asyncio.sleep(0)
        return super().reset(**state)

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(0)
        if action == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        if action == "awaits a cancelled task":
            other = asyncio.create_task(asyncio.sleep(60))
            other.cancel()
            await other
        if action == "a task of it exits":
            await asyncio.create_task(self._exit())
        if action == "stops the loop":
            asyncio.get_running_loop().stop()
        return super().step(action)

    async def _exit(self) -> None:
        raise SystemExit(4)


class Interrupts(Foreign):
    """Sends its process the signal of Ctrl-C, as a terminal does to all of a group."""

    def step(self, action: str) -> StepResult:
        os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class Forks(Foreign):
    """Forks a process that outlives its own, and says its number."""

    def reset(self, trouble: str = "", **state: Any) -> str:
        forked = os.fork()
        if not forked:
            signal.pause()
            os._exit(0)
        super().reset(trouble=trouble, **state)
        return str(forked)
