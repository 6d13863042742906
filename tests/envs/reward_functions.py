"""Reward functions, good and bad ones; importable, so that environment hosts find them by name."""

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any


def verl_style(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Judge as verl's functions do: a map with the score and what else is known."""
    right = solution_str == ground_truth
    return {"score": float(right), "source": data_source, "level": (extra_info or {}).get("level")}


def says_all(**told: Any) -> dict[str, Any]:
    """Earn the number of messages, and tell what there is to know."""
    return {"reward": len(told["messages"]), "known": sorted(told)}


def raises(**_: Any) -> float:
    """Fail."""
    raise KeyError("no rubric")


def hangs(**_: Any) -> float:
    """Take too long."""
    time.sleep(5)
    return 1.0


def says_nothing(**_: Any) -> None:
    """Return no reward."""


def says_text(**_: Any) -> str:
    """Return a text that looks like a number."""
    return "1.0"


def says_nan(**_: Any) -> float:
    """Return what no sum survives."""
    return math.nan


not_a_function = 7


class NoException(BaseException):
    """What `except Exception` does not catch."""


class Unsayable(BaseException):
    """Raises as it is shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class Unreadable:
    """A number that raises as it is read."""

    def __float__(self) -> float:
        raise NoException("no number")


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(1),
    "GeneratorExit": GeneratorExit(),
    "NoException": NoException("mine"),
    "CancelledError": asyncio.CancelledError(),
    "BaseExceptionGroup": BaseExceptionGroup("g", [NoException("x")]),
    "StopIteration": StopIteration(),
    "Unsayable": Unsayable(),
    "ValueError": ValueError("cut \ud83d"),
}
RETURNED: dict[str, Any] = {
    "infinity": math.inf,
    "complex": 1j,
    "too large": 10**400,
    "bytes": b"1",
    "nothing in a map": {"score": None},
    "a map without": {"points": 1},
    "half a character": {"score": 1, "why": "\udcff"},
    "an object": {"score": 1, "why": [object()]},
    "a number as a key": {"score": 1, "per": {1: 2}},
    "a large number": {"score": 1, "n": 2**70},
    "unreadable": Unreadable(),
    "itself": {},
}
RETURNED["itself"] |= {"score": 1, "me": RETURNED["itself"]}
TOLD = {
    "infinity": "answered inf, which is not a finite reward",
    "complex": "answered 1j",
    "too large": "answered an integer of some",
    "bytes": "answered b'1'",
    "nothing in a map": "which is not a finite reward",
    "a map without": "answered {'points': 1}",
    "half a character": "info['why'] has half a character",
    "an object": "info['why'][0] is <object",
    "a number as a key": "info['per'] has the key 1",
    "a large number": "info['n'] is 1180591620717411303424",
    "unreadable": "raised NoException: no number",
    "itself": "holds itself",
}


def foreign(solution_str: str, **_: Any) -> Any:
    """Raise or return what the answer says."""
    if solution_str in RAISED:
        raise RAISED[solution_str]
    return RETURNED.get(solution_str, 2.0)


async def foreign_async(solution_str: str, **_: Any) -> Any:
    """Do the same after a while; also what only coroutines can."""
    await asyncio.sleep(0.001)
    if solution_str == "cancels itself":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
    if solution_str == "a task exits":
        await asyncio.create_task(_exit())
    if solution_str == "wait long":
        await asyncio.sleep(3600)
    if solution_str == "compute":
        time.sleep(4)  # noqa: ASYNC251 - the mistake that is tested
    return foreign(solution_str)


async def _exit() -> None:
    raise SystemExit(4)


class AsyncScorer:
    """An object that is called."""

    async def __call__(self, solution_str: str, **_: Any) -> float:
        """Wait."""
        await asyncio.sleep(0)
        return 3.0


async_object = AsyncScorer()
async_part = functools.partial(foreign_async)


def async_in_disguise(solution_str: str, **_: Any) -> Awaitable[Any]:
    """Return a coroutine, as a decorator may."""
    return foreign_async(solution_str)


def generates(**_: Any) -> Iterator[float]:
    """Yield."""
    yield 1.0


async def generates_async(**_: Any) -> AsyncIterator[float]:
    """Yield, later."""
    yield 1.0
