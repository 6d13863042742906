"""The form in which a chat template expects tool calls, determined by rendering one.

Most templates expect the arguments as an object, as transformers documents it. DeepSeek's expect
JSON text, and its first ones show calls only if the content is null. A template that shows no calls
is reported: a policy would learn, or continue, a history without its calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

from ...schemas.chat_messages import with_text_arguments
from ...schemas.tool_calls import NAMING_ID
from ...schemas.wire.errors import ModelError

Render: TypeAlias = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""Renders messages, with tools; raises ModelError if the template refuses them."""

_ASKED: Mapping[str, Any] = {"role": "user", "content": "stand-in"}
_KEY, _VALUE = "stand_in_key", "stand-in value"
_OTHER_VALUE = "other value"
_NAME = "stand_in_tool"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A stand-in.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}
_CALL: Mapping[str, Any] = {"type": "function", "id": "c00000000"}
_NOT_JSON = (f"'{_KEY}'", f'\\"{_KEY}\\"')
"""An object printed by Python, and JSON text encoded twice."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a message with tool calls for a template."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text."""
    null_content: bool = False
    """Whether calls are shown only in a message whose content is null."""
    shows_calls: bool = True
    """Whether calls are shown in any form."""
    shows_several: bool = True
    """Whether all calls of a message are shown, not only the first (gpt-oss)."""
    names_in_ids: bool = False
    """Whether the id of a call is shown in place of its name, and so contains it (Kimi)."""

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages in this form; raises ModelError for calls that the template omits."""
        ids: dict[str, str] = {}
        return [self._fit(message, ids) for message in messages]

    def _fit(self, message: Mapping[str, Any], ids: dict[str, str]) -> Mapping[str, Any]:
        """Return a message in this form; `ids` maps ids of calls to those that are shown."""
        if not message.get("tool_calls"):
            answered = message.get("tool_call_id")
            return {**message, "tool_call_id": ids[answered]} if answered in ids else message
        if not self.shows_calls or not (self.shows_several or len(message["tool_calls"]) == 1):
            some = "tool calls" if not self.shows_calls else "tool calls behind a message's first"
            raise ModelError(
                f"the model's chat template omits {some}: they would be missing in what "
                "the model sees and learns",
                hint="use a template that shows tool calls, or leave such messages out",
            )
        fitted = with_text_arguments(message) if self.arguments_as_text else dict(message)
        if self.names_in_ids:
            fitted["tool_calls"] = _with_naming_ids(fitted["tool_calls"], ids)
        if self.null_content:
            if message.get("content"):
                raise ModelError(
                    "the model's chat template shows tool calls only in a message without content: "
                    "those of a message that has both would be missing",
                    hint="use a template that shows both, or split the message",
                )
            fitted["content"] = None
        return fitted


def find_call_form(render: Render) -> CallForm:
    """Find the form in which a template shows the name and the arguments of a call.

    Objects are preferred to texts, an empty content to null, and calls of described tools to
    others. If the template refuses all forms, the usual one is returned, whose rendering raises the
    template's error.
    """
    refused = True
    for has_tools, as_text, is_null in product((True, False), (False, True), (False, True)):
        form = CallForm(as_text, is_null)
        tools = [dict(_TOOL)] if has_tools else []
        try:
            shown = _shown(render, form, tools)
        except ModelError:
            continue
        refused = False
        if _VALUE in shown and not any(wrong in shown for wrong in _NOT_JSON):
            by_id = _unless_refused(render, form, [])
            several = _unless_refused(render, form, tools, _VALUE, _OTHER_VALUE)
            return replace(
                form,
                names_in_ids=bool(by_id) and _NAME not in by_id and _CALL["id"] in by_id,
                shows_several=not several or _OTHER_VALUE in several,
            )
    return CallForm(shows_calls=refused)


def _shown(
    render: Render, form: CallForm, tools: list[dict[str, Any]], values: Sequence[str] = (_VALUE,)
) -> str:
    """Return the rendering of calls with these arguments."""
    calls = [{**_CALL, "function": {"name": _NAME, "arguments": {_KEY: v}}} for v in values]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    return render([dict(message) for message in form.fit([_ASKED, turn])], tools)


def _unless_refused(
    render: Render, form: CallForm, tools: list[dict[str, Any]], *values: str
) -> str:
    """Return the rendering of calls; empty if the template refuses them."""
    try:
        return _shown(render, form, tools, values or (_VALUE,))
    except ModelError:
        return ""


def _with_naming_ids(
    calls: Sequence[Mapping[str, Any]], ids: dict[str, str]
) -> list[Mapping[str, Any]]:
    """Return calls with ids that contain their names: the model's own, or numbered in a turn."""
    named: list[Mapping[str, Any]] = []
    for number, call in enumerate(calls):
        own = NAMING_ID.fullmatch(call["id"])
        shown = own[1] if own else f"functions.{call['function']['name']}:{number}"
        ids[call["id"]] = shown
        named.append({**call, "id": shown})
    return named
