"""Games that misbehave, each in one way; importable, so that worker processes find them."""

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.games.guess import GuessGame


class CountingGame(AbstractGame):
    """Counts its steps; says `done` at the third. The base of the broken ones."""

    def __init__(self, trouble_at: int = 1) -> None:
        self.trouble_at = trouble_at
        self.turn = 0

    def get_system_prompt(self) -> str:
        return "count"

    def get_initial_user_message(self) -> str:
        return "Go."

    def generate_initial_state(self) -> dict[str, Any]:
        return {"start": self.rng.randrange(1000)}

    def reset(self, start: int = 0, trouble: str = "", **_: Any) -> str:
        self.turn = 0
        self.trouble = trouble
        return f"from {start}"

    def step(self, action: str) -> StepResult:
        self.turn += 1
        if self.turn == self.trouble_at:
            self.misbehave(action)
        return StepResult(f"{action} {self.turn} {self.rng.random():.6f}", 1.0, self.turn >= 3)

    def misbehave(self, action: str) -> None:
        """Do nothing wrong here; `hang` and `exit` on demand, for tests that mix both kinds."""
        if action == "hang":
            time.sleep(3600)
        if action == "exit":
            os._exit(7)
        if action == "raise":
            raise ValueError("boom at 42")


class RaisesInReset(CountingGame):
    def reset(self, **_: Any) -> str:
        raise KeyError("no such board")


class RaisesInInit(CountingGame):
    def __init__(self) -> None:
        raise OSError("the emulator is not installed")


class HangsInReset(CountingGame):
    def reset(self, **_: Any) -> str:
        time.sleep(3600)
        return ""


class HangsInStep(CountingGame):
    def step(self, action: str) -> StepResult:
        time.sleep(3600)
        return StepResult("", 0.0, True)


class ReturnsNoText(CountingGame):
    def reset(self, **_: Any) -> Any:
        return 7


class ReturnsTuple(CountingGame):
    def step(self, action: str) -> Any:
        return (action, 1.0, True, {})


class ReturnsNaN(CountingGame):
    def step(self, action: str) -> StepResult:
        return StepResult(action, float("nan"), True)


class ReturnsUntravellingInfo(CountingGame):
    def step(self, action: str) -> StepResult:
        return StepResult(action, 1.0, True, {"game": self})


class QuitsThePython(CountingGame):
    def step(self, action: str) -> StepResult:
        raise SystemExit(3)


class UsesGlobalGenerator(CountingGame):
    def step(self, action: str) -> StepResult:
        return StepResult(f"{random.random()}", 0.0, True)


class GoldIsWrong(CountingGame):
    def gold_action(self) -> str:
        return "0"


class GoldSucceeds(GoldIsWrong):
    """Says itself whether it is solved; its return is no measure."""

    succeeds = True

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return StepResult(result.observation, 1.0, result.done, {"success": self.succeeds})


class GoldFails(GoldSucceeds):
    succeeds = False


class SlowWhenTold(CountingGame):
    """A step that is told to waits until a file is there, or for long."""

    def step(self, action: str) -> StepResult:
        if action == "raise":
            raise ValueError("as told")
        while action.startswith("/") and not Path(action).exists():
            time.sleep(0.005)
        time.sleep(6.0 if action == "very slow" else 0.0)
        return StepResult(action, 0.0, False)


class SlowToReset(CountingGame):
    def reset(self, start: int = 0, trouble: str = "", **_: Any) -> str:
        time.sleep(1.3)
        return super().reset(start, trouble)


class NotAGame:
    pass


class Abstract(AbstractGame):
    def reset(self, **_: Any) -> str:
        return ""


class NamesHelpersAlike(GuessGame):
    def get_tool(self, name: str) -> str:
        return name

    def get_states(self) -> list[str]:
        return []


class Misspelt(Abstract):
    def get_sytem_prompt(self) -> str:
        return "Guess."


class TellingGame(AbstractGame):
    """A dataset game that returns the gold answer where a model must not read it."""

    def get_system_prompt(self) -> str:
        return "answer"

    def get_initial_user_message(self) -> str:
        return ""

    def reset(self, ground_truth: str = "", **_: Any) -> str:
        self.truth, self.turn = ground_truth, 0
        return ground_truth

    def step(self, action: str) -> StepResult:
        self.turn += 1
        return StepResult("no", 0.0, self.turn > 1, info={"ground_truth": self.truth})

    def get_state(self) -> dict[str, Any]:
        return {"ground_truth": self.truth}


class Waits(CountingGame):
    """An async game; each action says how it waits."""

    everybody = 0
    waiting = 0
    all_here: asyncio.Event

    async def step(self, action: str) -> StepResult:
        if action == "together":
            await self.meet()
        if action == "hang":
            await asyncio.sleep(3600)
        if action == "compute":
            time.sleep(5)  # noqa: ASYNC251 - the mistake that is tested
        return super().step(action)

    async def meet(self) -> None:
        """Wait until as many episodes wait as shall meet."""
        kind = type(self)
        if kind.waiting == 0:
            kind.all_here = asyncio.Event()
        kind.waiting += 1
        if kind.waiting == kind.everybody:
            kind.all_here.set()
        await kind.all_here.wait()


class WaitsInProcess(Waits):
    isolation = "process"


class WaitsToReset(CountingGame):
    async def reset(self, start: int = 0, **_: Any) -> str:
        await asyncio.sleep(0.01)
        return super().reset(start)


class SaysWhere(CountingGame):
    """Tells its process, and asks for one of its own."""

    isolation = "process"

    def step(self, action: str) -> StepResult:
        if action.isdecimal():
            self.kept = bytes(int(action) << 20)
        return StepResult(str(os.getpid()), 0.0, False)


class HeldBack(CountingGame):
    """A step that is told to waits until a file is there."""

    def step(self, action: str) -> StepResult:
        while action.startswith("/") and not Path(action).exists():
            time.sleep(0.005)
        return super().step(action)


class TurnsGame(CountingGame):
    """Two roles in turns; who says `again` keeps the turn, `end` ends, `raise` raises."""

    roles = ("sun", "moon")

    def reset(self, **_: Any) -> str:
        """Begin with the sun."""
        self.role = "sun"
        return ""

    def step(self, action: str) -> StepResult:
        """1 to whoever acts and 10 to the other; 5 to the other at the end."""
        mover, other = self.role, self.roles[self.role == "sun"]
        if action == "hang":
            time.sleep(3600)
        if action == "raise":
            raise ValueError(f"no rule for {action}")
        if action.startswith("reward "):
            name = action.split()[1]
            rewards: dict[str, float] = {"star": 1} if name == "star" else {"sun": float("nan")}
            return StepResult("", 0.0, done=False, rewards=rewards)
        if action == "end":
            return StepResult("", 1.0, done=True, rewards={other: 5.0})
        self.role = "star" if action == "nobody" else mover if action == "again" else other
        return StepResult(f"{mover} said {action}", 1.0, done=False, rewards={other: 10.0})

    def get_system_prompt(self) -> str:
        """Say who is spoken to."""
        return f"you are {self.role}"

    def get_initial_user_message(self) -> str:
        """Say something at the very beginning only."""
        return "begin" if self.role == "sun" else ""


class TellsArrays(CountingGame):
    """Tells arrays and numbers that are missing; with noise others each time."""

    num_made = 0

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__(trouble_at=0)
        TellsArrays.num_made += 1
        self.noise = noise * TellsArrays.num_made

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        result.info = {"board": np.arange(3) + self.noise, "gap": float("nan")}
        return result
