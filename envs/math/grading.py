"""Grades answers to math problems: finds the answer, compares it, adds up the rules.

The answer is the last `\boxed{…}` outside of reasoning, fenced blocks and tool calls. Comparisons
by math-verify run in worker processes with hard limits, since they can be expensive. `{"answer":
1}` is the plain rule; `{"answer": 0.9, "think": 0.1}` is geometry3k's composition of accuracy and
format. Each part is also reported by itself.
"""

import atexit
import os
import queue
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

from ...schemas.local.line_worker import LineWorker, WorkerEnded
from ...schemas.local.process import is_killed_from_outside, num_oom_kills
from ...schemas.wire.errors import ConfigError, GameError
from ..reasoning import behind_reasoning
from .units import clean, is_balanced, same_unit, sides_of, split_unit, without_units

# Finding the answer. Pure.

MAX_ANSWER_CHARS = 1000
"""Maximum length of an answer; a longer one is wrong."""
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."

_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{")
_NOT_SAID = re.compile(r"```.*?(?:```|\Z)|<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_TEXT_GROUP = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|mathbf|textrm|textit|mathit)\s*\{([^{}]*)\}"
)
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*)?[(\[]?\s*([A-Ja-j])\s*[)\].:]*", re.IGNORECASE
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z',;\s.-]*")
_MATHEMATICAL = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "log",
        "ln",
        "exp",
        "sqrt",
        "pi",
        "infty",
        "infinity",
    ]
)
_PARTS_OF_NUMBERS = re.compile(
    r"\\(?:[dtc]?frac|sqrt|pi|times|cdot|div|over|circ|left|right)(?![A-Za-z])|[\d.\s/^(){}*%\\-]"
)
_COMPUTATION = re.compile(
    r"[\w)}]\s*[-+]|\d\s+\d|(?:\\times|\\cdot|\*)(?!\s*10\s*\^)|[\d)]\s*\(|\)\s*\d"
)
"""A sum, a difference, a product other than scientific notation, or several numbers."""
_IRRATIONAL = re.compile(r"\\(?:sqrt|pi)")


def said_in_the_end(text: str) -> str:
    """Return the text after the reasoning; empty if the reasoning was cut."""
    text = behind_reasoning(text)
    _, closed, answer = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else answer


def final_text(text: str) -> str:
    """Return the policy's final text, without fenced blocks and tool calls."""
    return _NOT_SAID.sub("", said_in_the_end(text))


def boxed_answers(text: str) -> list[str]:
    r"""Return the contents of all `\boxed{…}` whose braces close, in their order."""
    answers: list[str] = []
    for match in _BOXED.finditer(text):
        content = _braced(text, match.end())
        if content is not None:
            answers.append(content.strip())
    return answers


def answer_of(text: str) -> str | None:
    """Return the answer of a policy's text, or None."""
    answers = boxed_answers(final_text(text))
    return answers[-1] if answers and answers[-1] else None


def to_compare(gold: str, answer: str) -> tuple[str, str] | bool:
    """Return the two texts that math-verify must compare, or whether the answer is right.

    This handles cases that math-verify does not: units and scales, thousands, words, choices, and
    unfinished work. If the right answer is one rational number, a sum, a list, a range or an
    equation of numbers is wrong whatever its value: `1+1` is not 2.
    """
    if not is_balanced(answer):
        return False
    texts = clean(gold), clean(answer)
    if not texts[1]:
        return False
    if _squashed(texts[0]) == _squashed(texts[1]):
        return True
    letters = [_LETTER.fullmatch(_unwrapped(text)) for text in texts]
    if all(letters) and texts[0].strip("()").isupper():
        first, second = (match[1] for match in letters if match)
        return first.upper() == second.upper()
    if _is_worded(gold, texts[0]):
        return _items(texts[0]) == _items(texts[1])
    if r"\boxed" in texts[1]:
        return False
    return _numbers_to_compare(*texts)


def _numbers_to_compare(gold: str, answer: str) -> tuple[str, str] | bool:
    texts = (gold, answer)
    right, answered = map(split_unit, texts)
    if right is None or answered is None:  # a letter that one of them has may be a variable
        right, answered = (split_unit(text, letters=False) for text in texts)
    if right is None:
        return _expressions_to_compare(*texts)
    is_rational = not _leaves_work(right.number) and not _IRRATIONAL.search(right.number)
    written = answer if answered is None else answered.number
    if is_rational and _leaves_work(written):
        return False
    if answered is None:
        return right.latex, answer
    if not same_unit(right.unit, answered.unit) or _other_name(right.label, answered.label):
        return False
    return right.latex, answered.latex


def _expressions_to_compare(gold: str, answer: str) -> tuple[str, str] | bool:
    left, equals, _ = gold.partition("=")
    if equals and "=" not in answer and re.search(r"[+*/^-]", left):
        return False  # math-verify compares the right side alone: 0 for x+y=0
    (right, units), (answered, others) = without_units(gold), without_units(answer)
    if units and others and any(unit not in others for unit in units):
        return False
    return right, answered


def _leaves_work(text: str) -> bool:
    """Return whether an answer contains a choice or a computation; any word counts as a choice."""
    has_more = _PARTS_OF_NUMBERS.sub("", text) != ""
    return has_more or _COMPUTATION.search(text) is not None


def _other_name(first: str, second: str) -> bool:
    """Return whether both labels are names of unknowns, and differ."""
    names = [re.fullmatch(r"[A-Za-z]|\\[a-z]+", label) for label in (first, second)]
    return all(names) and first != second


def _squashed(text: str) -> str:
    """Return a text without spaces beside punctuation."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", re.sub(r"\s+", " ", _unwrapped(text)))


def _unwrapped(text: str) -> str:
    return _TEXT_GROUP.sub(r" \1 ", text).strip()


def _is_worded(gold: str, text: str) -> bool:
    """Return whether the right answer is words; math-verify would read products of letters."""
    plain = _unwrapped(text)
    if _WORDS.fullmatch(plain) is None:
        return False
    words = [word for word in re.findall(r"[A-Za-z]+", plain) if word.lower() not in ("and", "or")]
    if any(word.lower() in _MATHEMATICAL for word in words):
        return False
    longest = max(map(len, words), default=0)
    is_marked = _TEXT_GROUP.search(gold) is not None
    return longest >= 4 or (longest >= 3 and len(words) > 1) or (longest >= 2 and is_marked)


def _items(text: str) -> list[str]:
    """Return the items of a list of words, sorted, without case, articles and full stops."""
    plain = re.sub(r"[.!'\"\\{}()]", " ", _unwrapped(text)).casefold()
    items = re.split(r"[,;]|\band\b", plain)
    return sorted(
        " ".join(re.sub(r"^\s*(?:the|an?)\s", "", item).split()) for item in items if item.strip()
    )


def _braced(text: str, start: int) -> str | None:
    """Return the text from `start` to its closing brace, or None."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start:place]
    return None


# Comparisons in worker processes. A process that exceeds its limits is replaced, and the answer is
# wrong.

Verdict = Literal["right", "wrong", "late", "failed"]
LIMIT_S = 5.0
"""Seconds of computing for one comparison."""
MEMORY_BYTES = 2 << 30
RENEW_AFTER = 2000
"""Comparisons after which a process is replaced: sympy's caches would grow up to its limit."""


class Grader:
    """Worker processes that compare answers; safe to use from many threads at once."""

    def __init__(
        self,
        num_workers: int,
        *,
        limit_s: float = LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        renew_after: int = RENEW_AFTER,
    ) -> None:
        """Prepare `num_workers`, which start when they are needed.

        Raises GameError if math-verify is not installed.
        """
        if find_spec("math_verify") is None:
            raise GameError(
                "math-verify is not installed here: answers cannot be graded",
                hint="pip install 'tinkermq[math]' where environment hosts run",
            )
        self._limits = [str(limit_s), str(memory_bytes)]
        self._renew_after = renew_after
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the right one; late and failed comparisons count as wrong.

        If the right answer is one number, only one number is right: `1+1` is not 2.
        """
        if len(answer) > MAX_ANSWER_CHARS or "\0" in answer:
            return "wrong"
        for side in sides_of(answer):
            if (verdict := self._compare(gold, side)) != "right":
                return verdict
        return "right"

    def _compare(self, gold: str, answer: str) -> Verdict:
        compared = to_compare(gold, answer)
        if isinstance(compared, bool):
            return "right" if compared else "wrong"
        gold, answer = compared
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._limits)
            verdict = worker.ask(gold, answer)
            if worker.was_killed:
                worker = _Worker(self._limits)
                verdict = worker.ask(gold, answer)
            if verdict in ("late", "failed") or worker.num_asked >= self._renew_after:
                worker.close()
                worker = None
            return verdict
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the workers that are idle."""
        for _ in range(self._idle.qsize()):
            if (worker := self._idle.get()) is not None:
                worker.close()
            self._idle.put(None)


class _Worker:
    def __init__(self, limits: list[str]) -> None:
        self.num_asked = 0
        self.was_killed = False
        """Whether the process was ended by a signal from outside."""
        self._oom_kills = num_oom_kills()
        self._process = LineWorker(f"{__package__}.grading_worker", *limits, shows_errors=True)
        try:
            self._process.ask(None)
        except WorkerEnded as ended:
            raise GameError(
                f"a grading process ended at once, with {ended.code}",
                hint="its own words are above; see whether `python -c 'import math_verify'` works",
            ) from ended

    def ask(self, gold: str, answer: str) -> Verdict:
        self.num_asked += 1
        try:
            return "right" if self._process.ask([gold, answer]) else "wrong"
        except WorkerEnded as ended:
            self.was_killed = is_killed_from_outside(ended.code, self._oom_kills)
            return "late" if ended.code == -signal.SIGPROF else "failed"

    def close(self) -> None:
        self._process.end()


@cache
def shared_grader() -> Grader:
    """Return the grader that all games of this process share."""
    grader = Grader(len(os.sched_getaffinity(0)))
    atexit.register(grader.close)
    return grader


# Rules and their weighted sum.

_THINK = re.compile(r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)+", re.DOTALL)


@dataclass(frozen=True)
class Judged:
    """The result of grading an answer."""

    reward: float
    """The weighted sum of the parts."""
    parts: dict[str, float]
    """The score of each rule, from 0 to 1."""
    verdict: Verdict | None
    """The grader's verdict; None if there was nothing to grade."""
    answer: str | None
    """The answer that was found."""


def think_format(text: str) -> float:
    r"""Return 1 for reasoning in one pair of `<think>` tags, then an answer in `\boxed{}`."""
    return float(_THINK.fullmatch(text) is not None and answer_of(text) is not None)


def boxed_format(text: str) -> float:
    r"""Return 1 for exactly one `\boxed{}` in the final text."""
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
        scores = {ANSWER: float(verdict == "right")}
        scores |= {name: FORMATS[name](text) for name in self._weights if name in FORMATS}
        reward = sum(weight * scores[name] for name, weight in self._weights.items())
        return Judged(reward, scores, verdict, answer)
