"""The running requests, one row each, as arrays: a decode step needs no Python per token.

Shape letters: R rows (those that run come first), T tokens of the longest allowed sequence,
B some rows.

Rows stay compact: the last row replaces one that ends, so a forward pass uses the first `num`
slots, or some of them.

Rows of one prompt that have drawn the same tokens since are twins: they have the same results.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....schemas.wire.array import IntVector
from ...policy.vision import SeenImages
from ..engine import ExpertRecord, FinishReason, Generation, Sampling
from ..sampling import Draw, RowConstraint, RowParameters
from .adapters import EngineAdapter

IndexVector = NDArray[np.int64]
_TOP = np.dtype([("id", np.int32), ("logprob", np.float32)])


@dataclass(slots=True, eq=False)
class RowRequest:
    """One request inside the engine."""

    request_id: str
    prompt: IntVector
    sampling: Sampling
    seed: int
    conversation: str | None
    streams: bool = False
    """Whether each token is reported as soon as it is drawn."""
    images: SeenImages | None = None
    """The images at their places in the prompt."""
    adapter: EngineAdapter | None = None
    """Its adapter."""
    began: int = 0
    """Serial of the adapter's weights at the start of its cache."""
    constraint: RowConstraint | None = None
    """The grammar's state after its tokens; made when it gets its row."""

    @property
    def serial(self) -> int:
        """Serial of the adapter's weights now; 0: it has none."""
        return 0 if self.adapter is None else self.adapter.serial

    @property
    def shift(self) -> int:
        """Offset of rotary positions after images."""
        return 0 if self.images is None else self.images.shift


class RowTable:
    """Tokens, log-probs, versions and sampling parameters of the running rows."""

    def __init__(
        self, max_rows: int, max_tokens: int, expert_shape: tuple[int, int] = (0, 0)
    ) -> None:
        """`expert_shape` is that of the recorded experts of a token; (0, 0): none are."""
        self.num = 0
        self.requests: list[RowRequest] = []
        # `empty` takes address space, but no memory until a row is used.
        self.tokens_RT = np.empty((max_rows, max_tokens), np.int32)
        self._logprobs_RT = np.empty((max_rows, max_tokens), np.float32)
        self._versions_RT = np.empty((max_rows, max_tokens), np.int32)
        self._experts_RTLK = np.empty((max_rows, max_tokens, *expert_shape), np.uint8)
        self._masked_RT = np.empty((max_rows, max_tokens), np.float32)
        self._computed_from_R = np.zeros(max_rows, np.int64)
        self._top_RTK = np.empty((max_rows, max_tokens, 0), _TOP)
        self.records_experts = 0 not in expert_shape
        self._stops_RK = np.full((max_rows, 1), -1, np.int64)
        self.length_R = np.zeros(max_rows, np.int64)
        self.shift_R = np.zeros(max_rows, np.int64)
        self.cache_version_R = np.zeros(max_rows, np.int64)
        self._twin_R = np.zeros(max_rows, np.int64)
        """Equal for twins."""
        self._num_twins = 0
        """Source of these numbers."""
        self._prompt_R = np.zeros(max_rows, np.int64)
        self._drawn_R = np.zeros(max_rows, np.int64)
        self._limit_R = np.zeros(max_rows, np.int64)
        self._temperature_R = np.zeros(max_rows, np.float32)
        self._top_p_R = np.zeros(max_rows, np.float32)
        self._top_k_R = np.zeros(max_rows, np.int64)
        self._seed_R = np.zeros(max_rows, np.uint64)
        self._first_token_R = np.zeros(max_rows, np.float64)

    def add(self, requests: Sequence[RowRequest], cache_version: int) -> IndexVector:
        """Give each request a row; return the rows."""
        first = self.num
        for row, request in enumerate(requests, first):
            sampling, length = request.sampling, len(request.prompt)
            request.began = request.serial
            request.constraint = RowConstraint.of(sampling, request.prompt)
            self.tokens_RT[row, :length] = request.prompt
            self.length_R[row] = self._prompt_R[row] = length
            self._drawn_R[row] = sampling.num_drawn
            self._limit_R[row] = length + sampling.max_new_tokens
            self._temperature_R[row] = sampling.temperature
            self._top_p_R[row] = sampling.top_p
            self._top_k_R[row] = sampling.top_k
            self._seed_R[row] = request.seed
            self.shift_R[row] = request.shift
            self._set_stops(row, sampling.stop_token_ids)
        self.requests += requests
        self.num += len(requests)
        self.cache_version_R[first : self.num] = cache_version
        return np.arange(first, self.num)

    def add_twins(self, row: int, count: int) -> None:
        """Record that these consecutive rows have one prompt and one cache."""
        self._twin_R[row : row + count] = self._num_twins
        self._num_twins += 1

    def distinct(self) -> tuple[IndexVector, IndexVector]:
        """Return one row of each set of twins, ascending, and for each row the index of its set."""
        _, first, place_R = np.unique(
            self._twin_R[: self.num], return_index=True, return_inverse=True
        )
        order = np.argsort(first)
        return first[order], np.argsort(order)[place_R]

    @property
    def longest(self) -> int:
        """Tokens that the longest row may reach; 0 without rows."""
        return int(self._limit_R[: self.num].max(initial=0))

    def parameters(self, rows_B: IndexVector) -> RowParameters:
        """Return the sampling parameters of these rows' next tokens."""
        return RowParameters(
            self._temperature_R[rows_B],
            self._top_p_R[rows_B],
            self._top_k_R[rows_B],
            self._seed_R[rows_B],
            (self.length_R[rows_B] - self._prompt_R[rows_B] + self._drawn_R[rows_B]).astype(
                np.uint64
            ),
        )

    def append(self, rows_B: IndexVector, drawn: Draw, version: int | list[int]) -> None:
        """Write the next token of these rows."""
        position_B = self.length_R[rows_B]
        self.tokens_RT[rows_B, position_B] = drawn.tokens_B
        self._logprobs_RT[rows_B, position_B] = drawn.logprobs_B
        self._versions_RT[rows_B, position_B] = version
        self._masked_RT[rows_B, position_B] = 0.0 if drawn.masked_B is None else drawn.masked_B
        if drawn.top_ids_BK is not None:
            self._note_top(rows_B, position_B, drawn)
        is_first_B = position_B == self._prompt_R[rows_B]
        self._first_token_R[rows_B[is_first_B]] = time.time()
        self.length_R[rows_B] += 1
        pairs_B2 = np.stack([self._twin_R[rows_B], np.asarray(drawn.tokens_B)], axis=1)
        twins_B2, place_B = np.unique(pairs_B2, axis=0, return_inverse=True)
        self._twin_R[rows_B] = self._num_twins + place_B.reshape(-1)
        self._num_twins += len(twins_B2)

    def _note_top(self, rows_B: IndexVector, position_B: IndexVector, drawn: Draw) -> None:
        """Write the likeliest tokens; room is allocated for the first request that needs it."""
        assert drawn.top_ids_BK is not None
        assert drawn.top_logprobs_BK is not None
        num = drawn.top_ids_BK.shape[1]
        if num > self._top_RTK.shape[2]:
            wider = np.empty((*self._top_RTK.shape[:2], num), _TOP)
            used = int(self.length_R[: self.num].max(initial=0))
            wider[: self.num, :used, : self._top_RTK.shape[2]] = self._top_RTK[: self.num, :used]
            self._top_RTK = wider
        self._top_RTK["id"][rows_B, position_B, :num] = drawn.top_ids_BK
        self._top_RTK["logprob"][rows_B, position_B, :num] = drawn.top_logprobs_BK

    def note_prompt_experts(self, rows: slice, start: int, experts_NLK: ExpertRecord) -> None:
        """Write the experts of a prompt that rows share, whose first `start` tokens were cached."""
        self._computed_from_R[rows] = start
        self._experts_RTLK[rows, start : start + len(experts_NLK)] = experts_NLK

    def note_experts(self, rows_B: IndexVector, experts_BLK: ExpertRecord) -> None:
        """Write the experts of the last computed token of these rows."""
        self._experts_RTLK[rows_B, self.length_R[rows_B] - 1] = experts_BLK

    def ended(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return for each row whether it has a stop token, its limit, or an infinite log-prob.

        Every row has at least one generated token.
        """
        rows = np.arange(self.num)
        last = self.length_R[: self.num] - 1
        stop = (self.tokens_RT[rows, last][:, None] == self._stops_RK[: self.num]).any(1)
        full = self.length_R[: self.num] >= self._limit_R[: self.num]
        return stop, full, ~np.isfinite(self._logprobs_RT[rows, last])

    def result(self, row: int, reason: FinishReason) -> Generation:
        """Return a copy of a row's generated tokens."""
        span = slice(int(self._prompt_R[row]), int(self.length_R[row]))
        sampling = self.requests[row].sampling
        top = self._top_RTK[row, span, : sampling.num_top]
        return Generation(
            self.tokens_RT[row, span].copy(),
            self._logprobs_RT[row, span].copy(),
            self._versions_RT[row, span].copy(),
            reason,
            self._experts_of(row) if self.records_experts else None,
            self._masked_RT[row, span].copy() if sampling.grammar is not None else None,
            top["id"].copy() if sampling.num_top else None,
            top["logprob"].copy() if sampling.num_top else None,
            float(self._first_token_R[row]),
        )

    def _experts_of(self, row: int) -> ExpertRecord:
        computed = slice(int(self._computed_from_R[row]), int(self.length_R[row]) - 1)
        return self._experts_RTLK[row, computed].copy()

    def remove(self, is_ended: NDArray[np.bool_]) -> tuple[IndexVector, IndexVector]:
        """Remove rows and close the gaps; return which rows moved, and where to."""
        num_left = int(self.num - is_ended.sum())
        target = np.flatnonzero(is_ended[:num_left])
        source = num_left + np.flatnonzero(~is_ended[num_left:])
        longest = int(self.length_R[source].max(initial=0))
        for wide in (
            self.tokens_RT,
            self._logprobs_RT,
            self._versions_RT,
            self._masked_RT,
            self._top_RTK,
            self._experts_RTLK,
        ):
            wide[target, :longest] = wide[source, :longest]
        for narrow in self._columns():
            narrow[target] = narrow[source]
        for to, origin in zip(target.tolist(), source.tolist(), strict=True):
            self.requests[to] = self.requests[origin]
        del self.requests[num_left:]
        self.num = num_left
        return source, target

    def _columns(self) -> Sequence[NDArray[np.generic]]:
        return (
            self._stops_RK,
            self.length_R,
            self.shift_R,
            self.cache_version_R,
            self._twin_R,
            self._prompt_R,
            self._drawn_R,
            self._limit_R,
            self._temperature_R,
            self._top_p_R,
            self._top_k_R,
            self._seed_R,
            self._computed_from_R,
            self._first_token_R,
        )

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self._stops_RK.shape[1]
        if missing > 0:
            self._stops_RK = np.pad(self._stops_RK, ((0, 0), (0, missing)), constant_values=-1)
        self._stops_RK[row] = -1
        self._stops_RK[row, : len(stops)] = stops
