"""Chat templating that only ever appends.

The first prompt of an episode is rendered and tokenised once. Every later turn adds only the
tokens between the policy's last token and its next one: the end of the assistant turn, the
observation, the next generation prompt. What the policy generated is never re-tokenised.

The tokens between two turns are taken from the rendering of a short sample conversation. That is
correct only if the template writes them after any history, and the tokenizer splits text at these
places. `check_template` verifies both at start-up. A template may leave the reasoning of earlier
turns out (Qwen3): an episode keeps it, in training and when the trained model plays. One that
changes anything else is refused.

The template's own marker ends a turn. If it has none (GLM's), the marker of the next role ends the
turn, and the tokenizer's end of text ends the last one. The special tokens of a prompt are those
that the template writes (`token_text`). A template that uses the time gets the same time at every
rendering; `at` returns the same templating at another time.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np

from ...envs.reasoning import opened_by
from ...schemas.call_formats import CHANNELS, MARKS
from ...schemas.chat_messages import template_messages, template_tool
from ...schemas.config.job import JobConfig, ModelConfig
from ...schemas.tool_calls import THINK
from ...schemas.wire.array import IntVector
from ...schemas.wire.errors import DataError, ModelError
from ...schemas.wire.images import encoded_image, image_parts, images_of, replace_images
from . import model_folder
from .call_form import CallForm, find_call_form
from .histories import (
    Conversation,
    ReasoningForm,
    RenderedTurn,
    as_generated,
    behind_history,
    find_reasoning_form,
    hides_reply,
    num_shared,
    rewrites,
    without_reasoning,
)
from .system_form import SystemForm, find_system_form
from .template_variables import settable, variables_of
from .token_text import SpecialText, TokenBytes, marks_of
from .vision import check_seen, with_room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .vision import ImageReader

ChatMessage: TypeAlias = Mapping[str, Any]

_REPLY = "stand-in reply"
_USER: ChatMessage = {"role": "user", "content": "stand-in"}
_STAND_IN: tuple[ChatMessage, ...] = (_USER, {"role": "assistant", "content": _REPLY})
_OTHERS: tuple[ChatMessage, ...] = (
    {"role": "tool", "content": "stand-in"},
    {"role": "system", "content": "stand-in"},
)
_CALLED: ChatMessage = {"role": "assistant", "content": ""}
_CALL: ChatMessage = {"id": "c00000000", "name": "stand_in", "arguments": {"stand": "in"}}
_REPLIES = ("a first reply", "a second reply", "a third reply")
_BETWEEN = ("\n", "a", "0", ".", "一")
"""Texts before which nothing joins: a piece encoded after one has no token of a text's start."""
_TAIL = 24
"""Last tokens of a prompt that are searched for the start of reasoning."""
_SHOWN = 60
_REASONING_MARKS = frozenset({*MARKS, *MARKS.values()})
_REMEMBERED = 1024
"""Cached encodings, all of which are dropped when there are more."""


class ChatTokenizer:
    """A tokenizer with its chat template, for the agent loop.

    `template_kwargs` (`enable_thinking`, …) are passed to the template at every turn. Raises
    ModelError for a tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        template_kwargs: Mapping[str, Any] | None = None,
        extra_stop_token_ids: Sequence[int] = (),
        image_reader: "ImageReader | None" = None,
        *,
        must_chat: bool = True,
    ) -> None:
        """Prepare; `extra_stop_token_ids` are those of the model's generation configuration.

        Without an `image_reader` messages with images are refused. Without `must_chat` a missing
        template raises an error only when it is needed.
        """
        self._tokenizer = tokenizer
        template = cast(Any, tokenizer).chat_template
        self._has_template = bool(template)
        self._asks_time = "strftime_now" in str(template)
        self._time = time.time()
        self._template_kwargs = dict(template_kwargs or {})
        self.findings: dict[str, Any] = {}
        """Cached facts about the template by name, equal at all times."""
        self._image_reader = image_reader
        self._known: dict[str, IntVector] = {}
        self._token_texts: dict[int, str] = {}
        self._token_bytes: TokenBytes | None = None
        self._marks = marks_of(tokenizer)
        self._texts = SpecialText(tokenizer)
        self._depends_on_place = self._is_other_behind_text()
        chats = must_chat or self._has_template
        head = self.render(_STAND_IN, prompt=False) if chats else ""
        self._before = _until_reply(head)
        self._closing = head[len(self._before) :] if self._before else ""
        closing = self.encode_behind(self._before, self._closing)
        ends = [token for token in closing if token in self._marks][:1]
        self.ends_turns = bool(ends) or not self._before
        """Whether the template ends a turn; otherwise the marker of the next role does."""
        marks = self._role_marks() if self._before and not ends else []
        eos = cast("int | None", tokenizer.eos_token_id)
        own_ends = [*([] if eos is None else [eos]), *extra_stop_token_ids]
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys(map(int, own_ends)))
        """Tokens that end a text without a template: the tokenizer's, and the model's."""
        ids = [*ends, *self.end_token_ids, *marks, *(self._call_end() if ends else [])]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(int(i) for i in ids))
        """Tokens that end a turn of the policy; the first one ends a conversation."""
        if not self.stop_token_ids:
            raise ModelError(
                "neither the chat template nor the tokenizer has a token that ends a turn",
                hint="set eos_token in tokenizer_config.json",
            )
        around = (tokenizer.pad_token_id, tokenizer.bos_token_id)
        unsaid = (*self.stop_token_ids, eos, *(cast("int | None", token) for token in around))
        self._never_text = frozenset(token for token in unsaid if token is not None)
        frame = self._frame() if chats else []
        controls = {*frame, *map(self.token_text, self._never_text)}
        if image_reader is not None:
            controls.add(self.token_text(image_reader.token_id))
        self._texts = SpecialText(tokenizer, frame, controls)

    def at(self, seconds: float) -> Self:
        """Return the same templating with another time (seconds since the epoch, shown as UTC).

        Returns this object if the template does not use the time.
        """
        if not self._asks_time or seconds == self._time:
            return self
        return self._changed(_time=seconds)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the same templating with values for `template_options`; see `settable`."""
        chosen = settable(options, self.template_options)
        return self._changed(_template_kwargs=self._template_kwargs | chosen) if chosen else self

    def _changed(self, **attributes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(attributes)
        other._before = _until_reply(other._rendered(_STAND_IN, prompt=False) or "")
        return other

    @property
    def template_options(self) -> frozenset[str]:
        """Variables of the template that a request may set, such as `enable_thinking`."""
        if "options" not in self.findings:
            own = cast("Any", self._tokenizer).special_tokens_map
            self.findings["options"] = variables_of(self.template).difference(own)
        return self.findings["options"]

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of a conversation, of tools for it, and the generation prompt.

        Images are included as their tokens. Raises ModelError for tools that the template omits and
        images that the model cannot read, DataError for invalid images.
        """
        messages = template_messages(messages)
        images = images_of(messages)
        check_seen(images, self._image_reader)
        self._refuse_unseen(tools, messages)
        return self.encode_seen(self.render(messages, prompt=True, tools=tools), images)

    def first_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        behind_calls: bool = False,
    ) -> IntVector:
        """Return int32[T]: the conversation so far, tools for it, and the generation prompt.

        `behind_calls`: results are rendered with their calls. Raises ModelError for tools that the
        template omits, or moves from turn to turn.
        """
        if tools and (proof := f"tools {tools!r}") not in self.findings:
            self._check_tools(messages, tools, ("tool", "user")[behind_calls:])
            self.findings[proof] = True
        named = replace_images(messages, lambda part: sha256(encoded_image(part)).hexdigest())
        return self._remember(f"first {tools!r} {named!r}", lambda: self.prompt(messages, tools))

    def next_turn(
        self, generated_ids: Sequence[int] | IntVector, observation: Sequence[ChatMessage]
    ) -> IntVector:
        """Return int32[D]: the tokens between the policy's last token and its next turn.

        They are the rest of the end of its turn (all of it, if generation was cut before the stop
        token), the observation messages, and the generation prompt.
        """
        delta = self._remember(
            f"next {observation!r}",
            lambda: self.encode_behind(self._before, self._behind(observation)),
        )
        return delta[self.count_generated(generated_ids[-1:], delta) :]

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        trained: Collection[int] | None = None,
    ) -> Conversation:
        """Tokenise a recorded conversation piece by piece, as an episode is tokenised.

        `trained` are the indices of the assistant's messages that are turns (default: all); the
        others are context, and what follows the last turn is left out. The tokens between two
        turns of the assistant are those of an episode; a turn is the rendering of its message up to
        its end: the template's marker, or that of the next role.

        Raises ModelError for a template that does not only append and for images that the model
        cannot read; DataError for an assistant without text, or with images.
        """
        messages = template_messages(messages)
        check_seen(images_of(messages), self._image_reader)
        self._refuse_unseen(tools, messages[:1])
        if self._has_template and not self._before:
            raise hides_reply()
        ids: list[int] = []
        mask: list[int] = []
        ends: list[int] = []
        known, shown = "", 0
        for turn in self._turns(messages, tools):
            images = images_of(messages[shown : turn.place])
            shown = turn.place + 1
            between = self._between(known, ids, turn, images, tools)
            turn_ids, known = self._reply_tokens(turn)
            is_turn = trained is None or turn.place in trained
            ids += between + turn_ids
            mask += [0] * len(between) + [int(is_turn)] * len(turn_ids)
            if is_turn:
                ends.append(len(ids) - 1)
        if not ends:
            raise DataError(
                "a conversation has no message of the assistant that is learnt",
                hint='its answers are what is learnt: {"role": "assistant", "content": …}',
            )
        del ids[ends[-1] + 1 :], mask[ends[-1] + 1 :]
        return Conversation(*(np.array(column, np.int32) for column in (ids, mask, ends)))

    def _between(
        self,
        known: str,
        ids: Sequence[int],
        turn: RenderedTurn,
        images: Sequence[bytes],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Return the tokens from the text `known` with the tokens `ids` to a turn's reply."""
        prompt = turn.prompt
        if tools and behind_history(known, prompt) is None:
            known, prompt = self._without_tools(tools, known, prompt)
        if (behind := behind_history(known, prompt)) is not None:
            return self.encode_seen(behind, images, behind=known)
        known = self._without_end(known)  # gpt-oss ends earlier turns with another marker
        behind = self._beyond(known, prompt, f"message {turn.place}")
        between = self.encode_seen(behind, images, behind=known)
        return between[self.count_generated(ids[-1:], between) :]

    def _turns(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[RenderedTurn]:
        """Yield the rendered turns of the assistant."""
        places = [
            place for place, message in enumerate(messages) if message.get("role") == "assistant"
        ]
        shown = self._texts.hide(messages)
        render = partial(self._render_hidden, tools=self._hide_tools(tools))
        prompts = [render(shown[:place], prompt=True) for place in places]
        later: list[str | None] = [*prompts[1:], None][: len(places)]
        if places and not self.ends_turns and places[-1] + 1 < len(messages):
            later[-1] = render(shown, prompt=False)
        for place, prompt, following in zip(places, prompts, later, strict=True):
            if any(image_parts([messages[place]])):
                raise DataError(
                    f"message {place} of a conversation is the assistant's, and holds an image",
                    hint="a model says text: let the images stand in what it is told",
                )
            whole = render(shown[: place + 1], prompt=False)
            if not whole.startswith(prompt):
                self._beyond(prompt, whole, f"message {place}")
                whole = prompt + as_generated(prompt, shown[place], place) + self._closing
            yield RenderedTurn(place, prompt, whole, following)

    def _reply_tokens(self, turn: RenderedTurn) -> tuple[list[int], str]:
        """Return a turn's tokens with its end, and the text up to there."""
        whole, begin = turn.whole, len(turn.prompt)
        if turn.following is not None and not turn.following.startswith(whole):
            cut = max(num_shared(whole, turn.following), begin)
            more = self._texts.find(whole[begin:]) != self._texts.find(whole[begin:cut])
            if more and self._end_of(
                whole[begin:cut]
            ):  # the end of a conversation does not end this turn
                whole = whole[:cut]
        end = self._end_of(whole[begin:])
        if end:
            known = whole[: begin + end]
            return self.encode_behind(turn.prompt, known[begin:]), known
        turn_ids = self.encode_behind(turn.prompt, whole[begin:])
        if turn.following is None:
            return [*turn_ids, self.stop_token_ids[0]], whole
        following = turn.following[len(whole) :]
        if turn.following.startswith(whole) and self._texts.starts(following):
            mark = self._texts.find(following)[0]
            return [*turn_ids, *self._texts.encode(mark)], whole + mark
        if not turn_ids:
            raise DataError(
                f"message {turn.place} of a conversation is the assistant's, and says nothing",
                hint="leave it out, or use a template that ends a turn",
            )
        return turn_ids, whole

    def _end_of(self, reply: str) -> int:
        """Return where the marker that ends a turn ends in its rendering; 0: there is none.

        It is the last stop token, or else the last marker, such as `<|eom_id|>` after a call.
        """
        marks = self._texts.find(reply)
        stops = [name for name in marks if self._texts.encode(name)[0] in self.stop_token_ids]
        last = (stops or marks or [""])[-1]
        end = reply.rindex(last) + len(last) if last else 0
        is_end = bool(stops) or (self.ends_turns and not reply[end:].strip())
        return end if is_end else 0

    def count_generated(
        self, generated_ids: Sequence[int] | IntVector, rest: Sequence[int] | IntVector
    ) -> int:
        """Count the tokens at the start of `rest` that belong to the policy's last token.

        They are the tokens up to the first marker, which ends the turn, or none.
        """
        if not len(generated_ids) or int(generated_ids[-1]) not in self.stop_token_ids:
            return 0
        first = next((at for at, token in enumerate(rest) if int(token) in self._marks), None)
        return first + 1 if first is not None and int(rest[first]) == int(generated_ids[-1]) else 0

    def decode(self, token_ids: Sequence[int] | IntVector) -> str:
        """Return the text of generated tokens, without those that end turns or begin or pad texts.

        Other special tokens are the model's markers, and stay: `<think>`, `<tool_call>`.
        """
        ids = [token for token in map(int, token_ids) if token not in self._never_text]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        return cast("str", text)

    def opened(self, prompt_ids: Sequence[int] | IntVector) -> str:
        """Return the marker with which a prompt opens the reasoning of its answer; empty: none."""
        tail = [int(token) for token in prompt_ids[-_TAIL:]]
        return opened_by(cast("str", self._tokenizer.decode(tail)))  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers

    def opens_thinking(self, prompt_ids: Sequence[int] | IntVector, prefill: str = "") -> bool:
        """Whether an answer begins inside the reasoning that `ReplyReader` reads.

        A `prefill` after the prompt may repeat the marker.
        """
        is_repeated = prefill.lstrip().startswith(self.reasoning_mark)
        return bool(self.opened(prompt_ids)) and not is_repeated

    def answer(
        self, prompt_ids: Sequence[int] | IntVector, generated_ids: Sequence[int] | IntVector
    ) -> str:
        """Return an answer to parse: the model's text after the marker that its prompt opened."""
        return self.opened(prompt_ids) + self.decode(generated_ids)

    @property
    def reasoning_mark(self) -> str:
        """The mark that begins reasoning: one that the template or the tokenizer has."""
        if "mark" not in self.findings:
            shown = [mark for mark in MARKS if mark in self.template]
            self.findings["mark"] = next(iter([*shown, *filter(self.special_token, MARKS)]), THINK)
        return self.findings["mark"]

    @property
    def template(self) -> str:
        """The source of the chat template; empty without one."""
        chat_template = cast("Any", self._tokenizer).chat_template
        return chat_template if isinstance(chat_template, str) else repr(chat_template or "")

    def decode_all(self, token_ids: Sequence[int] | IntVector) -> str:
        """Return the text of tokens, special ones included."""
        return cast("str", self._tokenizer.decode([int(token) for token in token_ids]))  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, for compiling grammars over its tokens."""
        return self._tokenizer

    def special_token(self, mark: str) -> int | None:
        """Return the one token of a marker (`<tool_call>`); None: it is plain text."""
        added = cast("dict[int, Any]", self._tokenizer.added_tokens_decoder)  # pyright: ignore[reportAttributeAccessIssue]
        return next(
            (token for token, added_token in added.items() if str(added_token) == mark), None
        )

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special ones included."""
        text = self._token_texts.get(token_id)
        if text is None:  # cached: log-probs need texts of the likeliest tokens at each position
            text = cast("str", self._tokenizer.decode([int(token_id)]))  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
            self._token_texts[int(token_id)] = text
        return text

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes of one token in `decode`'s text; `first`: at the start of a text."""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self._tokenizer, self._never_text)
        return self._token_bytes.of(int(token_id), first=first)

    def vocabulary(self) -> str:
        """Return a digest of all tokens and their ids: equal for equal tokenizers."""
        return model_folder.vocabulary_digest(self._tokenizer)

    def check_template(self, *, multi_turn: bool = True) -> None:
        """Verify that template and tokenizer only append; raise ModelError that shows where not.

        With `multi_turn`, a conversation of several turns is compared with the pieces of an
        episode. Without, only the generation prompt must be appended.
        """
        messages: list[ChatMessage] = [{"role": "user", "content": "a question"}]
        start, prompt = self.render(messages, prompt=False), self.render(messages, prompt=True)
        self._beyond(self._without_end(start), prompt, "the generation prompt")
        if not multi_turn:
            return
        if not self._before:
            raise hides_reply()
        episode, later, joined = prompt, prompt, self._texts.encode(prompt)
        for number, reply in enumerate(_REPLIES, 1):
            prompt = later
            observation: ChatMessage = {"role": "user", "content": f"observation {number}"}
            messages += [{"role": "assistant", "content": reply}, observation]
            later = self.render(messages, prompt=True)
            turn = self._lead(prompt, later, reply) + reply
            appended = self._behind([observation])
            if not later.endswith(appended):
                raise rewrites(f"observation {number}", appended, later[-len(appended) :])
            turn_ids = self.encode_behind(episode, turn)
            joined += [*turn_ids, *self.next_turn(turn_ids, [observation]).tolist()]
            episode += turn + appended
            if without_reasoning(later) != without_reasoning(episode):
                raise rewrites(f"turn {number}", episode, later)
            self._must_join(joined, episode, f"turn {number}")

    @property
    def keeps_reasoning(self) -> bool:
        """Whether the template leaves out reasoning of earlier turns, which an episode keeps."""
        if "keeps reasoning" not in self.findings:
            why, mark, reply = "some reasoning", self.reasoning_mark, _REPLIES[0]
            answer = {"content": f"{mark}\n{why}\n{MARKS[mark]}\n\n{reply}"}
            if mark == CHANNELS:  # it is no part of the content
                answer = {"content": reply, "reasoning_content": why}
            later = self.render([_USER, {"role": "assistant", **answer}, _USER], prompt=True)
            self.findings["keeps reasoning"] = why not in later
        return self.findings["keeps reasoning"]

    def _without_end(self, rendered: str) -> str:
        """Return a rendering without the markers at its end, such as Phi 3's end of a conversation.

        A marker before them stays, so that the rest can be compared.
        """
        marks = self._texts.find(rendered)
        while marks and rendered.rstrip().endswith(marks[-1]):
            rendered = rendered.rstrip().removesuffix(marks.pop())
        return rendered

    def _lead(self, prompt: str, later: str, reply: str) -> str:
        """Return what a template writes before a reply: white space (Llama 2), a channel."""
        lead, shown, _ = (behind_history(prompt, later) or "").partition(reply)
        return lead if shown else ""

    def _must_join(self, joined: Sequence[int], whole: str, what: str) -> None:
        """Raise ModelError if pieces have other tokens than the whole."""
        expected = self._texts.encode(whole)
        if list(joined) == expected:
            return
        at = num_shared(joined, expected)
        own, other = ("".join(map(self.token_text, ids[at : at + 8])) for ids in (joined, expected))
        raise ModelError(
            f"the tokenizer splits a conversation differently from its pieces: with {what}, from "
            f"token {at} on, the pieces are {own!r} and the whole is {other!r}",
            hint="use a tokenizer or a template in which a turn begins after a special token or a "
            "line break, or set rollout.max_turns to 1",
        )

    def _refuse_unseen(
        self, tools: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage]
    ) -> None:
        """Raise ModelError for tools that the template omits."""
        render = partial(self.render, messages, prompt=True)
        if tools and render(tools=tools) == render():
            raise ModelError(
                "the model's chat template omits tools: the model would not see them",
                hint="leave `tools` out, or use a model whose template shows them",
            )

    def _check_tools(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        roles: Sequence[str],
    ) -> None:
        """Verify that the text after an answer is the same with and without `tools`."""
        with_reply = [*messages, {"role": "assistant", "content": _REPLY}]
        whole = self.render(with_reply, prompt=False, tools=tools)
        for role in roles:
            observation = {"role": role, "content": "an observation"}
            later = self.render([*with_reply, observation], prompt=True, tools=tools)
            known, later = self._without_tools(tools, _until_reply(whole), later)
            behind = self._beyond(known, later, f"a message of the {role}")
            if observation["content"] not in behind:
                raise ModelError(
                    f"the model's chat template omits a message of the {role} behind an answer",
                    hint="use a template that shows it, or play the game as an agent program",
                )
            if behind != (appended := self._behind([observation])):
                raise rewrites(f"a message of the {role}", appended, behind)

    def _without_tools(self, tools: Sequence[Mapping[str, Any]], *rendered: str) -> list[str]:
        """Return renderings without the text of tools.

        Mistral's templates show it before the last user; an episode has it in the first prompt.
        """
        shown, bare = (self.render([_USER], prompt=True, tools=its) for its in (tools, ()))
        at = num_shared(shown, bare)
        text = shown[at:].removesuffix(bare[at:])
        return [whole.replace(text, "") for whole in rendered]

    def _beyond(self, known: str, rendered: str, what: str) -> str:
        """Return what a rendering has after `known`, whose reasoning it may leave out."""
        behind = behind_history(known, rendered)
        if behind is None:
            raise rewrites(what, known, rendered)
        return behind

    def _behind(self, observation: Sequence[ChatMessage]) -> str:
        """Return the rendering of messages between a turn and the next one."""
        whole = self.render([*_STAND_IN, *observation], prompt=True)
        return self._beyond(self._before, whole, "an observation")

    def _is_other_behind_text(self) -> bool:
        """Whether a piece has other tokens at a text's start, as with SentencePiece's space."""
        apart, both = self.encode("\n"), self.encode("\na")
        return both[: len(apart)] != apart or both[len(apart) :] != self.encode("a")

    def _role_marks(self) -> list[int]:
        """Return the first tokens after a turn, if they are markers."""
        marks: list[int] = []
        for message in (_USER, *_OTHERS):
            whole = self._rendered([*_STAND_IN, message], prompt=True) or ""
            if behind := behind_history(self._before, whole):
                ids = self.encode_behind(self._before, behind)
                marks += [token for token in ids[:1] if token in self._marks]
        return marks

    def _call_end(self) -> list[int]:
        """Return the marker that ends a turn with calls, such as gpt-oss's `<|call|>`."""
        single, double = (
            self._rendered([_USER, {**_CALLED, "tool_calls": [_CALL] * num}], prompt=False) or ""
            for num in (1, 2)
        )
        mark = next(reversed(self._texts.find(single)), "")
        is_end = (
            mark
            and single.rstrip().endswith(mark)
            and double.count(mark) in (0, single.count(mark))
        )
        return self.encode_behind("", mark) if is_end else []

    def _frame(self) -> list[str]:
        """Return the markers that the template writes around messages, not those in an answer."""
        texts = SpecialText(self._tokenizer, list(self._marks.values()))
        system = _OTHERS[-1]
        user = self._rendered([_USER], prompt=False) or ""
        prompt = self._rendered([_USER], prompt=True) or ""
        framed = [user, self._rendered([system, _USER], prompt=False) or "", self._closing]
        marks = [name for text in framed for name in texts.find(text)]
        if prompt.startswith(user):
            marks += texts.find(prompt[len(user) :])[:1]  # the start of the reasoning follows
        for message in _OTHERS:
            whole = self._rendered([*_STAND_IN, message], prompt=False) or ""
            marks += self._texts.find(behind_history(self._before, whole) or "")
        return list(dict.fromkeys(name for name in marks if name not in _REASONING_MARKS))

    def _rendered(self, messages: Sequence[ChatMessage], *, prompt: bool) -> str | None:
        """Render messages; None if the template refuses them."""
        try:
            return self.render(messages, prompt=prompt)
        except ModelError:
            return None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages; raises ModelError if the template refuses them.

        Messages and tools have the same form however they were given (`template_messages`), with
        system messages and tool calls as the template shows them. Texts that look like special
        tokens are escaped (`SpecialText`) until they are encoded.
        """
        hidden = self._texts.hide(template_messages(messages))
        return self._render_hidden(hidden, prompt=prompt, tools=self._hide_tools(tools))

    def _hide_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return self._texts.hide_tools(map(template_tool, tools))

    def _render_hidden(
        self,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        if self._has_template and any(message.get("role") == "system" for message in messages):
            named = str(cast("Any", self._tokenizer).name_or_path or "the model")
            messages = self.system_form.fit(messages, named)
        if any(message.get("reasoning_content") for message in messages):
            messages = [self._reasoning_form.fit(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            messages = self._call_form.fit(messages)
        return self._render(messages, prompt=prompt, tools=tools)

    @property
    def system_form(self) -> SystemForm:
        """The system messages that the template shows, found once."""
        if "system" not in self.findings:
            render = partial(self._render, prompt=True, tools=())
            self.findings["system"] = find_system_form(render)
        return self.findings["system"]

    @property
    def _call_form(self) -> CallForm:
        """The form of tool calls, found once."""
        if "calls" not in self.findings:
            render = partial(self._render, prompt=False)
            self.findings["calls"] = find_call_form(lambda some, its: render(some, tools=its))
        return self.findings["calls"]

    @property
    def _reasoning_form(self) -> ReasoningForm:
        """Where the template reads reasoning, found once."""
        if "reasoning" not in self.findings:
            render = partial(self._render, prompt=False, tools=())
            self.findings["reasoning"] = find_reasoning_form(render)
        return self.findings["reasoning"]

    def _render(
        self,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        if not self._has_template:
            raise ModelError(
                "the tokenizer has no chat template",
                hint="write one to chat_template.jinja in the model's folder",
            )
        names = dict(self._template_kwargs)
        if self._asks_time:
            names["strftime_now"] = datetime.fromtimestamp(self._time, UTC).strftime
        try:
            return cast(
                "str",
                self._tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **names,
                ),
            )
        except Exception as error:  # a template may divide by 0, or loop for minutes
            roles = " ".join(str(message.get("role")) for message in messages)[:_SHOWN]
            raise ModelError(
                f"the chat template refuses a conversation with the roles: {roles} ({error})",
                hint="use a template that takes these roles, or a game without them",
            ) from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text without a template; its markers are tokens.

        `special`: with the tokens that the tokenizer adds, such as one that begins a text.
        """
        return self._tokenizer.encode(text, add_special_tokens=special)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers

    def encode_reply(self, text: str) -> list[int]:
        """Return the ids of an answer, or of its start, after a prompt."""
        (hidden,) = self._texts.hide([{"role": "assistant", "content": text}])
        return self.encode_behind(self.render([_USER], prompt=True), hidden["content"])

    def encode_seen(
        self, text: str, images: Sequence[bytes] = (), *, behind: str = ""
    ) -> list[int]:
        """Return the ids of a rendered text, with the tokens of its images.

        `images` are the encoded images of its messages; see `with_room`. The text is encoded after
        the text `behind`.
        """
        seen = with_room(text, images, self._image_reader, self.token_text)
        return self.encode_behind(behind, seen)

    def encode_behind(self, before: str, piece: str) -> list[int]:
        """Return the ids of a piece of a rendered text after the text `before` it.

        Raises ModelError if this tokenizer cannot encode the piece separately.
        """
        if not (before and piece) or self._texts.starts(piece):
            return self._texts.encode(piece)
        nearest = before[self._texts.last(before) :]
        for context in (nearest, *_BETWEEN) if self._depends_on_place else (nearest,):
            apart, both = self._texts.encode(context), self._texts.encode(context + piece)
            if both[: len(apart)] == apart:
                return both[len(apart) :]
        if not self._depends_on_place:
            return self._texts.encode(piece)
        raise ModelError(
            f"the tokenizer cannot encode {self._texts.plain(piece)[:_SHOWN]!r} behind other text",
            hint="it joins the text with any text before it: use another tokenizer",
        )

    def has_image_token(self, token_ids: IntVector) -> bool:
        """Whether some of these tokens are image tokens."""
        reader = self._image_reader
        return reader is not None and bool((token_ids == reader.token_id).any())

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, so that text before it does not change it."""
        return token_id in self._tokenizer.all_special_ids or (
            token_id in self._tokenizer.added_tokens_decoder  # pyright: ignore[reportAttributeAccessIssue]
        )

    def _remember(self, key: str, encode: Callable[[], list[int]]) -> IntVector:
        """Encode a text, from the cache if a group encodes it many times."""
        key = f"{self._time} {key}" if self._asks_time else key
        known = self._known.get(key)
        if known is None:
            known = np.array(encode(), np.int32)
            known.flags.writeable = False
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


def open_chat(model: ModelConfig, *, must_chat: bool = True) -> ChatTokenizer:
    """Load a model's tokenizer, chat template and image reader, if it reads images.

    Raises ModelError for a tokenizer that is missing or does not match the model.
    """
    trust = model.trust_remote_code
    config = model_folder.load_model_config(model.path, trust_remote_code=trust)
    tokenizer = model_folder.load_tokenizer(model.tokenizer or model.path, trust_remote_code=trust)
    model_folder.check_tokenizer(tokenizer, config, model.path)
    reader = None
    if model_folder.sees_images(config):
        from .vision import load_image_reader  # needs torch

        reader = load_image_reader(model.path, trust_remote_code=trust)
    stops, kwargs = model_folder.load_stop_token_ids(model.path), model.template_kwargs
    return ChatTokenizer(tokenizer, kwargs, stops, reader, must_chat=must_chat)


def _until_reply(rendered: str) -> str:
    """Return a rendering up to the end of the sample reply; empty if it is not in it."""
    return rendered[: rendered.rindex(_REPLY) + len(_REPLY)] if _REPLY in rendered else ""


def make_chat(config: JobConfig) -> ChatTokenizer:
    """Load the tokenizer and verify that its chat template only appends."""
    chat = open_chat(config.model)
    chat.check_template(multi_turn=config.rollout.max_turns > 1)
    return chat
