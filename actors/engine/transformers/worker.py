"""The engine's thread: continuous batching, one tick after another.

A tick assigns free rows to waiting requests (prefill), feeds one token to every running row
(decode), and returns the results of ended rows to the event loop in one call. Commands (submit,
cancel, swap, release, close) are callables that run between two ticks. An error here fails all
pending requests.

Log-probs of prompts take one pass over their tokens, which is not cached. Shorter prompts of a pass
are padded at the end, where no token sees the padding.

Shape letters: B prompts of a pass, N tokens, D hidden size, C columns whose logits are in memory at
once, V vocabulary, K likeliest tokens.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import EngineError, TinkermqError
from ...policy.adapted_layers import LowRank
from ...policy.layers import decoder_of
from ...policy.vision import SeenImages
from .. import engine
from ..sampling import Constraining, Draw, draw
from .adapters import (
    DoubleBuffer,
    EngineAdapter,
    OffloadedWeights,
    RowsOfAdapters,
)
from .decoder import FedTokens, SlotDecoder
from .kv_cache import LEAST_SHARED, CachedPrefix, PrefixCache, PromptCache
from .rows import IndexVector, RowRequest, RowTable

# -- log-probs of prompts --------------------------------------------------------------------------

_PROMPTS_PART = 4
"""Prompts get one part in this many of the caches' memory."""
_MOST_DISTINCT = 0.75
"""Twins are decoded once if distinct rows are at most this share; else copying costs more."""
_PASS_TOKENS = 4096
_LOGITS_BYTES = 64 * 2**20
_PROBE = (1, 2, 3, 5, 1, 2)
_TOLERANCE = 1e-5


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """A prompt to score."""

    request_id: str
    prompt: IntVector
    top_k: int
    adapter: EngineAdapter | None


class PromptScorer:
    """Scores prompts with a decoder's model; in the engine's thread."""

    def __init__(self, decoder: SlotDecoder) -> None:
        """Prepare for `decoder`."""
        self._decoder = decoder
        self._head_is_all: bool | None = None

    def next_pass(self, waiting: Sequence[ScoreRequest]) -> list[ScoreRequest]:
        """Return the waiting prompts of the next pass: the first, and similar ones."""
        first = waiting[0]
        longest, batch = len(first.prompt), [first]
        for request in waiting[1:]:
            width = max(longest, len(request.prompt))
            shortest = min(len(member.prompt) for member in (*batch, request))
            if width * (len(batch) + 1) <= _PASS_TOKENS and width <= 2 * shortest + 16:
                longest = width
                batch.append(request)
        return batch

    @torch.inference_mode()
    def score(self, batch: Sequence[ScoreRequest]) -> list[engine.PromptScores]:
        """Return the scores of some prompts."""
        if self._head_is_all is None:
            self._head_is_all = self._is_head_all()
        longest = max(len(request.prompt) for request in batch)
        ids_BN = np.zeros((len(batch), longest), np.int64)
        for row, request in enumerate(batch):
            ids_BN[row, : len(request.prompt)] = request.prompt
        with self._decoder.adapters.using([request.adapter for request in batch]):
            states_BND = self._pass(ids_BN, logits=not self._head_is_all)
        return [self._read(states_BND[row], request) for row, request in enumerate(batch)]

    def _pass(self, ids_BN: np.ndarray[Any, Any], *, logits: bool) -> torch.Tensor:
        """Return hidden states, or the model's logits."""
        decoder, model = self._decoder, cast(Any, self._decoder.model)
        decoder.cache.begin_scoring()
        ids = torch.as_tensor(ids_BN, device=decoder.device)
        output = (model if logits else decoder_of(model))(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=decoder.device).expand_as(ids),
            attention_mask=None,
            past_key_values=decoder.cache,
            use_cache=True,
        )
        return cast("torch.Tensor", output.logits if logits else output.last_hidden_state)

    def _read(self, states_ND: torch.Tensor, request: ScoreRequest) -> engine.PromptScores:
        num, k = len(request.prompt), request.top_k
        scores = engine.PromptScores.unknown(num, k)
        targets = torch.as_tensor(request.prompt[1:].astype(np.int64), device=states_ND.device)
        chunk = max(1, _LOGITS_BYTES // (4 * self._decoder.vocab_size))
        for start in range(0, num - 1, chunk):
            end = min(start + chunk, num - 1)
            logprobs_CV = self._logits(states_ND[start:end], request).float().log_softmax(-1)
            picked = logprobs_CV.gather(1, targets[start:end, None])[:, 0]
            scores.logprobs[start + 1 : end + 1] = picked.cpu().numpy()
            if k:
                top = logprobs_CV.topk(k, -1)
                scores.top_logprobs[start + 1 : end + 1] = top.values.cpu().numpy()
                scores.top_ids[start + 1 : end + 1] = top.indices.cpu().numpy()
        return scores

    def _logits(self, states_CD: torch.Tensor, request: ScoreRequest) -> torch.Tensor:
        if not self._head_is_all:
            return states_CD
        head = cast(Any, self._decoder.model).get_output_embeddings()
        with self._decoder.adapters.using([request.adapter]):
            return cast("torch.Tensor", head(states_CD))

    def _is_head_all(self) -> bool:
        """Whether logits are the output layer's alone: some models cap or scale them."""
        ids = np.array([_PROBE], np.int64)
        whole = self._pass(ids, logits=True)[0].float()
        head = cast(Any, self._decoder.model).get_output_embeddings()
        parts = head(self._pass(ids, logits=False)[0]).float()
        return bool((whole - parts).abs().max() <= _TOLERANCE * (1 + whole.abs().max()))


@dataclass(slots=True, eq=False)
class _PromptGroup:
    """Requests of one prompt, which is computed once."""

    requests: list[RowRequest]
    cached: CachedPrefix | None
    """The cached part of the prompt."""
    is_shareable: bool
    """Whether it shares caches with other prompts."""
    row: int = 0
    """Row of the first one; those of the others follow."""

    @property
    def prompt(self) -> IntVector:
        """Return the prompt."""
        return self.requests[0].prompt

    @property
    def serial(self) -> int:
        """Serial of the adapter's weights; 0: none."""
        return self.requests[0].serial


Outcome = tuple[str, engine.Generation | engine.PromptScores | TinkermqError | engine.Drawn]
"""A request's id and its result, or its next token."""


class EngineWorker:
    """The engine's thread; `run` is its body."""

    def __init__(
        self,
        decoder: SlotDecoder,
        weights: DoubleBuffer,
        version: int,
        deliver: Callable[[list[Outcome]], None],
        ended: Callable[[EngineError], None],
        prefix_cache_bytes: int,
    ) -> None:
        self.version = version
        self.has_weights = True
        """Whether the weights are complete: a sleeping engine may have dropped them."""
        self._decoder = decoder
        self._weights = weights
        self._deliver = deliver
        self._ended = ended
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[RowRequest] = deque()
        self._scorer = PromptScorer(decoder)
        self._scored: list[ScoreRequest] = []
        self._rows = RowTable(
            decoder.cache.max_slots, decoder.cache.max_tokens, decoder.expert_shape
        )
        for_prompts = prefix_cache_bytes // _PROMPTS_PART
        self._prompt_cache = PromptCache(decoder.cache.shape, for_prompts)
        self._prefix_cache = PrefixCache(prefix_cache_bytes - for_prompts)
        self._outcomes: list[Outcome] = []
        self._num_streams = 0
        self._num_adapted = 0
        self._num_constrained = 0
        self._num_topped = 0
        self._constraining = Constraining()
        self._closing = False
        self._asleep: OffloadedWeights | None = None
        self._slept_at = 0.0
        self._meter = engine.Meter()
        self._meter.cache_tokens = decoder.cache.max_cells or 0

    def do(self, command: Callable[[], None]) -> None:
        """Run a command in the engine's thread, between two ticks."""
        self._inbox.put(command)

    def run(self) -> None:
        """Serve until closed; then report why the engine ended."""
        reason = EngineError("the engine was closed", hint="start it again")
        try:
            while not self._closing:
                self._run_commands()
                if self._has_work:
                    self._tick()
                self._flush()
        except Exception as error:  # noqa: BLE001  # the engine's boundary: it fails all requests
            reason = EngineError(
                f"the engine failed: {type(error).__name__}: {error}",
                hint="see the generator's log; its tasks go to another generator",
            )
            reason.__cause__ = error
        self._ended(reason)

    # Commands -------------------------------------------------------------------------------

    def submit(self, request: RowRequest) -> None:
        """Queue a request."""
        self._count(request, 1)
        self._waiting.append(request)

    def score(self, request: ScoreRequest) -> None:
        """Queue a prompt to be scored."""
        self._scored.append(request)

    def adapt(
        self,
        adapter: EngineAdapter,
        version: int,
        by_layer: dict[str, LowRank],
        done: Callable[[], None],
    ) -> None:
        """Set an adapter's weights, also for running rows."""
        self._decoder.adapters.open()
        self._decoder.adapters.forget(adapter)
        adapter.replace_weights(version, by_layer)
        done()

    def forget(self, adapter: EngineAdapter) -> None:
        """Free the concatenated copies of an adapter."""
        self._decoder.adapters.forget(adapter)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> None:
        """End a waiting or running request."""
        self._scored = [scored for scored in self._scored if scored.request_id != request_id]
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._count(request, -1)
                self._outcomes.append((request_id, engine.nothing()))
                return
        for row, request in enumerate(self._rows.requests):
            if request.request_id == request_id:
                self._outcomes.append((request_id, self._rows.result(row, "cancelled")))
                self._count(request, -1)
                self._remove(np.arange(self._rows.num) == row)
                return

    def release(self, conversation: str) -> None:
        """Forget a cached prefix."""
        self._prefix_cache.drop(conversation)

    def swap(
        self, version: int, fresh: list[torch.Tensor], kv: engine.KvOnSwap, done: Callable[[], None]
    ) -> None:
        """Swap to prepared weights; then call `done` (in this thread)."""
        started = time.perf_counter()
        self._weights.swap(fresh)
        self.has_weights = True
        self.version = version
        self._forget_prefixes()
        if kv == "recompute" and self._rows.num and self._asleep is None:
            self._recompute()
        self._meter.paused(time.perf_counter() - started)
        done()

    def sleep(self, keep_weights: bool, done: Callable[[], None]) -> None:
        """Free the memory of weights and cache until `wake`; then call `done`."""
        if self._asleep is None:
            self._slept_at = time.perf_counter()
            self._weights.free_spare()
            self._forget_prefixes()
            self._decoder.cache.free()
            dropped = () if keep_weights else self._weights.tensors
            self._asleep = OffloadedWeights(self._decoder.model, dropped)
            self.has_weights = keep_weights
            if self._decoder.device.type == "cuda":
                torch.cuda.empty_cache()
        done()

    def wake(self, done: Callable[[], None]) -> None:
        """Allocate memory, compute the cache of running rows, and continue; then call `done`."""
        if self._asleep is not None:
            self._asleep.restore()
            self._asleep = None
            if self._rows.num:
                self._recompute()
            self._meter.slept(time.perf_counter() - self._slept_at)
        done()

    def close(self) -> None:
        """End `run`."""
        self._closing = True

    def stats(self) -> engine.EngineStats:
        """Read the counters; safe in any thread."""
        cache = self._decoder.cache
        self._meter.evicted = self._prefix_cache.num_evicted
        self._meter.cache_share = cache.used_share
        return self._meter.stats(
            version=self.version,
            running=self._rows.num,
            waiting=len(self._waiting),
            cached_prefixes=len(self._prefix_cache),
            cache_bytes=cache.num_bytes
            + self._prefix_cache.num_bytes
            + self._prompt_cache.num_bytes,
            weight_bytes=self._weights.held_bytes,
        )

    # One tick -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _tick(self) -> None:
        started = time.perf_counter()
        while requests := self._take_waiting():
            self._admit(requests)
        if self._rows.num:
            self._decode()
        if self._scored:
            self._score()
        self._meter.busy_s += time.perf_counter() - started
        self._meter.mark()

    def _score(self) -> None:
        """Score the waiting prompts of one pass."""
        batch = self._scorer.next_pass(self._scored)
        ids = {request.request_id for request in batch}
        self._scored = [request for request in self._scored if request.request_id not in ids]
        for request, scores in zip(batch, self._scorer.score(batch), strict=True):
            self._meter.prefilled += len(request.prompt)
            self._outcomes.append((request.request_id, scores))

    def _count(self, request: RowRequest, by: int) -> None:
        """Count requests with streams, adapters, grammars or likeliest tokens."""
        self._num_streams += by * request.streams
        self._num_adapted += by * (request.adapter is not None)
        self._num_constrained += by * request.sampling.is_constrained
        self._num_topped += by * (request.sampling.num_top > 0)

    def _adapters(self, rows: IndexVector) -> RowsOfAdapters:
        """Return the adapters of some running rows; empty if no row has one."""
        if not self._num_adapted:
            return ()
        return [self._rows.requests[int(row)].adapter for row in rows]

    def _take_waiting(self) -> list[RowRequest]:
        """Return the requests that waited longest, as many as rows and memory allow."""
        cache, longest = self._decoder.cache, self._rows.longest
        requests: list[RowRequest] = []
        while self._waiting and self._rows.num + len(requests) < cache.max_slots:
            first = self._waiting[0]
            longest = max(longest, len(first.prompt) + first.sampling.max_new_tokens)
            if not cache.admits(self._rows.num + len(requests) + 1, longest):
                break
            requests.append(self._waiting.popleft())
        return requests

    def _admit(self, requests: Sequence[RowRequest]) -> None:
        """Assign rows to requests, and draw their first tokens."""
        groups = self._group(requests)
        self._rows.add([request for group in groups for request in group.requests], self.version)
        self._decoder.cache.note_rows(self._rows.num, self._rows.longest)
        self._decoder.cache.reserve(self._rows.num, 1)
        row = self._rows.num - len(requests)
        for group in groups:
            group.row = row
            self._rows.add_twins(row, len(group.requests))
            row += len(group.requests)
        while groups:
            now, groups = self._next_groups(groups)
            spans = [self._begin(group) for group in now]
            self._prefill(spans, [len(group.requests) for group in now])
            for group in now:
                self._keep_prompt(group)
        self._retire()

    def _next_groups(
        self, groups: Sequence["_PromptGroup"]
    ) -> tuple[list["_PromptGroup"], list["_PromptGroup"]]:
        """Return the groups to compute now, and those that share a prefix with one of them."""
        now: list[_PromptGroup] = []
        later: list[_PromptGroup] = []
        for group in groups:
            if group.is_shareable and not self._rows.records_experts:
                group.cached = self._prompt_cache.find(group.prompt, group.serial)
                if group.cached is None and any(self._begins_as(group, other) for other in now):
                    later.append(group)
                    continue
            now.append(group)
        return now, later

    def _begins_as(self, group: "_PromptGroup", other: "_PromptGroup") -> bool:
        """Whether a group can use the cache of another one after that is computed."""
        return (
            other.is_shareable
            and other.serial == group.serial
            and self._prompt_cache.admits(other.prompt)
            and self._prompt_cache.num_shared(group.prompt, other.prompt) >= LEAST_SHARED
        )

    def _begin(self, group: "_PromptGroup") -> FedTokens:
        """Copy the cached part of a group's prompt to its first row; return the rest."""
        start = 0
        if group.cached is not None:
            start = len(group.cached.tokens)
            self._decoder.cache.reserve(self._rows.num, start)
            self._decoder.cache.put(group.row, group.cached.states)
        self._meter.reused += start + (len(group.requests) - 1) * len(group.prompt)
        return FedTokens(
            group.row, start, group.prompt[start:], *_images_and_adapter(group.requests[0])
        )

    def _keep_prompt(self, group: "_PromptGroup") -> None:
        """Keep the cache of a computed prompt, for others with the same prefix."""
        known = 0 if group.cached is None else len(group.cached.tokens)
        if (
            not group.is_shareable
            or self._rows.records_experts
            or known >= len(group.prompt) - 1
            or not self._prompt_cache.admits(group.prompt)
        ):
            return
        states = self._decoder.cache.read(group.row, len(group.prompt))
        self._prompt_cache.keep(CachedPrefix(group.prompt, states, None, group.serial))

    def _group(self, requests: Sequence[RowRequest]) -> list["_PromptGroup"]:
        """Group requests by prompt; one whose conversation is cached is a group of its own."""
        groups: list[_PromptGroup] = []
        shared: dict[tuple[bytes, bytes | None, int], list[RowRequest]] = {}
        for request in requests:
            cached = None
            if request.conversation is not None:
                digest = _digest(request)
                cached = self._prefix_cache.resume(
                    request.conversation, request.prompt, digest, request.serial
                )
            if cached is not None:
                groups.append(_PromptGroup([request], cached, is_shareable=False))
                continue
            group = shared.setdefault(
                (request.prompt.tobytes(), _digest(request), request.serial), []
            )
            if not group:
                groups.append(_PromptGroup(group, None, is_shareable=request.images is None))
            group.append(request)
        return groups

    def _prefill(self, spans: Sequence[FedTokens], sizes: Sequence[int]) -> None:
        """Compute each prompt once, copy it to the rows that share it, and draw for all."""
        for batch, logits_BV in self._decoder.prefill(spans):
            sizes_B = np.array([sizes[index] for index in batch])
            rows = [np.arange(spans[i].slot, spans[i].slot + sizes[i]) for i in batch]
            if self._rows.records_experts:
                self._note_prompts([spans[i] for i in batch], sizes_B.tolist())
            for index, own in zip(batch, rows, strict=True):
                self._meter.prefilled += len(spans[index].tokens)
                if len(own) > 1:
                    length = spans[index].start + len(spans[index].tokens)
                    self._decoder.cache.spread(int(own[0]), int(own[-1]), length)
            if (sizes_B > 1).any():
                picks = np.repeat(np.arange(len(batch)), sizes_B)
                logits_BV = logits_BV[torch.as_tensor(picks, device=logits_BV.device)]
            self._draw(np.concatenate(rows), logits_BV)
            self._flush()  # streamed tokens do not wait for the next passes

    def _note_prompts(self, spans: Sequence[FedTokens], sizes: Sequence[int]) -> None:
        """Record the experts of computed prompts, for all rows that share them."""
        chosen_BNLK = self._decoder.chosen(len(spans))
        for span, size, chosen_NLK in zip(spans, sizes, chosen_BNLK, strict=True):
            own = chosen_NLK[len(chosen_NLK) - len(span.tokens) :]
            rows = slice(span.slot, span.slot + size)
            self._rows.note_prompt_experts(rows, span.start, own)

    def _decode(self) -> None:
        """Compute the last token of every row, once for twins, and draw the next ones."""
        rows: IndexVector = np.arange(self._rows.num)
        distinct, place = self._distinct()
        position = self._rows.length_R[distinct] - 1
        logits_BV = self._decoder.decode(
            self._rows.tokens_RT[distinct, position],
            position,
            self._rows.shift_R[distinct],
            self._adapters(distinct),
            None if place is None else distinct,
        )
        if self._rows.records_experts:
            chosen_BLK = self._decoder.chosen(len(distinct))[:, 0]
            self._rows.note_experts(rows, chosen_BLK if place is None else chosen_BLK[place])
        if place is not None:
            source = distinct[place]
            own = rows != source
            self._decoder.cache.copy_token(source[own], rows[own], position[place][own])
            logits_BV = logits_BV[torch.as_tensor(place, device=logits_BV.device)]
        self._draw(rows, logits_BV)
        self._retire()

    def _distinct(self) -> tuple[IndexVector, IndexVector | None]:
        """Return the rows to compute, and for each row the index of its twin among them.

        None: every row is computed, as on a GPU, where fewer rows take as long.
        """
        if self._decoder.device.type == "cpu":
            distinct, place = self._rows.distinct()
            if len(distinct) <= _MOST_DISTINCT * self._rows.num:
                return distinct, place
        return np.arange(self._rows.num), None

    def _draw(self, rows: IndexVector, logits_BV: torch.Tensor) -> None:
        shaped_BV, num_top = None, 0
        if self._num_constrained or self._num_topped:
            requests = [self._rows.requests[int(row)] for row in rows]
            shaped_BV = self._constraining.shaped(
                logits_BV, [request.constraint for request in requests]
            )
            num_top = max(request.sampling.num_top for request in requests)
        drawn = draw(logits_BV, self._rows.parameters(rows), shaped_BV, num_top)
        self._rows.append(rows, drawn, self._versions(rows))
        self._meter.generated += len(rows)
        if self._num_constrained:
            for row, token in zip(rows, drawn.tokens_B, strict=True):
                if (constraint := self._rows.requests[int(row)].constraint) is not None:
                    constraint.accept_token(int(token))
        if self._num_streams:
            self._stream(rows, drawn)

    def _versions(self, rows: IndexVector) -> int | list[int]:
        """Return the versions of the weights of these rows."""
        if not self._num_adapted:
            return self.version
        return [self._version_of(self._rows.requests[int(row)]) for row in rows]

    def _version_of(self, request: RowRequest) -> int:
        return self.version if request.adapter is None else request.adapter.version

    def _stream(self, rows: IndexVector, drawn: Draw) -> None:
        """Report the new tokens of streaming requests."""
        for place in range(len(rows)):
            request = self._rows.requests[int(rows[place])]
            if request.streams:
                version = self._version_of(request)
                token = engine.Drawn(
                    int(drawn.tokens_B[place]),
                    float(drawn.logprobs_B[place]),
                    version,
                    _top_of(drawn, place, request.sampling.num_top),
                )
                self._outcomes.append((request.request_id, token))

    def _retire(self) -> None:
        """Remove the rows that ended."""
        stop, full, broken = self._rows.ended()
        left = self._left_grammar()
        is_ended = stop | full | broken | left
        if not is_ended.any():
            return
        for row in np.flatnonzero(is_ended).tolist():
            request = self._rows.requests[row]
            self._count(request, -1)
            if broken[row]:
                failure = engine.not_finite(self._version_of(request))
                self._outcomes.append((request.request_id, failure))
                continue
            if left[row]:
                assert request.constraint is not None
                why = request.constraint.error
                self._outcomes.append((request.request_id, engine.left_grammar(why)))
                continue
            reason: engine.FinishReason = "stop" if stop[row] else "length"
            self._outcomes.append((request.request_id, self._rows.result(row, reason)))
            self._keep_prefix(row, request)
        if broken.any():
            self._decoder.cache.scrub(np.flatnonzero(broken).tolist())
        self._remove(is_ended)

    def _left_grammar(self) -> NDArray[np.bool_]:
        """Return for each row whether its grammar failed."""
        if not self._num_constrained:
            return np.zeros(self._rows.num, np.bool_)
        errors = [
            request.constraint is not None and request.constraint.error
            for request in self._rows.requests
        ]
        return np.array([bool(error) for error in errors], np.bool_)

    def _keep_prefix(self, row: int, request: RowRequest) -> None:
        """Keep the row's cache for the next turn, if one version computed it."""
        if request.conversation is None or self._rows.cache_version_R[row] != self.version:
            return
        if request.began != request.serial:
            return
        cached = int(self._rows.length_R[row]) - 1  # the last token was drawn, but not fed
        tokens = self._rows.tokens_RT[row, :cached].copy()
        states = self._decoder.cache.read(row, cached)
        prefix = CachedPrefix(tokens, states, _digest(request), request.serial)
        self._prefix_cache.keep(request.conversation, prefix)

    def _forget_prefixes(self) -> None:
        """Drop the caches of conversations and prompts, which older weights computed."""
        self._prefix_cache.clear()
        self._prompt_cache.clear()

    def _remove(self, is_ended: NDArray[np.bool_]) -> None:
        source, target = self._rows.remove(is_ended)
        self._decoder.cache.note_rows(self._rows.num, self._rows.longest)
        if len(source) and self._asleep is None:
            self._decoder.cache.copy(
                torch.as_tensor(source, device=self._decoder.device),
                torch.as_tensor(target, device=self._decoder.device),
                int(self._rows.length_R[target].max()),
            )

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Compute the cache of all running rows again, with the current weights."""
        cached = (self._rows.length_R[: self._rows.num] - 1).tolist()
        spans = [
            FedTokens(
                row,
                0,
                self._rows.tokens_RT[row, :length],
                *_images_and_adapter(self._rows.requests[row]),
            )
            for row, length in enumerate(cached)
        ]
        for _ in self._decoder.prefill(spans):
            pass
        self._rows.cache_version_R[: self._rows.num] = self.version

    # Around it ------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        requests = self._rows.num or self._waiting or self._scored
        return self._asleep is None and bool(requests)

    def _run_commands(self) -> None:
        """Run the waiting commands; without work, wait for one."""
        if not self._has_work and not self._outcomes:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _flush(self) -> None:
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._deliver(outcomes)


def _top_of(drawn: Draw, place: int, num: int) -> tuple[tuple[int, float], ...]:
    if not num or drawn.top_ids_BK is None or drawn.top_logprobs_BK is None:
        return ()
    ids, logprobs = drawn.top_ids_BK[place, :num], drawn.top_logprobs_BK[place, :num]
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _images_and_adapter(request: RowRequest) -> tuple[SeenImages | None, EngineAdapter | None]:
    return request.images, request.adapter


def _digest(request: RowRequest) -> bytes | None:
    return None if request.images is None else request.images.images.digest
