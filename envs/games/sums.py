"""Sums: questions for a language model that was pretrained, from a dataset, in one turn.

The policy reads "What is 47 + 38? Reply with the number only." and answers; the last number of its
answer counts. Small chat models know what is asked and are mostly wrong.
"""

import random
import re
from typing import Any

from ..dataset import answer_text
from ..game import AbstractGame, StepResult
from ..write_data import DataMaker, verl_row

_NUMBER = re.compile(r"\d+")


class SumsGame(AbstractGame):
    """Add two numbers of two digits."""

    def __init__(self) -> None:
        self._truth = ""

    def reset(self, *, ground_truth: str, **_: Any) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        return ""

    def step(self, action: str) -> StepResult:
        """Judge the answer: 1 if its last number is the sum, else 0."""
        numbers = _NUMBER.findall(self.parse_action(action))
        correct = bool(numbers) and numbers[-1] == self._truth
        return StepResult("", float(correct), done=True, info={"correct": correct})

    def get_system_prompt(self) -> str:
        """Return no system prompt: the model's template has its own."""
        return ""

    def get_initial_user_message(self) -> str:
        """Return nothing: the question is in the data."""
        return ""

    def get_state(self) -> dict[str, Any]:
        """Return the gold answer."""
        return {"ground_truth": self._truth}

    def gold_action(self) -> str:
        """Return the right answer."""
        return self._truth


def question(first: int, second: int) -> str:
    """Return the prompt of a sum."""
    return f"What is {first} + {second}? Reply with the number only."


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    first, second = rng.randrange(10, 100), rng.randrange(10, 100)
    return verl_row(
        question(first, second),
        str(first + second),
        data_source="sums",
        split=split,
        index=index,
    )


make_data = DataMaker(_row)
