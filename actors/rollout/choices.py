"""Choices of an answer as they grow: from tokens to text, and from text to the parts of a stream.

They answer served chats, completions, and the calls of agent programs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

from ...schemas.generation import Decoding, Delta
from ..engine.engine import Drawn, Generation, OnToken, Sampling, tops_of
from ..policy.chat import ChatTokenizer
from ..policy.token_text import TextStream
from .agent_loop import EpisodeSampling
from .template_facts import Tools, converter

GATHER_S = 0.02
"""Seconds whose tokens are sent together: fewer messages, still faster than people read."""
PART_VALUES = 1 << 17
"""Maximum of log-probs, texts and ids in one message: a few megabytes."""


def sampling_of(
    decoding: Decoding,
    default: EpisodeSampling,
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int | None,
) -> Sampling:
    """Return the sampling of an answer; `default` has the options that the request leaves out."""

    def chosen(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=chosen(decoding.temperature, default.temperature),
        top_p=chosen(decoding.top_p, default.top_p),
        top_k=int(chosen(decoding.top_k, default.top_k)),
        stop_token_ids=stop_token_ids,
        seed=seed,
        presence_penalty=decoding.presence_penalty,
        frequency_penalty=decoding.frequency_penalty,
        repetition_penalty=decoding.repetition_penalty,
        min_p=decoding.min_p,
        min_tokens=decoding.min_tokens,
        logit_bias=tuple((int(token), bias) for token, bias in decoding.logit_bias.items()),
        allowed_token_ids=tuple(decoding.allowed_token_ids),
        num_top=decoding.top_logprobs,
    )


class DrawTokens(Protocol):
    """Draws the tokens of a choice: an engine's `generate` with all arguments but the callback."""

    async def __call__(self, *, on_token: OnToken | None) -> Generation:
        """Generate; see `Engine.generate`."""
        ...


class GrowingChoice:
    """One choice of an answer, token by token."""

    def __init__(
        self,
        number: int,
        chat: ChatTokenizer,
        stops: Sequence[str] = (),
        tools: Tools = (),
        *,
        num_top: int = 0,
        by_token: bool = True,
        tells_tokens: bool = False,
        tells_policy: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        min_tokens: int = 0,
        unsaid: Sequence[int] = (),
        thinking: bool | None = None,
    ) -> None:
        """Begin choice `number`, which the first of `stops` behind `min_tokens` tokens ends.

        A token of `unsaid` ends it, too, and has no text.
        Each token is decoded only with `by_token` or stop texts, since decoding the whole at once
        is cheaper. `thinking` says whether the prompt of a chat has opened the reasoning. A chat's
        answer is converted to the form of replies, and text that may be a call of `tools` is held
        back. With `tells_tokens` its deltas have each token's text and log-prob, and the `num_top`
        likeliest, with `tells_policy` its log-prob and policy version. `decode` replaces that of
        `chat`.
        """
        self.number = number
        self.drawn: list[Drawn] = []
        """Its tokens, up to the one that completes a stop text."""
        self.text = ""
        """The part of its text that cannot change any more."""
        self.own_text: str | None = None
        """The text of the ended choice, if it differs from that of its tokens."""
        self.finish: str | None = None
        """Why it ended; None: not yet."""
        self.tells_tokens = tells_tokens
        self._tells_policy = tells_policy
        self._num_top = num_top
        self._chat = chat
        is_chat = thinking is not None
        self._converter = converter(chat, tools, thinking=bool(thinking)) if is_chat else None
        self._plain = ""
        self._by_token = by_token or bool(stops)
        self._unsaid = frozenset(unsaid)
        self._decode = decode or chat.decode
        self._stream = TextStream(self._said, stops, min_tokens)

    def _said(self, ids: Sequence[int]) -> str:
        if not self._unsaid:
            return self._decode(ids)
        return self._decode([token for token in ids if token not in self._unsaid])

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self._stream.stopped

    async def generate(
        self, draw: DrawTokens, cancel: Callable[[], None], on_change: Callable[[], None]
    ) -> Generation:
        """Draw its tokens; `cancel` is called at a stop text, `on_change` after each token."""

        def add(drawn: Drawn) -> None:
            self.add(drawn)
            on_change()
            if self.stopped:
                cancel()

        generation = await draw(on_token=add if self._by_token else None)
        if not self._by_token:
            columns = (generation.token_ids, generation.logprobs, generation.versions)
            rows = zip(*(c.tolist() for c in columns), tops_of(generation), strict=True)
            self.drawn += [Drawn(*row) for row in rows]
        return generation

    def add(self, drawn: Drawn) -> None:
        """Add the next token; tokens after a stop text are ignored."""
        if self.stopped:
            return
        self.drawn.append(drawn)
        if self._by_token:
            self._add_text(self._stream.push(drawn.token_id))

    def end(self, reason: str) -> None:
        """End it for the engine's `reason`."""
        ids = [drawn.token_id for drawn in self.drawn]
        self._add_text(self._stream.finish() if self._by_token else self._said(ids), last=True)
        is_own = self.stopped or self._converter is not None
        self.own_text = self.text if is_own else None
        self.finish = "stop" if self.stopped else reason

    def _add_text(self, text: str, *, last: bool = False) -> None:
        self._plain += text
        if self._converter is not None:
            text = self._converter.push(text, last=last)
        self.text += text

    def restore(self, generation: Generation, text: str | None) -> None:
        """Restore an earlier answer; `text` if it differs from that of its tokens."""
        columns = (generation.token_ids, generation.logprobs, generation.versions)
        self.drawn = [Drawn(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        self.text = self._decode(generation.token_ids.tolist()) if text is None else text
        self.own_text, self.finish = text, generation.finish_reason

    def num_whole_tokens(self) -> int:
        """Return the number of tokens before the first that reaches into a stop text."""
        num_tokens = len(self.drawn)
        ids = [drawn.token_id for drawn in self.drawn]
        while self.stopped and num_tokens:
            if len(self._decode(ids[:num_tokens])) <= len(self._plain):
                break
            num_tokens -= 1
        return num_tokens

    def delta(self, num_tokens: int, num_chars: int, *, ends: bool) -> Delta | None:
        """Return the delta after so many tokens and characters; None if it is empty.

        With `ends` the delta of an ended choice has the reason of its end.
        """
        fresh, text = self.drawn[num_tokens:], self.text[num_chars:]
        finish = self.finish if ends else None
        if not (fresh or text or finish):
            return None
        fields: dict[str, object] = {}
        if self.tells_tokens or self._tells_policy:
            fields["logprobs"] = [drawn.logprob for drawn in fresh]
        if self._tells_policy:
            fields["versions"] = [drawn.version for drawn in fresh]
        if self.tells_tokens:
            pieces = list(self._texts_of(fresh, is_first=not num_tokens))
            fields["tokens"] = [piece for piece, _ in pieces]
            fields["token_bytes"] = [encoded for _, encoded in pieces]
            if self._num_top:
                tops = [drawn.top for drawn in fresh]
                chat = self._chat
                fields["top_tokens"] = [[chat.token_text(t) for t, _ in top] for top in tops]
                fields["top_bytes"] = [[chat.token_bytes(t) for t, _ in top] for top in tops]
                fields["top_logprobs"] = [[logprob for _, logprob in top] for top in tops]
        return Delta.model_validate(
            {
                "choice": self.number,
                "text": text,
                "token_ids": [drawn.token_id for drawn in fresh],
                "finish": finish,
                "stop": self._stop() if finish else "",
                **fields,
            }
        )

    def _stop(self) -> str | int:
        """Return the stop text, or the token of the request, that ended it; empty: another."""
        last = self.drawn[-1].token_id if self.drawn else -1
        is_own = self.finish == "stop" and last in self._unsaid
        return last if is_own and not self.stopped else self._stream.stop

    def _texts_of(self, fresh: Sequence[Drawn], *, is_first: bool) -> Iterator[tuple[str, bytes]]:
        """Yield the text and the bytes of each token by itself."""
        for number, drawn in enumerate(fresh):
            encoded = self._chat.token_bytes(drawn.token_id, first=is_first and not number)
            text = encoded.decode(errors="replace") or self._chat.token_text(drawn.token_id)
            yield text, encoded


class DeltaWriter:
    """Writes the deltas of an answer for one reader, and records what was sent."""

    def __init__(self, choices: Sequence[GrowingChoice], begun: Sequence[Delta] = ()) -> None:
        """Begin after `begun`, the deltas that the reader has already."""
        self._choices = choices
        self._sent = [(0, 0)] * len(choices)
        self._ended: set[int] = set()
        for delta in begun:
            if delta.choice < len(choices):
                self._note(delta.choice, delta)

    def deltas(self, *, ends: bool) -> list[Delta]:
        """Return the new deltas; with `ends`, also those that end choices."""
        deltas: list[Delta] = []
        for number, choice in enumerate(self._choices):
            if number in self._ended:
                continue
            delta = choice.delta(*self._sent[number], ends=ends)
            if delta is not None:
                self._note(number, delta)
                deltas.append(delta)
        return deltas

    async def stream(
        self,
        changed: asyncio.Event,
        is_over: Callable[[], bool],
        send: Callable[[list[Delta]], Awaitable[None]],
        *,
        ends: bool,
    ) -> None:
        """Send new deltas after each change until `is_over`; the last part has the rest."""
        while not is_over():
            await changed.wait()
            changed.clear()
            if not is_over() and (deltas := self.deltas(ends=ends)):
                await send(deltas)
                await asyncio.sleep(GATHER_S)

    async def last_messages(self) -> list[list[Delta]]:
        """Return the remaining deltas, divided into messages; the last one may be empty."""
        if any(choice.tells_tokens for choice in self._choices):
            # in a thread, since log-probs of long answers take seconds and would block the loop
            return in_messages(await asyncio.to_thread(self.deltas, ends=True))
        return in_messages(self.deltas(ends=True))

    def _note(self, number: int, delta: Delta) -> None:
        num_tokens, num_chars = self._sent[number]
        self._sent[number] = num_tokens + len(delta.token_ids), num_chars + len(delta.text)
        if delta.finish is not None:
            self._ended.add(number)


def in_messages(deltas: Sequence[Delta]) -> list[list[Delta]]:
    """Divide deltas into messages; many choices, or log-probs of many tokens, fill several.

    There is always at least one message, which may be empty.
    """
    messages: list[list[Delta]] = [[]]
    room = PART_VALUES
    for delta in deltas:
        width = 1 + 3 * len(delta.tokens[:1]) + 3 * max(map(len, delta.top_logprobs), default=0)
        for piece in cut(delta, max(1, PART_VALUES // width)):
            num = max(len(piece.token_ids), len(piece.tokens))
            num_values = len(piece.text) + width * num
            if messages[-1] and num_values > room:
                messages.append([])
                room = PART_VALUES
            messages[-1].append(piece)
            room -= num_values
    return messages


def cut(delta: Delta, num_tokens: int) -> Iterator[Delta]:
    """Yield a delta in pieces of so many tokens; the first has the text, the last the end."""
    num = max(len(delta.token_ids), len(delta.tokens))
    starts = range(0, num, num_tokens) or range(1)
    for start in starts:
        text = {} if start == 0 else {"text": ""}
        end = {} if start == starts[-1] else {"finish": None, "stop": ""}
        yield delta.of_tokens(start, start + num_tokens, **text, **end)
