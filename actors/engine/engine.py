"""The interface of a generation engine: token ids in, token ids with log-probs and versions out.

The agent loop uses only this module, so engines can be exchanged. Code shared by all engines is
here, too: checks of requests, statistics, the limit of concurrent requests, and the reading of
images. Nothing here imports torch.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...schemas.output_format import MAX_BIAS, MAX_PENALTY, MAX_REPETITION, MAX_TOP_LOGPROBS
from ...schemas.wire.array import FloatVector, IntVector
from ...schemas.wire.bounds import MAX_TOP_K
from ...schemas.wire.errors import ConfigError, EngineError, ModelError, NotFoundError
from ..policy.vision import ImageReader
from ..runtime import JobContext
from ..weights.follower import KvOnSwap
from ..weights.tensors import TensorSource

if TYPE_CHECKING:
    from ..policy.grammar import TokenGrammar


FinishReason = Literal["stop", "length", "cancelled"]
ExpertRecord: TypeAlias = NDArray[np.uint8]
"""uint8[tokens, layers, chosen]: the experts that processed each token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a request; each request of a batch may have its own."""

    max_new_tokens: int
    """Maximum number of tokens to generate, including the stop token."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after one of these; the stop token is part of the result."""
    seed: int | None = None
    """The same seed draws the same tokens, independently of the batch; None: a new seed."""
    num_drawn: int = 0
    """Tokens at the end of the prompt that were drawn with this seed before: drawing continues
    after them."""
    grammar: "TokenGrammar | None" = None
    """Grammar of the whole answer, including tokens drawn before; it ends with a stop token."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each drawn token."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each drawn token, times the number of its draws."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt or drawn, and multiplies negative ones."""
    min_p: float = 0.0
    """Keep the tokens with at least this share of the likeliest one's probability."""
    min_tokens: int = 0
    """No stop token is drawn before so many tokens, those drawn before included."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens whose last one is not drawn after the others."""
    num_top: int = 0
    """Number of likeliest tokens to report at each token's position."""
    stream_every: int = 1
    """`on_token` may be called for this many tokens at once, and for fewer at the end."""

    @property
    def is_constrained(self) -> bool:
        """Whether tokens are drawn from other logits than the recorded ones."""
        return (
            self.grammar is not None
            or self.repetition_penalty != 1
            or bool(self.presence_penalty or self.frequency_penalty or self.min_p)
            or bool(self.min_tokens or self.logit_bias or self.bad_words or self.allowed_token_ids)
        )

    def named_tokens(self) -> Iterator[int]:
        """Yield the tokens that its bias, allowed tokens and bad words name."""
        yield from (token for token, _ in self.logit_bias)
        yield from self.allowed_token_ids
        yield from (token for word in self.bad_words for token in word)


@dataclass(frozen=True, slots=True)
class Generation:
    """The N generated tokens of a request."""

    token_ids: IntVector
    """int32[N]: generated tokens, including the stop token."""
    logprobs: FloatVector
    """float32[N]: log-prob of each token under softmax(logits / temperature), before penalties, a
    grammar, top-p and top-k, as a learner computes it at the same temperature. Greedy requests
    record it at temperature 1."""
    versions: IntVector
    """int32[N]: policy version that produced each token."""
    finish_reason: FinishReason
    """A stop token, the token limit, or `cancel`."""
    experts: ExpertRecord | None = None
    """If the engine records experts, those of all tokens that it computed for this request: prompt
    and answer without the last token and without cached tokens."""
    masked: FloatVector | None = None
    """float32[N]: share of the probability that a grammar excluded at each token; None: no
    grammar."""
    top_ids: NDArray[np.int32] | None = None
    """int32[N, K]: the likeliest tokens at each position, in order; None: not requested."""
    top_logprobs: FloatVector | None = None
    """float32[N, K]: their log-probs, as in `logprobs`."""
    first_token: float = 0.0
    """Time of the first token, in seconds since the epoch; 0: unknown."""


def nothing() -> Generation:
    """Return the result of a request cancelled before its first token."""
    return Generation(
        np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), "cancelled"
    )


def tops_of(generation: Generation) -> list[tuple[tuple[int, float], ...]]:
    """Return the likeliest tokens at each position, in the format of `Drawn`."""
    ids, logprobs = generation.top_ids, generation.top_logprobs
    if ids is None or logprobs is None:
        return [()] * len(generation.token_ids)
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [tuple(zip(*pair, strict=True)) for pair in pairs]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that was just drawn."""

    token_id: int
    logprob: float
    """As in `Generation`."""
    version: int
    """Policy version that produced it."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its position and their log-probs, in order, if requested."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A model's log-probs of the N tokens of a prompt."""

    logprobs: FloatVector
    """float32[N]: log-prob of each token at temperature 1; NaN for the first."""
    top_ids: NDArray[np.int32]
    """int32[N, K]: the likeliest tokens at each position, in order; 0 at the first position."""
    top_logprobs: FloatVector
    """float32[N, K]: their log-probs; NaN at the first position."""

    @classmethod
    def unknown(cls, num: int, top_k: int) -> "PromptScores":
        """Return empty scores of `num` tokens."""
        nan = np.float32(np.nan)
        return cls(np.full(num, nan), np.zeros((num, top_k), np.int32), np.full((num, top_k), nan))


OnToken: TypeAlias = Callable[[Drawn], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of an engine: counters since its start, and rates over about the last 10 s."""

    version: int
    """Policy version used for decoding now."""
    running: int
    """Number of decoding requests."""
    waiting: int
    """Number of requests waiting for a free row."""
    cached_prefixes: int
    """Number of conversations whose cache is kept for their next turn."""
    tokens_per_s: float
    """Generated tokens per second."""
    busy_share: float
    """Share of the time spent computing, 0 to 1."""
    generated_tokens: int
    """Number of generated tokens."""
    prefilled_tokens: int
    """Number of computed prompt tokens."""
    reused_tokens: int
    """Number of prompt tokens taken from a cache: shared within a group, or kept from an earlier
    turn."""
    busy_s: float
    """Seconds spent computing."""
    last_pause_s: float
    """Seconds that decoding paused at the last weight swap."""
    paused_s: float
    """Seconds of all pauses so far, at swaps and asleep."""
    cache_bytes: int
    """Memory of the KV cache, including cached prefixes."""
    weight_bytes: int = 0
    """Memory of the weights in this process, including the set that is filled next; 0 if other
    processes hold them."""
    cache_tokens: int = 0
    """Tokens that the KV cache holds; 0: it grows as needed."""
    cache_share: float = 0.0
    """Share of the KV cache that running requests use, 0 to 1; 0 if it grows as needed."""
    evicted: int = 0
    """Number of times that a running request, or a conversation between two turns, lost its keys
    and values for lack of room."""


class Engine(Protocol):
    """A generation engine that serves many requests at once on one event loop."""

    @property
    def version(self) -> int:
        """Policy version used for decoding now."""
        ...

    @property
    def failure(self) -> EngineError | None:
        """Why requests are no longer answered: its actor should end and be restarted."""
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

        `images` are the encoded images of the conversation, the same at each of its turns; the
        prompt has their image tokens. Raises DataError for images that cannot be read or do not fit
        the prompt, ModelError for a model without image input.

        `on_token` is called on the event loop with each token before this method returns.

        With `conversation`, the cache of this request is kept for the next turn: a later request of
        the same conversation whose prompt continues this one computes only the new tokens. Call
        `release` at the end of the conversation. Raises ConfigError for a prompt that cannot fit,
        EngineError if the engine failed or its queue is full. Cancelling the waiting task cancels
        the request.
        """
        ...

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Return the log-probs of a prompt's tokens, and the `top_k` likeliest at each position.

        Generation continues meanwhile. Raises ConfigError for a prompt that cannot be scored,
        EngineError if the engine failed or its queue is full.
        """
        ...

    async def load_weights(
        self, version: int, tensors: Mapping[str, TensorSource], kv: KvOnSwap = "keep"
    ) -> None:
        """Make `tensors` (the names of `state_dict()`, or those of a PEFT folder for an engine
        with an adapter) the weights, between two decode steps.

        Running requests continue with their keys and values (`keep`), or with recomputed ones
        (`recompute`). Raises EngineError listing names that are missing, unknown or of the
        wrong shape; the weights then stay as they were.
        """
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the memory of the weights and of keys and values, between two decode steps.

        Running requests pause and new ones wait: after `wake` they continue, with recomputed keys
        and values. The weights are kept in host memory; without `keep_weights`, weights that
        `load_weights` replaces may be dropped (see `has_weights`). All other methods may be called
        meanwhile; `load_weights` returns once its weights will be used from the first step after
        `wake`. Does nothing if already asleep. Raises EngineError if the engine failed.
        """
        ...

    @property
    def has_weights(self) -> bool:
        """Whether it can wake: False after it dropped its weights, until others are loaded."""
        ...

    async def wake(self) -> None:
        """Allocate the memory again and continue; does nothing if awake.

        Raises EngineError if it has no weights.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request: its `generate` returns the tokens so far, with `cancelled`."""
        ...

    def release(self, conversation: str) -> None:
        """Drop the kept cache of a conversation."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        ...

    async def close(self) -> None:
        """End the engine; running requests fail with EngineError."""
        ...


class AdapterEngine(Engine, Protocol):
    """An engine whose requests may use different adapters (LoRA) in one batch.

    Adapters are added and dropped while it runs; their base model is in memory once.
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
        """Generate like `Engine.generate` with an adapter; "": with the model alone.

        Raises NotFoundError for an unknown adapter.
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
        """Score like `Engine.score` with an adapter; also raises NotFoundError."""
        ...

    async def add_adapter(self, name: str, folder: Path, version: int = 0) -> None:
        """Load the adapter of a PEFT folder; no request waits for it.

        If the name is in use, its requests continue with the new weights, and keep their keys and
        values. Raises ModelError for an adapter that does not fit the model.
        """
        ...

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter; requests with it continue to their end."""
        ...


# -- statistics ------------------------------------------------------------------------------------

_RATE_WINDOW_S = 10.0


class Meter:
    """Counters that one thread changes and any thread reads."""

    def __init__(self) -> None:
        self.generated = 0
        self.prefilled = 0
        self.reused = 0
        self.evicted = 0
        self.cache_tokens = 0
        self.cache_share = 0.0
        self.busy_s = 0.0
        self.last_pause_s = 0.0
        self.paused_s = 0.0
        self._marks = deque([(time.monotonic(), 0, 0.0)], maxlen=11)

    def paused(self, pause_s: float) -> None:
        """Count a pause of decoding for new weights."""
        self.last_pause_s = pause_s
        self.paused_s += pause_s

    def slept(self, seconds: float) -> None:
        """Count a time asleep."""
        self.paused_s += seconds

    def mark(self) -> None:
        """Record the counters periodically; call it after each step."""
        now = time.monotonic()
        if now - self._marks[-1][0] > _RATE_WINDOW_S / 10:
            self._marks.append((now, self.generated, self.busy_s))

    def stats(
        self,
        *,
        version: int,
        running: int,
        waiting: int,
        cached_prefixes: int,
        cache_bytes: int,
        weight_bytes: int = 0,
    ) -> EngineStats:
        """Return an engine's statistics: the counters, and values that the engine passes."""
        tokens_per_s, busy_share = self.rates()
        return EngineStats(
            version=version,
            running=running,
            waiting=waiting,
            cached_prefixes=cached_prefixes,
            tokens_per_s=tokens_per_s,
            busy_share=busy_share,
            generated_tokens=self.generated,
            prefilled_tokens=self.prefilled,
            reused_tokens=self.reused,
            busy_s=self.busy_s,
            last_pause_s=self.last_pause_s,
            paused_s=self.paused_s,
            cache_bytes=cache_bytes,
            weight_bytes=weight_bytes,
            cache_tokens=self.cache_tokens,
            cache_share=self.cache_share,
            evicted=self.evicted,
        )

    def rates(self) -> tuple[float, float]:
        """Return tokens per second and the busy share, over about the last 10 s."""
        now = time.monotonic()
        recent = [mark for mark in tuple(self._marks) if now - mark[0] <= _RATE_WINDOW_S]
        then, generated, busy_s = recent[0] if recent else (0.0, self.generated, self.busy_s)
        elapsed = max(now - then, 1e-6)
        share = min(1.0, (self.busy_s - busy_s) / elapsed)
        return (self.generated - generated) / elapsed, share


# -- checks of requests ----------------------------------------------------------------------------

_END = 1 << 31
"""Token ids are int32."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ConfigError for parameters that sampling does not support."""
    if (
        sampling.max_new_tokens >= 1
        and 0 <= sampling.temperature < np.inf
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.top_k < _END
        and all(-_END <= token < _END for token in sampling.stop_token_ids)
        and abs(sampling.presence_penalty) <= MAX_PENALTY
        and abs(sampling.frequency_penalty) <= MAX_PENALTY
        and 0 < sampling.repetition_penalty <= MAX_REPETITION
        and 0 <= sampling.num_top <= MAX_TOP_LOGPROBS
        and 0 <= sampling.min_p <= 1
        and all(abs(bias) <= MAX_BIAS for _, bias in sampling.logit_bias)
        and sampling.num_drawn >= 0
    ):
        return
    raise ConfigError(
        f"{sampling} cannot be sampled",
        hint="max_new_tokens is at least 1, temperature and top_k are 0 or more, top_p is over 0 "
        f"and at most 1, min_p 0 to 1, biases are at most {MAX_BIAS:g} and penalties at most "
        f"{MAX_PENALTY:g} either side of 0, that of "
        f"repetition is over 0 and at most {MAX_REPETITION:g}, top_k and stop tokens are below "
        f"{_END}",
    )


def check_prompt(
    prompt: IntVector, sampling: Sampling, *, max_context: int, vocab_size: int
) -> None:
    """Raise ConfigError for a prompt without room, or with tokens outside the vocabulary."""
    if prompt.ndim != 1 or not len(prompt):
        raise ConfigError("a prompt has no tokens", hint="give at least one token")
    _check_tokens(prompt, vocab_size)
    wrong = next((token for token in sampling.named_tokens() if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(
            f"logit_bias, allowed_token_ids or bad_words name token {wrong}, and the model has "
            f"{vocab_size} tokens",
            hint="name tokens of the model's own tokenizer",
        )
    if len(prompt) + sampling.max_new_tokens > max_context:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and up to {sampling.max_new_tokens} new ones "
            f"exceed the engine's {max_context} tokens",
            hint="raise rollout.max_prompt_tokens or rollout.max_response_tokens, or shorten "
            "the prompt",
        )


def check_scored(prompt: IntVector, top_k: int, *, max_context: int, vocab_size: int) -> None:
    """Raise ConfigError for a prompt that cannot be scored."""
    if prompt.ndim != 1 or not 1 <= len(prompt) <= max_context:
        raise ConfigError(
            f"a prompt of {prompt.size} tokens cannot be scored",
            hint=f"give one to {max_context} tokens",
        )
    if not 0 <= top_k <= min(MAX_TOP_K, vocab_size):
        raise ConfigError(
            f"the {top_k} likeliest tokens cannot be told",
            hint=f"ask for {min(MAX_TOP_K, vocab_size)} at most",
        )
    _check_tokens(prompt, vocab_size)


def no_adapter(name: str) -> NotFoundError:
    """Return the error of a request for an unknown adapter."""
    return NotFoundError(f"the engine has no adapter {name}", hint="add it first")


def _check_tokens(prompt: IntVector, vocab_size: int) -> None:
    if prompt.view(np.uint32).max() >= vocab_size:  # a negative id is large as uint32
        wrong = prompt[prompt.view(np.uint32) >= vocab_size][0]
        raise ConfigError(
            f"token {wrong} of a prompt is outside the model's vocabulary of {vocab_size}",
            hint="tokenizer and model must belong together",
        )


def check_queue(request_id: str, pending: int, max_pending: int, *, running: bool) -> None:
    """Raise EngineError for an id in use, or a full queue."""
    if running:
        raise EngineError(
            f"request {request_id} is running already", hint="give each request its own id"
        )
    if pending >= max_pending:
        raise EngineError(
            f"the engine's queue is full: {pending} requests run or wait",
            hint="lower generator.max_episodes, or raise max_waiting",
        )


def not_finite(version: int) -> EngineError:
    """Return the error of a request whose model computed NaN or infinity."""
    return EngineError(
        f"the model of version {version} computes logits that are not finite",
        hint="training has diverged: lower learner.lr, or resume from an earlier checkpoint",
    )


def left_grammar(why: str) -> ConfigError:
    """Return the error of a request that excludes all next tokens, or has too complex a form."""
    return ConfigError(
        f"the output format cannot be followed further: {why}",
        hint="give a simpler schema: shorter alternatives, patterns and bounds; or exclude fewer "
        "tokens (allowed_token_ids, bad_words, min_tokens)",
    )


def no_weights() -> EngineError:
    """Return the error of an engine that cannot wake without weights."""
    return EngineError(
        "the engine gave up its weights when it fell asleep, and no others were loaded",
        hint="load a version before it wakes",
    )


def again(error: EngineError) -> EngineError:
    """Return a copy of an error for one waiter: a shared error would collect all tracebacks."""
    copy = EngineError(error.message, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy


def bytes_of_engines(engines: Iterable[Engine]) -> dict[str, int]:
    """Return the bytes that engines hold in this process, by kind."""
    every = [engine.stats() for engine in engines]
    return {
        "weights": sum(stats.weight_bytes for stats in every),
        "KV cache": sum(stats.cache_bytes for stats in every),
    }


def report_engine(context: JobContext, stats: EngineStats, **more: float) -> None:
    """Add the engine's statistics, and other values, to the heartbeat."""
    context.presence = context.presence.model_copy(update={"version": stats.version})
    context.numbers.update(
        tokens_per_s=stats.tokens_per_s,
        busy_share=stats.busy_share,
        running=stats.running,
        waiting=stats.waiting,
        last_pause_s=stats.last_pause_s,
        **more,
    )


# -- concurrent requests of an engine with a paged cache -------------------------------------------
# A paged cache can hold more requests than would fit if all of them grew to the longest; the number
# is known only while they run. So the limit starts at the number that always fits, rises while
# requests wait and the cache has room, and is cut at a preemption, when the engine evicts a request
# from the cache and must compute it again: too high a limit costs more than too low a one.

ROOM = 0.8
"""Share of the used cache up to which there is room for more requests."""
_RISE = 1 / 8
"""Share by which the limit rises in a step."""
_CUT = 0.75
"""The limit after a preemption, as a share of the running requests."""


class Concurrency:
    """The limit of concurrent requests, updated at every step of the engine."""

    def __init__(self, fits: int, most: int) -> None:
        """`fits` requests fit into the cache at any length; `most` is never exceeded."""
        self._least = max(1, min(fits, most))
        self._most = most
        self.limit = self._least

    def step(self, running: int, *, is_demanded: bool, cache_share: float, preempted: int) -> None:
        """Adapt to a step's number of running requests and used share of the cache.

        `is_demanded`: requests wait for the limit to rise.
        """
        if preempted and cache_share > ROOM:
            self.limit = max(self._least, min(self.limit, int(_CUT * (running - preempted))))
        elif is_demanded and not preempted and cache_share < ROOM and running >= self.limit:
            self.limit = min(self._most, self.limit + max(1, int(_RISE * self.limit)))


# A generator's episodes use the cache beyond their requests: between two turns a conversation's
# keys and values are kept only while no other needs the room. So the number of groups that it plays
# at once is found as TCP finds its window. It begins with what always fits; each group that ends
# while as many are played and the cache has room adds one, and after the first loss only its share
# of one; a loss cuts it. Groups are counted, not seconds: a new episode uses its part of the cache
# only when it has grown.


class GroupLimit:
    """The number of groups that a generator plays at once, which follows its engine's cache."""

    def __init__(self, group_tokens: int, most: int, stats: EngineStats) -> None:
        """A group has at most `group_tokens`; `most` groups are never exceeded."""
        fits = stats.cache_tokens // group_tokens if stats.cache_tokens else most
        self._most = most
        self._window = float(max(1, min(fits, most)))
        self._growth = 1.0
        self._evicted = stats.evicted

    @property
    def limit(self) -> int:
        """The number, at least 1."""
        return int(self._window)

    def adapt(self, held: int, stats: EngineStats, *, ended: bool = False) -> None:
        """Adapt to the engine's statistics while `held` groups are played.

        `ended`: one of them has just ended. A cut is complete once no more groups are held than it
        allows; until then losses are consequences of what was begun before it.
        """
        lost, self._evicted = stats.evicted > self._evicted, stats.evicted
        if held > self.limit:
            return
        if lost:
            self._window, self._growth = max(1.0, _CUT * held), 0.0
        elif ended and held == self.limit and not stats.waiting and stats.cache_share < ROOM:
            self._window = min(self._most, self._window + (self._growth or 1 / self._window))


class RequestLimit:
    """Admits as many requests as the limit allows, first come, first served."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.inside = 0
        """Admitted requests that have not left."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests waiting for a place."""
        return sum(not place.done() for place in self._waiting)

    def request_place(self) -> "asyncio.Future[None]":
        """Return a future that is done once there is a place; always pass it to `leave`."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.admit()
        return place

    def leave(self, place: "asyncio.Future[None]") -> None:
        """Return a place, or stop waiting for it."""
        if place.done() and not place.cancelled():
            self.inside -= 1
            self.admit()
        else:
            place.cancel()

    def admit(self) -> None:
        """Admit the requests that the limit allows now."""
        while self._waiting and self.inside < self.concurrency.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.inside += 1
                place.set_result(None)


def num_equal(left: IntVector, right: IntVector) -> int:
    """Return the number of equal tokens at the beginning."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


# -- images of requests ----------------------------------------------------------------------------

T = TypeVar("T")
Key: TypeAlias = bytes | tuple[bytes, ...]


class ImageReads(Generic[T]):
    """Images that are being read; concurrent requests for the same images share one read."""

    def __init__(self) -> None:
        self._reading: dict[Key, asyncio.Future[T]] = {}

    async def share(self, key: Key, read: Callable[[], T]) -> T:
        """Return the result of `read`, or of a concurrent read with the same key."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(asyncio.to_thread(read))
            reading.add_done_callback(partial(self._read, key))
        return await asyncio.shield(reading)

    def _read(self, key: Key, reading: "asyncio.Future[T]") -> None:
        del self._reading[key]
        if not reading.cancelled():
            reading.exception()  # all callers may be gone


def require_reader(reader: ImageReader | None) -> ImageReader:
    """Return the reader of a model's images; ModelError for a model without image input."""
    if reader is None:
        raise ModelError(
            "the model reads text only, and a prompt holds images",
            hint="train a vision-language model of the Qwen2-VL or Qwen2.5-VL class",
        )
    return reader
