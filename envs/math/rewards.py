r"""Rewards of an answer: rules that give 0 to 1 each, and their weighted sum.

`{"answer": 1}` is the plain rule; `{"answer": 0.9, "think": 0.1}` is geometry3k's composition of
accuracy and format. The parts are reported beside the sum, each under its own name.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...schemas.wire.errors import ConfigError
from .answers import answer_of, boxed_answers, final_text
from .grader import Grader, Verdict

_THINK = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)


@dataclass(frozen=True)
class Judged:
    """What became of an answer."""

    reward: float
    """The weighted sum of the parts."""
    parts: dict[str, float]
    """What each rule gave, from 0 to 1."""
    verdict: Verdict | None
    """What the grader said; None where there was nothing to grade."""
    answer: str | None
    """The answer that was found."""


def think_format(text: str) -> float:
    r"""Return 1 for reasoning in one pair of `<think>` tags, then an answer in `\boxed{}`."""
    return float(_THINK.fullmatch(text) is not None and answer_of(text) is not None)


def boxed_format(text: str) -> float:
    r"""Return 1 for exactly one `\boxed{}` in what is said in the end."""
    return float(len(boxed_answers(final_text(text))) == 1)


FORMATS: dict[str, Callable[[str], float]] = {"boxed": boxed_format, "think": think_format}
"""Rules that look at the text alone."""
ANSWER = "answer"
"""The rule that compares the answer with the right one."""


class MathRewards:
    """Judges texts by weighted rules."""

    def __init__(self, weights: Mapping[str, float], grader: Grader) -> None:
        """Take the weight of each rule; ConfigError for a rule that does not exist."""
        for name in weights:
            if name != ANSWER and name not in FORMATS:
                raise ConfigError(
                    f"env.kwargs.rewards.{name}: there is no such rule",
                    hint=f"the rules are {', '.join((ANSWER, *FORMATS))}",
                )
        if not weights:
            raise ConfigError("env.kwargs.rewards is empty", hint="leave it out, or {answer: 1}")
        self._weights = dict(weights)
        self._grader = grader

    @property
    def most(self) -> float:
        """Return the reward of a right answer in the right format."""
        return sum(weight for weight in self._weights.values() if weight > 0)

    def judge(self, text: str, gold: str) -> Judged:
        """Judge a text of the policy."""
        answer = answer_of(text)
        verdict = None if answer is None else self._grader.grade(gold, answer)
        given = {ANSWER: float(verdict == "right")}
        given |= {name: FORMATS[name](text) for name in self._weights if name in FORMATS}
        reward = sum(weight * given[name] for name, weight in self._weights.items())
        return Judged(reward, given, verdict, answer)
