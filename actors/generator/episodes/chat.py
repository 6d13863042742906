"""Chat templating that only ever appends.

The first prompt of an episode is rendered and tokenised once. Every later turn adds only the
tokens between the policy's last token and its next one: the end of the assistant turn, the
observation, the next generation prompt. What the policy generated is never re-tokenised.

The pieces between two turns are cut out of a rendering of a short stand-in conversation, which is
right only for a template that appends. `check_template` proves that at start-up: a template that
rewrites earlier turns would show the policy another history than the one it was trained on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from jinja2 import TemplateError

from ....schemas.config.job import JobConfig, ModelConfig
from ....schemas.wire.errors import DataError, ModelError
from ....schemas.wire.images import encoded_image, image_parts, images_of, replace_images
from ...models.model_folder import (
    check_tokenizer,
    load_model_config,
    load_stop_token_ids,
    load_tokenizer,
    sees_images,
    vocabulary_digest,
)
from ..engine.engine import IntVector
from .image_room import check_seen, with_room

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...models.vision import ImageReader

ChatMessage: TypeAlias = Mapping[str, Any]

_REPLY = "stand-in reply"
_STAND_IN: tuple[ChatMessage, ...] = (
    {"role": "user", "content": "stand-in"},
    {"role": "assistant", "content": _REPLY},
)
_REPLIES = ("a first reply", "<think>\nsome reasoning\n</think>\n\na second reply", "a third reply")
_SHOWN = 60
_REMEMBERED = 1024
"""Encodings that are kept; then all are forgotten."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole conversation as tokens, T in all, with K turns of the assistant."""

    token_ids: IntVector
    """int32[T]."""
    mask: IntVector
    """int32[T]: 1 where the assistant speaks, the end of its turn included."""
    turn_ends: IntVector
    """int32[K]: position of the last token of each of its turns."""


class ChatTokenizer:
    """A tokenizer with its chat template, for the agent loop.

    `template_kwargs` (`enable_thinking`, …) are given to the template at every turn alike. Raises
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

        Without an `image_reader` messages with images are refused; without `must_chat` a tokenizer
        that has no template is refused where one is needed.
        """
        self._tokenizer = tokenizer
        self._has_template = bool(cast(Any, tokenizer).chat_template)
        self._template_kwargs = dict(template_kwargs or {})
        self._image_reader = image_reader
        self._known: dict[str, IntVector] = {}
        self._proven_tools = set[str]()
        chats = must_chat or self._has_template
        head = self._head = self.render(_STAND_IN, prompt=False) if chats else ""
        self._closing = head[head.rindex(_REPLY) + len(_REPLY) :] if _REPLY in head else ""
        closing_ids = self.encode(self._closing)
        eos = cast("int | None", tokenizer.eos_token_id)
        end_of_turn = [closing_ids[0]] if closing_ids and self.is_special(closing_ids[0]) else []
        ids = [*end_of_turn, *([] if eos is None else [eos]), *extra_stop_token_ids]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(int(i) for i in ids))
        """Tokens after which a turn of the policy is over."""
        if not self.stop_token_ids:
            raise ModelError(
                "neither the chat template nor the tokenizer has a token that ends a turn",
                hint="set eos_token in tokenizer_config.json",
            )

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of a conversation, of tools for it, and the generation prompt.

        Images are there as the tokens that they take. Raises ModelError for tools that the
        template leaves out and images that the model does not see, DataError for what is no image.
        """
        images = images_of(messages)
        check_seen(images, self._image_reader)
        self._refuse_unseen(tools, messages)
        return self.encode_seen(self.render(messages, prompt=True, tools=tools), images)

    def first_prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> IntVector:
        """Return int32[T]: the conversation so far, tools for it, and the generation prompt.

        Raises ModelError for tools that the template leaves out, or moves about from turn to turn.
        """
        if tools and (asked := repr(tools)) not in self._proven_tools:
            self._check_tools(messages, tools)
            self._proven_tools.add(asked)
        named = replace_images(messages, lambda part: sha256(encoded_image(part)).hexdigest())
        return self._remember(f"first {tools!r} {named!r}", lambda: self.prompt(messages, tools))

    def next_turn(
        self, generated_ids: Sequence[int] | IntVector, observation: Sequence[ChatMessage]
    ) -> IntVector:
        """Return int32[D]: what follows the policy's tokens up to its next turn.

        That is the rest of the end of its turn (all of it, if generation was cut before the stop
        token), the observation messages, and the generation prompt.
        """
        delta = self._remember(
            f"next {observation!r}", lambda: self.encode(self._closing + self._delta(observation))
        )
        return delta[self.num_said(generated_ids[-1:], delta) :]

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Conversation:
        """Tokenise a conversation that has been had, in the pieces that an episode has.

        What stands between two turns of the assistant is what an episode would be shown there; a
        turn is what the template makes of the message. Raises ModelError where the template does
        more than append, or for images that the model does not see; DataError for a conversation in
        which the assistant says nothing, or an image.
        """
        check_seen(images_of(messages), self._image_reader)
        self._refuse_unseen(tools, messages[:1])
        ids: list[int] = []
        mask: list[int] = []
        ends: list[int] = []
        known, told = "", 0
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            if any(image_parts([message])):
                raise DataError(
                    f"message {place} of a conversation is the assistant's, and holds an image",
                    hint="a model says text: let the images stand in what it is told",
                )
            prompt = self.render(messages[:place], prompt=True, tools=tools)
            whole = self.render(messages[: place + 1], prompt=False, tools=tools)
            self._must_extend(known, prompt, f"message {place}")
            self._must_extend(prompt, whole, f"message {place}")
            between = self.encode_seen(prompt[len(known) :], images_of(messages[told:place]))
            told = place + 1
            between = between[self.num_said(ids[-1:], between) :]
            known = whole.removesuffix(self._closing)
            said = [*self.encode(known[len(prompt) :]), self.stop_token_ids[0]]
            ids += between + said
            mask += [0] * len(between) + [1] * len(said)
            ends.append(len(ids) - 1)
        if not ends:
            raise DataError(
                "a conversation has no message of the assistant",
                hint='its answers are what is learnt: {"role": "assistant", "content": …}',
            )
        return Conversation(*(np.array(column, np.int32) for column in (ids, mask, ends)))

    def num_said(self, said: Sequence[int] | IntVector, rest: Sequence[int] | IntVector) -> int:
        """Count the tokens at the beginning of `rest` that the policy has said: 1 or none."""
        is_same = len(said) and len(rest) and int(said[-1]) == int(rest[0])
        return int(bool(is_same) and int(rest[0]) in self.stop_token_ids)

    def decode(self, token_ids: Sequence[int] | IntVector) -> str:
        """Return the text of generated tokens without special tokens: the policy's action."""
        ids = [int(token) for token in token_ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        return cast("str", text)

    @property
    def parses_responses(self) -> bool:
        """Whether the tokenizer says how answers are parsed into text, reasoning and calls."""
        return getattr(self._tokenizer, "response_template", None) is not None

    def parse_response(
        self,
        prompt_ids: Sequence[int] | IntVector,
        generated_ids: Sequence[int] | IntVector,
        tools: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any] | None:
        """Return an answer as a chat message, parsed as the tokenizer's `response_template` says.

        None where it has none, or the answer does not follow it.
        """
        if not self.parses_responses:
            return None
        parse = cast("Callable[..., Any]", self._tokenizer.parse_response)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        prompt, ids = [int(i) for i in prompt_ids], [int(i) for i in generated_ids]
        try:
            return cast("dict[str, Any]", parse(ids, prefix=prompt, tools=[dict(t) for t in tools]))
        except (ValueError, TypeError, KeyError):
            return None  # what a model writes need not be well formed: then it is text

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer itself, for who compiles grammars over its tokens."""
        return self._tokenizer

    def special_token(self, mark: str) -> int | None:
        """Return the one token that stands for a mark (`<tool_call>`); None: it is plain text."""
        added = cast("dict[int, Any]", self._tokenizer.added_tokens_decoder)  # pyright: ignore[reportAttributeAccessIssue]
        return next((token for token, told in added.items() if str(told) == mark), None)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, special ones included."""
        return cast("str", self._tokenizer.decode([int(token_id)]))  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers

    def vocabulary(self) -> str:
        """Return a digest of all tokens and their ids: equal for equal tokenizers."""
        return vocabulary_digest(self._tokenizer)

    def check_template(self, *, multi_turn: bool = True) -> None:
        """Prove that the template only appends; raise ModelError saying where it does not.

        With `multi_turn`, conversations of several turns are rendered, with reasoning in one
        reply. Single-turn jobs never render a history: there only the generation prompt must be
        appended.
        """
        messages: list[ChatMessage] = [{"role": "user", "content": "a question"}]
        start = self.render(messages, prompt=False)
        self._must_extend(start, self.render(messages, prompt=True), "the generation prompt")
        if not multi_turn:
            return
        if not self._closing:
            raise ModelError(
                "the chat template does not show an assistant's reply as it is, or does not end it",
                hint="use a template that puts each message's content and an end-of-turn token",
            )
        for number, reply in enumerate(_REPLIES, 1):
            now = self.render(messages, prompt=True) + reply + self._closing
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": f"observation {number}"})
            later = self.render(messages, prompt=True)
            self._must_extend(now, later, f"turn {number}")
            appended = self._delta(messages[-1:])
            if later != now + appended:
                raise _rewrites(f"observation {number}", appended, later[len(now) :])

    def _refuse_unseen(
        self, tools: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage]
    ) -> None:
        if not tools:
            return
        with_tools = self.render(messages, prompt=True, tools=tools)
        if with_tools == self.render(messages, prompt=True):
            raise ModelError(
                "the model's chat template has no place for tools: it would not see them",
                hint="leave `tools` out, or use a model whose template takes them",
            )

    def _check_tools(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Prove that what follows a call of a tool is the same whether tools are told or not."""
        told = [*messages, {"role": "assistant", "content": _REPLY}]
        for role in ("tool", "user"):
            observation = {"role": role, "content": "an observation"}
            now = self.render(told, prompt=False, tools=tools)
            told.append(observation)
            later = self.render(told, prompt=True, tools=tools)
            self._must_extend(now, later, f"a message of the {role}")
            if later[len(now) :] != (appended := self._delta([observation])):
                raise _rewrites(f"a message of the {role}", appended, later[len(now) :])
            told.append({"role": "assistant", "content": _REPLY})

    def _must_extend(self, shorter: str, longer: str, what: str) -> None:
        if not longer.startswith(shorter):
            raise _rewrites(what, shorter, longer)

    def _delta(self, observation: Sequence[ChatMessage]) -> str:
        """Return what the template appends for these messages, generation prompt included."""
        whole = self.render([*_STAND_IN, *observation], prompt=True)
        if not whole.startswith(self._head):
            raise _rewrites("an observation", self._head, whole)
        return whole[len(self._head) :]

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return what the template makes of messages; ModelError for those that it refuses."""
        if not self._has_template:
            raise ModelError(
                "the tokenizer has no chat template",
                hint="write one to chat_template.jinja in the model's folder",
            )
        try:
            return cast(
                "str",
                self._tokenizer.apply_chat_template(  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **self._template_kwargs,
                ),
            )
        except (TemplateError, TypeError, KeyError, AttributeError, RecursionError) as error:
            roles = " ".join(str(message.get("role")) for message in messages)[:_SHOWN]
            raise ModelError(
                f"the chat template refuses a conversation with the roles: {roles} ({error})",
                hint="use a template that takes these roles, or a game without them",
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as it stands, without a template."""
        return self._tokenizer.encode(text, add_special_tokens=False)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers

    def encode_seen(self, text: str, images: Sequence[bytes]) -> list[int]:
        """Return the ids of a rendered text, its images there as the tokens that they take.

        `images` are the encoded images of the messages that it was made of; see `with_room`.
        """
        return self.encode(with_room(text, images, self._image_reader, self.token_text))

    def has_image_token(self, token_ids: IntVector) -> bool:
        """Whether some of these tokens would be taken for a part of an image."""
        reader = self._image_reader
        return reader is not None and bool((token_ids == reader.token_id).any())

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text, so that what stands before it does not change it."""
        return token_id in self._tokenizer.all_special_ids or (
            token_id in self._tokenizer.added_tokens_decoder  # pyright: ignore[reportAttributeAccessIssue]
        )

    def _remember(self, key: str, encode: Callable[[], list[int]]) -> IntVector:
        """Encode once what a group asks for many times over."""
        known = self._known.get(key)
        if known is None:
            known = np.array(encode(), np.int32)
            known.flags.writeable = False
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known


def open_chat(model: ModelConfig, *, must_chat: bool = True) -> ChatTokenizer:
    """Load a model's tokenizer, chat template and, where it sees images, what reads those.

    Raises ModelError for a tokenizer that is missing or does not match the model.
    """
    trust = model.trust_remote_code
    config = load_model_config(model.path, trust_remote_code=trust)
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=trust)
    check_tokenizer(tokenizer, config, model.path)
    reader = None
    if sees_images(config):
        from ...models.vision import load_image_reader  # needs torch, which text alone does not

        reader = load_image_reader(model.path, trust_remote_code=trust)
    stops, kwargs = load_stop_token_ids(model.path), model.template_kwargs
    return ChatTokenizer(tokenizer, kwargs, stops, reader, must_chat=must_chat)


def _rewrites(what: str, expected: str, rendered: str) -> ModelError:
    same = next(
        (i for i, (a, b) in enumerate(zip(expected, rendered, strict=False)) if a != b),
        min(len(expected), len(rendered)),
    )
    start = max(0, same - 20)
    return ModelError(
        f"the chat template rewrites the history: with {what} it was\n"
        f"    …{expected[start : same + _SHOWN]!r}\n  and becomes\n"
        f"    …{rendered[start : same + _SHOWN]!r}",
        hint="a policy must see the history that it was trained on: use a template that only "
        "appends (for Qwen3, the chat_template.jinja without the part that removes <think> from "
        "earlier turns, saved in the model's folder), set model.template_kwargs so that it does, "
        "or set rollout.max_turns to 1",
    )


def make_chat(config: JobConfig) -> ChatTokenizer:
    """Load the tokenizer and prove that its chat template only appends."""
    chat = open_chat(config.model)
    chat.check_template(multi_turn=config.rollout.max_turns > 1)
    return chat
