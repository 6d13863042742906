"""A model's answer as a message: what it reasoned, said and called, as its text has it.

What a program is told and what is kept of a call are both made of this message, so that an echo of
it is recognised. Calls are read as Hermes and Qwen models write them.
"""

from ..tool_calls import find_tool_calls
from .messages import CanonicalCall, CanonicalMessage, joined

_OPEN, _CLOSE = "<think>", "</think>"


def parse_reply(text: str, name: str, *, calls: bool) -> CanonicalMessage:
    """Read the text of an answer; `name` tells the ids of its calls from those of other answers.

    Without `calls`, what looks like a call is text. So is a call that is not well formed.
    """
    reasoning, said = _split_reasoning(text)
    rest, found = find_tool_calls(said) if calls else (said, [])
    return CanonicalMessage(
        role="assistant",
        content=joined([rest]),
        calls=tuple(
            CanonicalCall(call, arguments, f"{name}{place:03}")
            for place, (call, arguments) in enumerate(found)
        ),
        reasoning=reasoning,
    )


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Return what stands in `<think>`, which the prompt may have opened, and the rest."""
    before, closed, after = text.partition(_CLOSE)
    opened = before.lstrip().startswith(_OPEN)
    if closed:
        return before.lstrip().removeprefix(_OPEN), after
    return (before.lstrip().removeprefix(_OPEN), "") if opened else (None, text)
