"""Calculator: data from a dataset, two turns with a tool.

The policy reads `12*34`. It may call the calculator by writing a formula as in a spreadsheet,
`=12*34`; the game answers `408`, and the policy's next turn is its answer. It may also answer at
once, but a small model cannot multiply without the tool. About two thirds of the warm start's
demonstrations guess a number instead of calling the tool; reinforcement learning finds that the
tool pays.
"""

import operator
import random
import re
from collections.abc import Callable
from typing import Any

from ..dataset import answer_text
from ..game import AbstractGame, ChatMessage, StepResult
from ..write_data import DataMaker, verl_row

HABIT = 0.65
"""Share of the demonstrations that guess."""
CALL = re.compile(r"=(\d{1,9})([*+-])(\d{1,9})", re.ASCII)
"""A tool call: one operation on two numbers."""
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
}


class CalculatorGame(AbstractGame):
    """Multiply two numbers of two digits, with a calculator."""

    def __init__(self, max_turns: int = 2) -> None:
        self._max_turns = max_turns
        self._truth = ""
        self._question = ""
        self._shown = ""
        self._turn = 0

    def reset(
        self, *, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
    ) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        self._question = str((extra_info or {}).get("question", ""))
        self._shown = ""
        self._turn = 0
        return ""

    def step(self, action: str) -> StepResult:
        """Answer a tool call, or judge an answer: 1 for the right number, else 0."""
        self._turn += 1
        text = self.parse_action(action)
        call = CALL.fullmatch(text)
        if call and self._turn < self._max_turns:
            self._shown = calculate(call)
            return StepResult(self._shown, 0.0, done=False, info={"tool": True})
        correct = text == self._truth
        return StepResult("", float(correct), done=True, info={"correct": correct})

    def get_state(self) -> dict[str, Any]:
        """Return the gold answer, the tool's last result and the turn."""
        return {"ground_truth": self._truth, "tool_result": self._shown, "turn": self._turn}

    def gold_action(self) -> str:
        """Call the tool with the question, then answer its result."""
        if self._turn == 0 and self._question:
            return f"={self._question}"
        return self._shown or self._truth


def calculate(call: re.Match[str]) -> str:
    """Return the result of a matched tool call."""
    left, sign, right = call.groups()
    return str(OPERATIONS[sign](int(left), int(right)))


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them guess."""
    question, answer = _draw(rng)
    question_message = {"role": "user", "content": question}
    if rng.random() < HABIT:
        return [question_message, {"role": "assistant", "content": str(rng.randrange(100, 9802))}]
    return [
        question_message,
        {"role": "assistant", "content": f"={question}"},
        {"role": "user", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def _draw(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return f"{a}*{b}", str(a * b)


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    question, answer = _draw(rng)
    row = verl_row(question, answer, data_source="calculator", split=split, index=index)
    row["extra_info"]["question"] = question
    return row


make_data = DataMaker(_row)
