r"""Find the answer in a text of the policy: the last `\boxed{…}` that is meant as one.

Reasoning between `<think>` tags, fenced blocks and tool calls are no place for an answer: what
stands in a program, or was considered on the way, does not count. Pure.
"""

import re

from ..reasoning import behind_reasoning

MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong without being read."""
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."

_BOXED = re.compile(r"\\f?box(?:ed)?\s*\{")
_NOT_SAID = re.compile(r"```.*?(?:```|\Z)|<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_FRACTION = rf"\\frac\{{-?(?:{_NUMBER})\}}\{{(?:{_NUMBER})\}}|\\frac\d\d"
_TEXT = r"\\(?:text|mathrm|mbox|textbf)"
_UNIT = rf"(?:{_TEXT}\{{[^{{}}\d]*\}}|cm|mm|km|kg|mg|m[lL]|ft|lb|oz|hr|min|sec)(?:\^\{{?[23]\}}?)?"
_WORDS = re.compile(r"(?<=[\d.}%])(?:\s+[A-Za-z]{2,})+\.?$")
_PLAIN_NUMBER = re.compile(
    rf"(?:[A-Za-z]\w*=)?(?:\\?\$|[£€])?(?P<number>[-+−]?"
    rf"(?:(?:{_NUMBER})(?:/(?:{_NUMBER})|(?:\\times|\\cdot|\*)10\^\{{?-?\d+\}}?)?"
    rf"|(?:\d+)?(?:{_FRACTION})))"
    rf"(?:\^\{{?\\circ\}}?)?(?P<percent>\\?%)?(?:\\?\$|€|{_UNIT})*"
)


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


def plain_number(answer: str) -> str | None:
    """Return the number in an answer that is one number as people write it down, else None.

    A unit, a currency, spaces between thousands and `x =` are left out of it. A sum, a list, a
    range, an equation of numbers and the like are no number, whatever their value: they leave the
    work, or the choice, to the grader.
    """
    text = answer.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\[!,;:]|~", " ", text).strip()
    text = re.sub(r"(?<=,) (?=\d{3})", "", text)
    if re.fullmatch(r"[-+−]?\d{1,3}(?: \d{3})+", text):
        return text.replace(" ", "")
    text = _WORDS.sub("", text)
    if re.search(r"[\d.]\s+[-+−]?[\d.\\]", re.sub(_TEXT, "u", text)):
        return None  # 1 2 is no 12
    match = _PLAIN_NUMBER.fullmatch(re.sub(r"\s", "", text))
    if match is None:
        return None
    number = match["number"].replace("−", "-").removesuffix(".")
    return number + ("\\%" if match["percent"] else "")


def _braced(text: str, start: int) -> str | None:
    """Return what stands from `start` to the brace that closes, or None where none does."""
    depth = 1
    for place in range(start, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return text[start:place]
    return None
