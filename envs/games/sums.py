"""Sums: questions for a pretrained language model, from a dataset, in one turn.

The policy reads "What is 27 + 38? Reply with the number only." and answers; the last number of its
answer counts. Small chat models understand the question and are mostly wrong. A fifth of all pairs
is held out: no validation question is trained.
"""

import random
import re
from typing import Any

from ..game import StepResult
from ..write_data import DataMaker, verl_row
from .addition import AdditionGame

_NUMBER = re.compile(r"\d+")


class SumsGame(AdditionGame):
    """Add two numbers of two digits, below 50."""

    def step(self, action: str) -> StepResult:
        """Judge the answer: 1 if its last number is the sum, else 0."""
        numbers = _NUMBER.findall(self.parse_action(action))
        correct = numbers[-1:] == [self.gold_action()]
        return StepResult("", float(correct), done=True, info={"correct": correct})


def question(first: int, second: int) -> str:
    """Return the prompt of a sum."""
    return f"What is {first} + {second}? Reply with the number only."


def is_held_out(first: int, second: int) -> bool:
    """Return whether a sum belongs to validation."""
    return (7 * first + second) % 5 == 0


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    while True:
        first, second = rng.randrange(10, 50), rng.randrange(10, 50)
        if is_held_out(first, second) == (split == "val"):
            break
    return verl_row(
        question(first, second),
        str(first + second),
        data_source="sums",
        split=split,
        index=index,
    )


make_data = DataMaker(_row)
