"""The form in which a chat template shows system messages, determined by rendering some.

Some templates show them anywhere, most only the first message, some none. Where only the first is
shown, those that follow it at once are joined to it, and later ones become words of the user. So a
conversation is shown alike in episodes, games, demonstrations and served chats, and a growing one
keeps its beginning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from ...schemas.wire.errors import ModelError

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Render: TypeAlias = Callable[[list[dict[str, Any]]], str]
"""Renders messages; raises ModelError if the template refuses them."""

_REMINDER = ("<system-reminder>\n", "\n</system-reminder>")
_FIRST, _SECOND, _LATE, _ASKED, _SAID, _MORE = (
    {"role": role, "content": f"stand-in {name}"}
    for role, name in (
        ("system", "rule"),
        ("system", "custom"),
        ("system", "reminder"),
        ("user", "question"),
        ("assistant", "answer"),
        ("user", "request"),
    )
)


@dataclass(frozen=True, slots=True)
class SystemForm:
    """The system messages that a template shows."""

    refusal: str = ""
    """Why it shows none; empty: it shows the first message of a conversation."""
    shows_all: bool = False
    """Whether it shows several, anywhere, in their order."""

    def fit(self, messages: Messages, model: str) -> list[Mapping[str, Any]]:
        """Return messages in this form; raises ModelError if the template of `model` shows none."""
        if self.shows_all:
            return [*messages]
        fitted: list[Mapping[str, Any]] = []
        for message in messages:
            if message.get("role") != "system":
                fitted.append(message)
            elif self.refusal:
                raise _refused(model, self.refusal)
            elif not fitted:
                fitted.append(message)
            elif len(fitted) == 1 and fitted[0].get("role") == "system":
                content = _joined(fitted[0]["content"], "\n\n", message["content"])
                fitted[0] = {**fitted[0], "content": content}
            else:
                begin, end = _REMINDER
                content = _joined(begin, message["content"], end)
                fitted.append({"role": "user", "content": content})
        return fitted


def find_system_form(render: Render) -> SystemForm:
    """Find which system messages a template shows."""
    try:
        rendered = render([_FIRST, _ASKED])
    except ModelError as error:
        return SystemForm(refusal=error.message)
    if _FIRST["content"] not in rendered:
        return SystemForm(refusal="the template leaves it out")
    several = [_FIRST, _SECOND, _ASKED, _SAID, _LATE, _MORE]
    try:
        return SystemForm(shows_all=_in_order(render(several), several))
    except ModelError:
        return SystemForm()


def _in_order(rendered: str, messages: Messages) -> bool:
    """Whether a rendering has all messages, in order."""
    places = [rendered.find(message["content"]) for message in messages]
    return min(places) >= 0 and places == sorted(places)


def _joined(*contents: Any) -> Any:
    """Return contents, texts or lists of parts, as one."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts: list[Any] = []
    for content in contents:
        text = {"type": "text", "text": content}
        parts += [text] if isinstance(content, str) else cast("list[Any]", content)
    return parts


def _refused(model: str, reason: str) -> ModelError:
    return ModelError(
        f"the chat template of {model} takes no system message, and a conversation has one: "
        f"{reason}",
        hint="use a game without a system prompt, leave it out of requests, use a model whose "
        "template shows it, or write it into chat_template.jinja in the model's folder, for "
        "example before the first message of the user",
    )
