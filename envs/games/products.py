"""Products: questions that a small language model cannot answer without its tool.

The policy reads "What is 47 * 38?" and has one tool, `calculate`, which it calls as its chat
template shows; the result is a tool message. The reward is 1 if the last number of its answer is
the product. Small models first have to learn the form of a call from a few demonstrations.
"""

import json
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from ..dataset import answer_text
from ..game import StepResult
from ..tools import ToolGame, ToolResult
from ..write_data import DataMaker, verl_row

_NUMBER = re.compile(r"\d+")
_OPERATION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", re.ASCII)
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
}
_CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute one operation on two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as 12 * 34."}},
            "required": ["expression"],
        },
    },
}


class ProductsGame(ToolGame):
    """Multiply two numbers of two digits, with a calculator."""

    def __init__(self) -> None:
        self._truth = ""
        self._question = ""
        self._shown = ""

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the calculator."""
        return [_CALCULATE]

    def reset(
        self, *, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
    ) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        self._question = str((extra_info or {}).get("expression", ""))
        self._shown = ""
        return ""

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Compute an expression, or describe a valid one."""
        match = _OPERATION.fullmatch(arguments["expression"])
        if match is None:
            return ToolResult("Error: write two numbers with *, + or - between them")
        left, sign, right = match.groups()
        self._shown = str(_OPERATIONS[sign](int(left), int(right)))
        return ToolResult(self._shown)

    def answer(self, text: str) -> StepResult:
        """Judge an answer: 1 if its last number is the product, else 0."""
        correct = _NUMBER.findall(text)[-1:] == [self._truth]
        info = {"correct": correct, "asked_tool": bool(self._shown)}
        return StepResult("", float(correct), done=True, info=info)

    def get_state(self) -> dict[str, Any]:
        """Return the right answer and the tool's last result."""
        return {"ground_truth": self._truth, "tool_result": self._shown}

    def gold_action(self) -> str:
        """Call the tool with the question, then answer its result."""
        if self._shown:
            return self._shown
        call = {"name": "calculate", "arguments": {"expression": self._question}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    first, second = rng.randrange(10, 100), rng.randrange(10, 100)
    row = verl_row(
        f"What is {first} * {second}?",
        str(first * second),
        data_source="products",
        split=split,
        index=index,
    )
    row["extra_info"]["expression"] = f"{first} * {second}"
    return row


make_data = DataMaker(_row)
