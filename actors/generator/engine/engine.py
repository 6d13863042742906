"""The interface of a generation engine: token ids in, token ids with log-probs and versions out.

The agent loop knows this module only, so that another engine can take the place of the
transformers one. Nothing here imports torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....schemas.wire.errors import EngineError
from ...models.weight_tensors import TensorSource

if TYPE_CHECKING:
    from .token_grammar import TokenGrammar

FinishReason = Literal["stop", "length", "cancelled"]
KvOnSwap = Literal["keep", "recompute"]
IntVector: TypeAlias = NDArray[np.int32]
FloatVector: TypeAlias = NDArray[np.float32]
ExpertRecord: TypeAlias = NDArray[np.uint8]
"""uint8[tokens, layers, chosen]: the experts that read each token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is sampled; each request of a batch may have its own."""

    max_new_tokens: int
    """Tokens generated at most, the stop token included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the stop token is part of the result."""
    seed: int | None = None
    """The same seed draws the same tokens, whatever else runs in the batch; None: a fresh one."""
    num_drawn: int = 0
    """Tokens at the end of the prompt that were drawn with this seed before: it goes on behind
    them."""
    grammar: "TokenGrammar | None" = None
    """What all tokens that were and are drawn must be; it has its own end, a stop token."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that has been drawn."""
    frequency_penalty: float = 0.0
    """Taken from the logit of each token as often as it has been drawn."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt or drawn, and multiplies negative ones."""
    num_top: int = 0
    """Tell so many of the likeliest tokens in the place of each."""

    @property
    def is_constrained(self) -> bool:
        """Whether tokens are drawn from other logits than those that are recorded."""
        penalties = self.presence_penalty or self.frequency_penalty
        return self.grammar is not None or bool(penalties) or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request generated, N tokens."""

    token_ids: IntVector
    """int32[N]: generated tokens, the stop token included."""
    logprobs: FloatVector
    """float32[N]: log-prob of each token under softmax(logits / temperature), before penalties, a
    grammar, top-p and top-k, which is what a learner computes at the same temperature. Greedy
    requests record it at temperature 1."""
    versions: IntVector
    """int32[N]: policy version that produced each token."""
    finish_reason: FinishReason
    """A stop token, the token limit, or `cancel`."""
    experts: ExpertRecord | None = None
    """Of an engine that records them, the experts of all tokens that it computed for this request:
    those up to the one before the last, of the prompt, too, but for what it had in its cache."""
    masked: FloatVector | None = None
    """float32[N]: which share of the probability a grammar took out of the choice of each token;
    None: there was no grammar."""
    top_ids: NDArray[np.int32] | None = None
    """int32[N, K]: the likeliest tokens in the place of each, best first; None: not asked for."""
    top_logprobs: FloatVector | None = None
    """float32[N, K]: their log-probs, as in `logprobs`."""


def nothing() -> Generation:
    """Return what a request has that was cancelled before its first token."""
    return Generation(
        np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "cancelled"
    )


def tops_of(generation: Generation) -> list[tuple[tuple[int, float], ...]]:
    """Return the likeliest tokens in the place of each, as `Drawn` has them."""
    ids, logprobs = generation.top_ids, generation.top_logprobs
    if ids is None or logprobs is None:
        return [()] * len(generation.token_ids)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token, as soon as it was drawn."""

    token_id: int
    logprob: float
    """As in `Generation`."""
    version: int
    """Policy version that produced it."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place and their log-probs, best first, where asked for."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a model thinks of the N tokens of a prompt, each behind those before it."""

    logprobs: FloatVector
    """float32[N]: log-prob of each token at temperature 1; NaN for the first."""
    top_ids: NDArray[np.int32]
    """int32[N, K]: the likeliest tokens at each place, best first; 0 at the first place."""
    top_logprobs: FloatVector
    """float32[N, K]: their log-probs; NaN at the first place."""


OnToken: TypeAlias = Callable[[Drawn], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is doing; counters since its start, rates over about the last 10 s."""

    version: int
    """Policy version that decodes now."""
    running: int
    """Requests that decode."""
    waiting: int
    """Requests that wait for a free row."""
    cached_prefixes: int
    """Conversations whose cache is kept for their next turn."""
    tokens_per_s: float
    """Generated tokens per second."""
    busy_share: float
    """Share of the time spent computing, 0 to 1."""
    generated_tokens: int
    """Tokens generated."""
    prefilled_tokens: int
    """Prompt tokens computed."""
    reused_tokens: int
    """Prompt tokens not computed: shared within a group, or kept from an earlier turn."""
    busy_s: float
    """Seconds spent computing."""
    last_pause_s: float
    """How long decoding stood still at the last weight swap."""
    paused_s: float
    """How long it stood still at all swaps so far."""
    cache_bytes: int
    """Memory of the KV cache, that of cached prefixes included."""


class Engine(Protocol):
    """A generation engine that serves many requests at once on one event loop."""

    @property
    def version(self) -> int:
        """Policy version that decodes now."""
        ...

    @property
    def failure(self) -> EngineError | None:
        """Why no request will be answered any more; its actor should end and be started again."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate from a prompt.

        `images` are the encoded images of the conversation, alike at each of its turns; the prompt
        holds as many image tokens as they take. Raises DataError for images that cannot be read or
        do not fit the prompt, ModelError where the model sees none.

        `on_token` is called on the event loop with each token before this returns.

        With `conversation`, the cache of this request is kept for the next turn: a later request
        of the same conversation whose prompt continues this one computes only what is new. Call
        `release` when the conversation is over. Raises ConfigError for a prompt that cannot fit,
        EngineError when the engine failed or its queue is full. A task that is cancelled while it
        waits cancels the request.
        """
        ...

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Return the log-prob of each token of a prompt, and the `top_k` likeliest in its place.

        Requests that generate go on meanwhile. Raises ConfigError for a prompt that cannot be
        scored, EngineError when the engine failed or its queue is full.
        """
        ...

    async def load_weights(
        self, version: int, tensors: Mapping[str, TensorSource], kv: KvOnSwap = "keep"
    ) -> None:
        """Make `tensors` (the names of `state_dict()`, or those of a PEFT folder for an engine
        with an adapter) the weights, between two decode steps.

        Running requests go on: with the keys and values they have (`keep`), or with them computed
        anew (`recompute`). Raises EngineError listing names that are missing, unknown or of the
        wrong shape; the weights then stay as they were.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its `generate` returns what it has, with `cancelled`."""
        ...

    def release(self, conversation: str) -> None:
        """Forget the kept cache of a conversation."""
        ...

    def stats(self) -> EngineStats:
        """Say what the engine is doing."""
        ...

    async def close(self) -> None:
        """End the engine; requests that still run fail with EngineError."""
        ...


class AdapterEngine(Engine, Protocol):
    """An engine whose requests have adapters (LoRA) of their own, and decode together all the same.

    Adapters come and go while it works; the model beside which they lie is in memory once.
    """

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
        adapter: str = "",
    ) -> Generation:
        """Generate as `Engine.generate` does, with an adapter; "": with the model alone.

        Raises NotFoundError for an adapter that is not there.
        """
        ...

    async def score(
        self,
        prompt_ids: Sequence[int] | IntVector,
        *,
        request_id: str,
        top_k: int = 0,
        adapter: str = "",
    ) -> PromptScores:
        """Score as `Engine.score` does, with an adapter; raises NotFoundError, too."""
        ...

    async def add_adapter(self, name: str, folder: Path, version: int = 0) -> None:
        """Let requests have the adapter of a PEFT folder; no request waits for it.

        If there is one of the name, its requests go on with the weights of this one, and the keys
        and values that they have. Raises ModelError for an adapter that does not fit the model.
        """
        ...

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it go on to their end."""
        ...
