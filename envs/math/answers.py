r"""Find the answer in a text of the policy: the last `\boxed{…}` that is meant as one.

Reasoning between `<think>` tags, fenced blocks and tool calls are no place for an answer: what
stands in a program, or was considered on the way, does not count. Pure.
"""

import re
from fractions import Fraction

from ..reasoning import behind_reasoning
from .quantity import clean, is_balanced, read_quantity, same_unit, without_units

MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong without being read."""
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
_COMPUTATION = re.compile(r"[\w)}]\s*[-+]|\d\s+\d")
"""A sum or a difference, or several numbers."""
_FAR = Fraction(2, 10**6)
"""Of the larger one: numbers that differ by more are not the same, rounded or not."""


def said_in_the_end(text: str) -> str:
    """Return what follows the reasoning; reasoning that was cut off ends in nothing."""
    text = behind_reasoning(text)
    _, closed, said = text.rpartition("</think>")
    return "" if not closed and "<think>" in text else said


def final_text(text: str) -> str:
    """Return what the policy says in the end, without fenced blocks and tool calls."""
    return _NOT_SAID.sub("", said_in_the_end(text))


def boxed_answers(text: str) -> list[str]:
    r"""Return the contents of all `\boxed{…}` whose braces close, in their order."""
    found: list[str] = []
    for match in _BOXED.finditer(text):
        content = _braced(text, match.end())
        if content is not None:
            found.append(content.strip())
    return found


def answer_of(text: str) -> str | None:
    """Return the answer of a text of the policy, or None if it gives none."""
    answers = boxed_answers(final_text(text))
    return answers[-1] if answers and answers[-1] else None


def to_compare(gold: str, answer: str) -> tuple[str, str] | bool:
    """Return what math-verify is to compare for an answer, or whether the answer is right.

    Decided here is what math-verify does not know: units and scales, thousands, words, choices, and
    that an answer must do the work itself. Where the right answer is one rational number, a sum, a
    list, a range or an equation of numbers is wrong whatever its value: `1+1` is not 2.
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
        return _same_words(*texts)
    if r"\boxed" in texts[1]:
        return False
    return _numbers_to_compare(gold, answer, texts)


def _numbers_to_compare(gold: str, answer: str, texts: tuple[str, str]) -> tuple[str, str] | bool:
    right, given = read_quantity(gold), read_quantity(answer)
    if right is None or (right.has_letter and (given is None or not given.unit)):
        return _expressions_to_compare(*texts)
    if given is None:
        if right.is_rational and _leaves_work(texts[1]):
            return False
        return right.latex, texts[1]
    if given.has_letter and not right.unit:
        return right.latex, texts[1]
    if not same_unit(right.unit, given.unit) or _other_name(right.label, given.label):
        return False
    if right.value is not None and given.value is not None:
        is_far = abs(right.value - given.value) > _FAR * max(abs(right.value), abs(given.value))
        if is_far and right.is_percent == given.is_percent:
            return False
    return right.latex, given.latex


def _expressions_to_compare(gold: str, answer: str) -> tuple[str, str] | bool:
    (right, units), (given, others) = without_units(gold), without_units(answer)
    if units and others and any(one not in others for one in units):
        return False
    return right, given


def _leaves_work(text: str) -> bool:
    """Whether an answer leaves a choice or a computation to the reader; any word is a choice."""
    has_more = _PARTS_OF_NUMBERS.sub("", text) != ""
    return has_more or _COMPUTATION.search(text) is not None


def _other_name(one: str, other: str) -> bool:
    """Whether both are values of unknowns, and not of the same."""
    names = [re.fullmatch(r"[A-Za-z]|\\[a-z]+", label) for label in (one, other)]
    return all(names) and one != other


def _squashed(text: str) -> str:
    """Return a text without spaces that part nothing."""
    return re.sub(r"\s*([^\w\s])\s*", r"\1", re.sub(r"\s+", " ", _unwrapped(text)))


def _unwrapped(text: str) -> str:
    return _TEXT_GROUP.sub(r" \1 ", text).strip()


def _is_worded(gold: str, text: str) -> bool:
    """Whether the right answer is words, which math-verify would multiply letter by letter."""
    plain = _unwrapped(text)
    if _WORDS.fullmatch(plain) is None:
        return False
    words = [word for word in re.findall(r"[A-Za-z]+", plain) if word.lower() not in ("and", "or")]
    if any(word.lower() in _MATHEMATICAL for word in words):
        return False
    longest = max(map(len, words), default=0)
    is_marked = _TEXT_GROUP.search(gold) is not None
    return longest >= 4 or (longest >= 3 and len(words) > 1) or (longest >= 2 and is_marked)


def _same_words(gold: str, answer: str) -> bool:
    """Whether two texts name the same, in any order where they are lists."""
    return _items(gold) == _items(answer)


def _items(text: str) -> list[str]:
    plain = re.sub(r"[.!'\"\\{}()]", " ", _unwrapped(text)).casefold()
    items = re.split(r"[,;]|\band\b", plain)
    return sorted(
        " ".join(re.sub(r"^\s*(?:the|an?)\s", "", one).split()) for one in items if one.strip()
    )


def _braced(text: str, start: int) -> str | None:
    """Return what stands from `start` to the brace that closes, or None where none does."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start:place]
    return None
