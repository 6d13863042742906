"""Renders conversations for a model's chat template, and finds its features.

Generated text is never rendered again. To find the text between the end of a turn and the next one,
a short stand-in conversation with the *shape* of the turn is rendered: the same calls with their
names and ids, and a mark at the end. The text after the mark is the text after the turn. Templates
refer to names and ids of calls, so a plain text would not work as a stand-in. They may also rewrite
the earlier history, so the text before the mark is not compared.

At start-up each template is rendered with other histories to prove that the text after the turn is
the same. Limitations of a template are logged. They cause more rows or unavailable tools, but never
inexact tokens: if a turn cannot be continued exactly, the whole history is rendered as a new root.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...envs.reasoning import behind_reasoning
from ...envs.tools import calls_in
from ...schemas.call_formats import FORMATS, AnswerConverter, in_hermes_form
from ...schemas.model_apis.canonical import CanonicalCall, ModelMessage, parse_reply
from ...schemas.tool_calls import HERMES, THINK, CallFormat
from ...schemas.wire.array import IntVector
from ...schemas.wire.errors import ModelError
from ...schemas.wire.images import images_of
from ..policy.chat import ChatMessage, ChatTokenizer
from ..policy.histories import behind_history, num_shared
from ..policy.system_form import SystemForm

Tools: TypeAlias = Sequence[Mapping[str, Any]]

_STAND_IN_USER = ModelMessage(role="user", content=("stand-in",))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rendering, cut after a turn: the text before the turn, and the tokens from its end on."""

    before: str
    after: list[int]


class HistoryRenderer:
    """Renders conversations with a model's template."""

    def __init__(self, chat: ChatTokenizer) -> None:
        """Render with the template of `chat`."""
        self._chat = chat

    def whole(self, messages: Sequence[ModelMessage], tools: Tools) -> IntVector:
        """Return int32[T]: a whole conversation and the generation prompt.

        Raises ModelError for roles, tools or images that the model or its template does not accept.
        """
        return np.array(self._chat.prompt(_for_template(messages), tools), np.int32)

    def following(
        self,
        reply: ModelMessage,
        generated_ids: Sequence[int] | IntVector,
        new: Sequence[ModelMessage],
        tools: Tools,
    ) -> IntVector | None:
        """Return int32[G]: the tokens between a turn and the next one; None: they are unknown.

        They begin with the end of the turn, unless the policy generated it.
        """
        cut = self.cut((_STAND_IN_USER,), reply, _for_template(new), tools)
        if cut is None:
            return None
        num_generated = self._chat.count_generated(generated_ids[-1:], cut.after)
        return np.array(cut.after[num_generated:], np.int32)

    def continues(
        self,
        history: Sequence[ModelMessage],
        reply: ModelMessage,
        new: Sequence[ModelMessage],
        tools: Tools,
    ) -> bool:
        """Whether the text after the turn is the same with this history and with a stand-in."""
        stand_in = self.cut((_STAND_IN_USER,), reply, _for_template(new), tools)
        actual = self.cut(history, reply, _for_template(new), tools)
        return stand_in is not None and actual is not None and stand_in.after == actual.after

    def appends(
        self,
        history: Sequence[ModelMessage],
        reply: ModelMessage,
        new: Sequence[ModelMessage],
        tools: Tools,
    ) -> bool:
        """Whether the template renders the history in the same way with and without `new`."""
        now = self.cut(history, reply, (), tools, prompt=False)
        later = self.cut(history, reply, _for_template(new), tools)
        return now is not None and later is not None and now.before == later.before

    def cut(
        self,
        history: Sequence[ModelMessage],
        reply: ModelMessage,
        new: Sequence[ChatMessage],
        tools: Tools,
        *,
        prompt: bool = True,
    ) -> _Cut | None:
        """Find the end of the turn: the first token after it that ends a turn, or else the first
        one that depends on the next message. None if that is not a special token."""
        mark = f"mark{secrets.token_hex(16)}"
        known = _for_template([*history, _marked(reply, mark)])
        try:
            alone = self._chat.render(known, prompt=False, tools=tools)
            whole = self._chat.render([*known, *new], prompt=prompt, tools=tools)
            before, _, behind = whole.rpartition(mark)
            ids = self._chat.encode_seen(behind, images_of(new))
        except ModelError:
            return None
        if not 0 < alone.count(mark) == whole.count(mark):
            return None
        at = num_shared(self._chat.encode_seen(alone.rpartition(mark)[2]), ids)
        stops = (n for n, token in enumerate(ids[:at]) if token in self._chat.stop_token_ids)
        at = next(stops, at)
        is_end = ids[at:] and self._chat.is_special(ids[at])
        return _Cut(before.replace(mark, ""), ids[at:]) if is_end else None


def _for_template(messages: Sequence[ModelMessage]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]


def _marked(reply: ModelMessage, mark: str) -> ModelMessage:
    """Return a turn of the same shape whose last word is the mark."""
    if not reply.calls:
        return ModelMessage(role="assistant", content=(mark,))
    *calls, last = (CanonicalCall(call.name, "{}", call.id) for call in reply.calls)
    marked = CanonicalCall(last.name, f'{{"mark": "{mark}"}}', last.id)
    return ModelMessage(role="assistant", content=(), calls=(*calls, marked))


_USER = ModelMessage(role="user", content=("What is the weather in Paris and in Rome?",))
_MORE = ModelMessage(role="user", content=("And tomorrow?",))
_SYSTEM = ModelMessage(role="system", content=("Answer briefly.",))
_CALLS = (
    CanonicalCall("weather", '{"city": "Paris"}', "c00000000"),
    CanonicalCall("weather", '{"city": "Rome"}', "c00000001"),
)
_SAID = ModelMessage(role="assistant", content=("It is sunny.",))
_CALLED = ModelMessage(role="assistant", content=("Let me look.",), calls=_CALLS)
_RESULTS = tuple(ModelMessage(role="tool", content=("sunny",), call_id=call.id) for call in _CALLS)
_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """The features of a chat template, found by rendering."""

    system: SystemForm
    """The system messages that it shows."""
    takes_tools: bool
    """It accepts tools, calls and their results."""
    takes_parallel_calls: bool
    """It accepts several calls in one turn."""
    continues_users: bool
    """The text between a turn and a user's message is independent of the earlier history."""
    continues_tools: bool
    """The text between a turn and a tool's result is independent of the earlier history."""
    reads_calls: bool
    """Calls that it writes are read back unchanged."""

    def limitations(self) -> Iterator[str]:
        """Yield the limitations for programs."""
        if self.system.refusal:
            yield f"requests with a system message are refused: {self.system.refusal}"
        elif not self.system.shows_all:
            yield "system messages behind the first are shown as words of the user"
        if not self.takes_tools:
            yield "requests with tools are refused: the template has no place for them"
        elif not self.takes_parallel_calls:
            yield "a history with several tool calls in one turn is refused"
        if self.takes_tools and not self.reads_calls:
            yield "tool calls are not read: the model writes them in a format that is not known"
        if not self.continues_users:
            yield "a call that follows a user's words is a row of its own"
        if self.takes_tools and not self.continues_tools:
            yield "a call that follows a tool's result is a row of its own"


def facts_of(chat: ChatTokenizer) -> TemplateFacts:
    """Return the features of a template, found once by rendering short conversations."""
    if "facts" not in chat.findings:
        chat.findings["facts"] = _find_facts(chat)
    return chat.findings["facts"]


def _find_facts(chat: ChatTokenizer) -> TemplateFacts:
    renderer = HistoryRenderer(chat)

    def takes(*messages: ModelMessage, tools: Tools = ()) -> bool:
        try:
            renderer.whole(messages, tools)
        except ModelError:
            return False
        return True

    system = chat.system_form
    called = _CALLED.replaced(calls=_CALLS[:1])
    takes_tools = takes(_USER, called, _RESULTS[0], tools=_TOOLS)
    parallel = takes_tools and takes(_USER, _CALLED, *_RESULTS, tools=_TOOLS)
    turn, results = (_CALLED, _RESULTS) if parallel else (called, _RESULTS[:1])
    before = (_MORE, _SAID, _USER) if system.refusal else (_SYSTEM, _MORE, _SAID, _USER)
    return TemplateFacts(
        system=system,
        takes_tools=takes_tools,
        takes_parallel_calls=parallel,
        continues_users=renderer.continues(before, _SAID, [_MORE], ()),
        continues_tools=takes_tools
        and all(
            renderer.continues(before, turn, new, _TOOLS)
            for new in (results, (*results, _MORE))
            if new == results or takes(*before, turn, *new, tools=_TOOLS)  # Mistral's does not
        ),
        reads_calls=takes_tools and _reads_calls(chat, called),
    )


# -- turns of games with tools ---------------------------------------------------------------------


def first_prompt(
    chat: ChatTokenizer, messages: Sequence[ChatMessage], tools: Tools = ()
) -> IntVector:
    """Return the first prompt of a game's episode; see `ChatTokenizer.first_prompt`."""
    return chat.first_prompt(
        messages, tools, behind_calls=bool(tools) and _results_need_calls(chat)
    )


def next_turn(
    chat: ChatTokenizer,
    text: str,
    generated_ids: Sequence[int] | IntVector,
    observation: Sequence[ChatMessage],
    tools: Tools = (),
) -> IntVector:
    """Return int32[D]: the tokens between two turns of a game; see `ChatTokenizer.next_turn`.

    If the template needs it, results of tools are rendered behind the calls in the turn's `text`.
    """
    num_results = sum(message["role"] == "tool" for message in observation)
    if not num_results or not _results_need_calls(chat):
        return chat.next_turn(generated_ids, observation)
    read = [call.name if call else "" for call in calls_in(behind_reasoning(text), tools)]
    names = iter([*read, *[""] * num_results])
    turns: list[tuple[list[CanonicalCall], list[ChatMessage]]] = [([], [])]
    for message in observation:
        calls, new = turns[-1]
        if message["role"] == "tool":
            if calls and not facts_of(chat).takes_parallel_calls:
                turns.append(([], []))
                calls, new = turns[-1]
            calls.append(CanonicalCall(next(names) or "unknown", "{}", f"c{len(calls):08}"))
            message = {**message, "tool_call_id": calls[-1].id}
        new.append(message)
    ids: list[int] = []
    for number, (calls, new) in enumerate(turns, 1):
        reply = ModelMessage(role="assistant", calls=tuple(calls))
        is_last = number == len(turns)
        cut = HistoryRenderer(chat).cut((_STAND_IN_USER,), reply, new, tools, prompt=is_last)
        if cut is None:
            raise ModelError(
                "the model's chat template does not show results of "
                f"{', '.join(call.name for call in calls)}",
                hint="use a template that shows tool messages, or a game without tools",
            )
        ids += cut.after[1 if ids else 0 :]
    return np.array(ids[chat.count_generated(generated_ids[-1:], ids) :], np.int32)


def _results_need_calls(chat: ChatTokenizer) -> bool:
    """Whether a template shows a result otherwise, or not at all, without the call before it.

    gpt-oss's refuses it, Gemma 4's leaves it out, GLM's gives it to the user.
    """
    if "results" not in chat.findings:
        called, results = _CALLED.replaced(calls=_CALLS[:1]), _RESULTS[:1]
        renderer, earlier = HistoryRenderer(chat), (_USER, called, *results)
        behind = renderer.following(called, (), results, _TOOLS)
        is_proven = facts_of(chat).continues_tools and renderer.continues(
            earlier, called, results, _TOOLS
        )
        try:
            plain = chat.next_turn((), [{"role": "tool", "content": results[0].text}])
        except ModelError:
            plain = None
        is_same = plain is not None and behind is not None and np.array_equal(plain, behind)
        chat.findings["results"] = is_proven and not is_same
    return chat.findings["results"]


# -- calls in the model's own form -----------------------------------------------------------------


def _reads_calls(chat: ChatTokenizer, turn: ModelMessage) -> bool:
    """Whether a turn with calls is read back unchanged from the template's rendering."""
    written = _written(chat, turn)
    if written is None:
        return False
    return _has_calls(read_text(chat, *written, _TOOLS), turn)


def _written(chat: ChatTokenizer, turn: ModelMessage) -> tuple[list[int], list[int]] | None:
    """Return the tokens of a prompt and of a rendered turn; None if the template refuses it."""
    conversation = [_USER.for_template(), turn.for_template()]
    try:
        prompt = chat.render(conversation[:1], prompt=True, tools=_TOOLS)
        whole = chat.render(conversation, prompt=False, tools=_TOOLS)
    except ModelError:
        return None
    turn_text = behind_history(prompt, whole) or whole[num_shared(prompt, whole) :]
    before = whole.removesuffix(turn_text)
    return chat.encode_seen(before), chat.encode_seen(turn_text, behind=before)


def _has_calls(text: str, turn: ModelMessage) -> bool:
    reply = parse_reply(text, "c00000", calls=True)
    expected = [(call.name, call.key) for call in turn.calls]
    return [(call.name, call.key) for call in reply.calls] == expected


def call_format(chat: ChatTokenizer) -> CallFormat | None:
    """Return the format that reads the calls of a template, found once; None: it is not known."""
    if "call_format" not in chat.findings:
        chat.findings["call_format"] = _find_call_format(chat)
    return chat.findings["call_format"]


def _find_call_format(chat: ChatTokenizer) -> CallFormat | None:
    turn = ModelMessage(role="assistant", calls=_CALLS[:1])
    written = _written(chat, turn)
    if written is None:
        return None
    text, thinking = chat.decode(written[1]), chat.opens_thinking(written[0])
    mark = chat.reasoning_mark
    reads = (
        form
        for form in (HERMES, *FORMATS)
        if _has_calls(in_hermes_form(text, form, _TOOLS, mark, thinking=thinking), turn)
    )
    return next(reads, None)


def converter(chat: ChatTokenizer, tools: Tools, *, thinking: bool) -> AnswerConverter | None:
    """Return a converter of answers to the form that replies are read in; None: they have it.

    With `thinking`, the prompt has opened the reasoning.
    """
    mark, form = chat.reasoning_mark, call_format(chat) if tools else None
    if mark == THINK and form in (None, HERMES):
        return None
    return AnswerConverter(form, tools, mark, thinking=thinking)


def read_text(
    chat: ChatTokenizer, prompt_ids: Sequence[int], generated_ids: Sequence[int], tools: Tools
) -> str:
    """Return a whole answer in the form that replies are read in (`ReplyReader`)."""
    text = chat.decode(generated_ids)
    convert = converter(chat, tools, thinking=chat.opens_thinking(prompt_ids))
    return text if convert is None else convert.push(text, last=True)
