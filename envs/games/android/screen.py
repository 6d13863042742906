"""What the policy reads of an Android screen, and how its answer becomes an action."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, cast

from ...reasoning import behind_reasoning

ACTIONS = """\
{"action_type": "click", "index": 3} (also double_tap, long_press)
{"action_type": "input_text", "text": "what to type", "index": 3}
{"action_type": "keyboard_enter"}
{"action_type": "scroll", "direction": "up|down|left|right"} (with an index: within that element)
{"action_type": "open_app", "app_name": "name"}
{"action_type": "navigate_back"}, {"action_type": "navigate_home"}, {"action_type": "wait"}
{"action_type": "answer", "text": "the answer to a question of the goal"}
{"action_type": "status", "goal_status": "complete"} when the goal is reached, or "infeasible" when
it cannot be"""
SYSTEM_PROMPT = f"""\
You operate an Android phone to reach a goal. Each turn you get the goal and the elements of the
screen, numbered. Answer with one action, as JSON:
{ACTIONS}
Write in this form:
Reason: why
Action: {{"action_type": …}}"""

_POINTED = ("click", "double_tap", "long_press", "input_text")
_NEEDED = {
    "input_text": "text",
    "scroll": "direction",
    "swipe": "direction",
    "open_app": "app_name",
    "answer": "text",
    "status": "goal_status",
}
_STATUS = ("complete", "infeasible")
_FLAGS = (
    ("is_editable", "editable"),
    ("is_checked", "checked"),
    ("is_selected", "selected"),
    ("is_focused", "focused"),
    ("is_scrollable", "scrollable"),
    ("is_long_clickable", "long-clickable"),
)


def describe_screen(elements: Sequence[Any], screen_size: tuple[int, int]) -> str:
    """Return the visible elements line by line, each with the index that actions point with."""
    lines = [
        f"{index}: {_describe(element)}"
        for index, element in enumerate(elements)
        if _is_visible(element, screen_size)
    ]
    return "\n".join(lines) or "(nothing)"


def parse_answer(text: str) -> dict[str, Any] | None:
    """Return the fields of the action in an answer, or None.

    The action stands after the last `Action:`, or else is the last `{…}` of the text; JSON or a
    Python literal.
    """
    after = behind_reasoning(text).rpartition("Action:")[2]
    for part in (after.strip(), *reversed(re.findall(r"\{[^{}]*\}", after))):
        for read in (json.loads, ast.literal_eval):
            try:
                value: Any = read(part)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(value, dict):
                return cast("dict[str, Any]", value)
    return None


def what_is_wrong(fields: dict[str, Any] | None, elements: Sequence[Any]) -> str:
    """Say why fields make no action on this screen; empty when they do."""
    if fields is None:
        return "There is no action in your answer."
    kind = fields.get("action_type")
    needed = _NEEDED.get(str(kind))
    if needed is not None and not fields.get(needed):
        return f"The action {kind} needs {needed}."
    if kind == "status" and fields["goal_status"] not in _STATUS:
        return f"goal_status must be {' or '.join(_STATUS)}."
    if kind not in _POINTED or ("x" in fields and "y" in fields):
        return ""
    index = fields.get("index")
    known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(elements)
    return "" if known else f"There is no element {index!r} to {kind}."


def _is_visible(element: Any, screen_size: tuple[int, int]) -> bool:
    """Whether an element can be seen: not hidden, not empty, and on the screen."""
    box = element.bbox_pixels
    if element.is_visible is False or box is None:
        return False
    width, height = screen_size
    on_screen = box.x_min < width and box.x_max > 0 and box.y_min < height and box.y_max > 0
    return bool(box.x_min < box.x_max and box.y_min < box.y_max and on_screen)


def _describe(element: Any) -> str:
    kind = (element.class_name or "element").rpartition(".")[2]
    texts = [
        text for text in (element.text, element.content_description, element.hint_text) if text
    ]
    flags = [word for name, word in _FLAGS if getattr(element, name)]
    if element.is_enabled is False:
        flags.append("disabled")
    words = " / ".join(dict.fromkeys(texts))
    parts = [kind, *([repr(words)] if words else []), *([f"({', '.join(flags)})"] if flags else [])]
    return " ".join(parts)
