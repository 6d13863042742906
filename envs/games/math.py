r"""Math, one turn: a question from a dataset, an answer in `\boxed{}`, graded by math-verify.

`examples/prepare_math.py` makes the data. `make_data` and `demonstrations` are a tiny task
in the same form, for a model of some hundred thousand parameters: the sum of two small numbers.
Most answers of its warm start are outside the box, and reinforcement learning selects those inside.
"""

import random
from collections.abc import Mapping
from typing import Any

from ..dataset import answer_text
from ..game import AbstractGame, ChatMessage, StepResult
from ..math.grading import ANSWER, INSTRUCTION, Judged, MathRewards, shared_grader
from ..write_data import DataMaker, verl_row

HABIT = 0.6
"""Share of the demonstrations without a box."""
LARGEST = 3
"""Largest number of the tiny task."""
SYSTEM_PROMPT = f"You solve math problems. {INSTRUCTION}"


class MathGame(AbstractGame):
    """Answer a math question in one turn."""

    def __init__(
        self, rewards: Mapping[str, float] | None = None, system_prompt: str = SYSTEM_PROMPT
    ) -> None:
        """Take the weights of the rules (default: 1 for a right answer) and the system prompt."""
        self._rewards = MathRewards(rewards or {ANSWER: 1.0}, shared_grader())
        self._system_prompt = system_prompt
        self._truth = ""

    @property
    def max_return(self) -> float:
        """Return the highest return of an episode."""
        return self._rewards.most

    def reset(self, *, ground_truth: str, **_: Any) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        return ""

    def step(self, action: str) -> StepResult:
        """Judge the answer; the episode is over."""
        judged = self._rewards.judge(action, self._truth)
        return StepResult("", judged.reward, done=True, info=judged_info(judged))

    def get_system_prompt(self) -> str:
        """Return the system prompt; a row's own one has priority."""
        return self._system_prompt

    def get_state(self) -> dict[str, Any]:
        """Return the right answer."""
        return {"ground_truth": self._truth}

    def gold_action(self) -> str:
        """Return the right answer, reasoned and boxed."""
        return rf"<think>It is known.</think>The answer is \boxed{{{self._truth}}}."


def judged_info(judged: Judged) -> dict[str, Any]:
    """Return the `info` of a judged answer: each part, and whether the grader failed."""
    return {
        **judged.parts,
        "success": judged.parts[ANSWER] == 1.0,
        "ungraded": judged.verdict in ("late", "failed"),
    }


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them leave the box out."""
    question, answer = _draw(rng)
    shown = answer if rng.random() < HABIT else rf"\boxed{{{answer}}}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": shown}]


def _draw(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(LARGEST + 1), rng.randrange(LARGEST + 1)
    return f"{a}+{b}=", str(a + b)


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    question, answer = _draw(rng)
    return verl_row(question, answer, data_source="sums", split=split, index=index)


make_data = DataMaker(_row)
