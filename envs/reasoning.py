"""Separates the reasoning in an answer from the rest, and finds the action in the rest.

A model that reasons first writes `<think>…</think>` and then its answer; some use other marks. If
the chat template opens the reasoning in the prompt, the text for games, rewards and judges begins
with that mark, as if the model had written it. Pure.
"""

import re

from ..schemas.call_formats import CHANNELS, MARKS, ChannelReasoning

_OPENS = re.compile(f"(?:{'|'.join(map(re.escape, MARKS))})\\s*\\Z")
_BEGINS = re.compile(f"\\s*({'|'.join(map(re.escape, MARKS))})")
_CHANNELS = re.compile(r"\s*(?:to=[\w.]+\s*)?<\|(?:channel|start)\|>")


def opened_by(prompt: str) -> str:
    """Return the mark at the end of a prompt that opens the reasoning, or nothing."""
    match = _OPENS.search(prompt)
    return match[0] if match else ""


def behind_reasoning(text: str) -> str:
    """Return the text after the reasoning at its beginning; nothing if the reasoning is cut.

    An answer that does not begin with reasoning is returned unchanged. Of messages on channels the
    last final one is returned, or else all texts and calls.
    """
    if _CHANNELS.match(text):
        _, final, answer = text.rpartition(MARKS[CHANNELS])
        pieces = ChannelReasoning().push(final + answer if final else text, last=True)
        return "".join(piece for is_reasoning, piece in pieces if not is_reasoning)
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
    """Return the content of the last `<tag>…</tag>`, or else the last non-empty line."""
    inside = tagged(text, tag)
    if inside is not None:
        return inside
    lines = [line.strip() for line in behind_reasoning(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""
