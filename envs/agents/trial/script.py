"""What a model without weights answers to a program: a call or two of its tools, then a text.

Pure. The answers hold what programs like to lose: reasoning, white space at the ends of texts,
arguments with spaces that no serialiser writes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ....schemas.output_format import OutputFormat
from ...tool_calls import CLOSE, OPEN
from ..messages import CanonicalMessage
from ..replies import THINK, THOUGHT
from .arguments import example, spaced

MAX_TOOL_TURNS = 2
_ENDS = ("final", "submit", "finish", "complete", "done")
"""What stands in the names of tools by which programs are told that it is over."""
_FIRST = f"{THINK}\nLet me think about it.\n{THOUGHT}\n\nI will  look it up.\n"
_SECOND = "  One more look.\n"
_TEXT = "  I think  that it is 42.\n\n"
_LAST = f"{THINK}\nThat will do.\n{THOUGHT}\n\nIt is  42.  \n"


def scripted_answer(
    history: Sequence[CanonicalMessage],
    tools: Sequence[Mapping[str, Any]],
    form: OutputFormat | None = None,
) -> str:
    """Return what is answered to a history, in the form in which models write tool calls.

    The first answer calls a tool, the one to its result another tool if there is one, and the next
    ends: by the tool that programs have for it, or by a text. With a `form` it is JSON, or a call
    of a tool that was not called before, if there is one.
    """
    named = {name: tool for tool in tools if (name := tool_name(tool))}
    called = [call.name for message in history for call in message.calls]
    if form is not None and form.functions and (form.json_schema is None or not called):
        allowed = sorted(form.functions, key=lambda name: (name in called, _ends(name)))
        return _call(named[allowed[0]])
    if form is not None:
        return spaced(example(form.json_schema))
    has_spoken = any(message.role == "assistant" for message in history)
    is_told = bool(history) and history[-1].role == "tool"
    for name in named:
        if _ends(name) or name in called or len(called) >= MAX_TOOL_TURNS:
            continue
        if not has_spoken:
            return _FIRST + _call(named[name])
        if is_told:
            return _SECOND + _call(named[name])
    end = next((name for name in named if _ends(name)), None)
    if end is not None:
        return _SECOND + _call(named[end])
    return _LAST if has_spoken else _TEXT


def tool_call(name: str, arguments: str) -> str:
    """Return a call as models write it; the arguments' own spelling is kept."""
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{told}\n{CLOSE}"


def _call(tool: Mapping[str, Any]) -> str:
    parameters = function_of(tool).get("parameters") or {"type": "object"}
    return tool_call(tool_name(tool), spaced(example(parameters)))


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a tool that chat templates take says of its function."""
    function: Any = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return its name; empty for a tool without one."""
    return str(function_of(tool).get("name") or "")


def _ends(name: str) -> bool:
    return any(word in name.lower() for word in _ENDS)
