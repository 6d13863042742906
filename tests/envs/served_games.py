"""Games that tests serve to other trainers; importable by name."""

import json
import time
from typing import Any

from tinkermq.envs import AbstractGame, StepResult
from tinkermq.schemas.tool_calls import parse_tool_calls

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class AddingGame(AbstractGame):
    """Add two numbers with a tool, then say the sum.

    The second paragraph is not the description.
    """

    def reset(self, **_: Any) -> str:
        self.a, self.b = self.rng.randint(1, 99), self.rng.randint(1, 99)
        return f"{self.a}+{self.b}"

    def get_system_prompt(self) -> str:
        return "Use the tool."

    def get_initial_user_message(self) -> str:
        return "What is the sum?"

    def get_tools(self) -> list[dict[str, Any]]:
        return [ADD]

    def step(self, action: str) -> StepResult:
        said, calls = parse_tool_calls(action)
        if not calls:
            return StepResult("", float(said.strip() == str(self.a + self.b)), done=True)
        function = calls[0]["function"]
        arguments = json.loads(function["arguments"])
        if "note" in arguments:
            return StepResult(arguments["note"], 0.0, done=False, role="tool")
        total = arguments["a"] + arguments["b"]
        info = {"calls": [function["name"]], "bytes": b"\x00", "nan": float("nan")}
        return StepResult(str(total), 0.25, done=False, info=info, role="tool")


class TroublesomeGame(AbstractGame):
    """Fails, hangs, or answers at length, as it is asked to."""

    def reset(self, **_: Any) -> str:
        return "say fail, hang or a number"

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return ""

    def step(self, action: str) -> StepResult:
        if action == "fail":
            raise RuntimeError("the board is broken")
        if action == "hang":
            time.sleep(5)
        return StepResult("x" * int(action) if action.isdecimal() else "", 1.0, done=False)


class Counter:
    """An environment class of TRL's."""

    def reset(self, **_: Any) -> None:
        self.total = 0

    def get_reward(self) -> float:
        return float(self.total)

    def increment(self, step: int) -> int:
        """
        Add to the total.

        Args:
            step: How much.
        """
        self.total += step
        return self.total


class Speller:
    """Another one, with another tool."""

    def reset(self, **_: Any) -> None:
        pass

    def get_reward(self) -> float:
        return 0.0

    def spell(self, word: str) -> str:
        """
        Spell a word.

        Args:
            word: The word.
        """
        return "-".join(word)


def length(solution_str: str, **_: Any) -> float:
    return float(len(solution_str))
