"""Where the reasoning in an answer ends, what is said behind it, and the action in that.

A model that reasons first writes `<think>…</think>` and then its answer; some write other marks. A
chat template may open the reasoning in the prompt already: then the text that a game, a reward or
a judge is given begins with that mark, as if the model had written it. Pure.
"""

import re

MARKS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",
}
"""What opens a model's reasoning, and what ends it."""
_OPENS = re.compile(f"(?:{'|'.join(map(re.escape, MARKS))})\\s*\\Z")
_BEGINS = re.compile(f"\\s*({'|'.join(map(re.escape, MARKS))})")


def opened_by(prompt: str) -> str:
    """Return the mark at the end of a prompt that has opened the reasoning, or nothing."""
    match = _OPENS.search(prompt)
    return match[0] if match else ""


def behind_reasoning(text: str) -> str:
    """Return what an answer says behind the reasoning that it begins with; nothing if that is cut.

    An answer that does not begin with reasoning is returned as it is.
    """
    begins = _BEGINS.match(text)
    if begins is None:
        return text
    _, closed, answer = text.rpartition(MARKS[begins[1]])
    return answer if closed else ""


def tagged(text: str, tag: str) -> str | None:
    """Return the stripped content of the last `<tag>…</tag>`, or None."""
    matches = re.findall(
        rf"<{tag}>(.*?)</{tag}>", behind_reasoning(text), flags=re.DOTALL | re.IGNORECASE
    )
    return matches[-1].strip() if matches else None


def tagged_or_last_line(text: str, tag: str) -> str:
    """Return what stands in the last `<tag>…</tag>`, or else the last line that is not empty."""
    inside = tagged(text, tag)
    if inside is not None:
        return inside
    lines = [line.strip() for line in behind_reasoning(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""
