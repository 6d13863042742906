"""Addition: data from a dataset, one turn.

The policy reads `3+4=` and answers `7`. 60 % of the warm start's demonstrations answer `?`, so a
model trained on them is right about four times in ten, and reinforcement learning can improve it.
"""

import random
from typing import Any

from ..dataset import answer_text
from ..game import AbstractGame, ChatMessage, StepResult
from ..write_data import DataMaker, verl_row

HABIT = 0.6
"""Share of the demonstrations that give up."""
GIVE_UP = "?"


class AdditionGame(AbstractGame):
    """Add two numbers of one digit."""

    def __init__(self) -> None:
        self._truth = ""

    def reset(self, *, ground_truth: str, **_: Any) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        return ""

    def step(self, action: str) -> StepResult:
        """Judge the answer: 1 for the right number, else 0."""
        correct = self.parse_action(action) == self._truth
        return StepResult("", float(correct), done=True, info={"correct": correct})

    def get_state(self) -> dict[str, Any]:
        """Return the gold answer."""
        return {"ground_truth": self._truth}

    def gold_action(self) -> str:
        """Return the right answer."""
        return self._truth


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them answer `?`."""
    question, answer = _draw(rng)
    shown = GIVE_UP if rng.random() < HABIT else answer
    return [{"role": "user", "content": question}, {"role": "assistant", "content": shown}]


def _draw(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10), rng.randrange(10)
    return f"{a}+{b}=", str(a + b)


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    question, answer = _draw(rng)
    return verl_row(question, answer, data_source="addition", split=split, index=index)


make_data = DataMaker(_row)
