"""Compute forward_backward: data packed into micro-batches, also of several adapters at once.

Micro-batches of several adapters may share one forward and backward pass: each layer adds to each
row its own adapter. No value of one reaches another, but the number of rows decides in which order
products are summed, and so the last bits of a result. Therefore a result records its company, and a
repeated pass is computed among as many filler rows, which gives the same bits.

Shape letters: P positions of data, E targets, U columns of a micro-batch that predict, B rows,
T columns of a row, N positions, D hidden size.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.tinker.datum import LossResult
from ....schemas.tinker.operation import ALONE, Company
from ...policy.adapted_layers import OneAdapter
from ...training.micro_batch import MicroBatch, TokenSequence, widened
from ...training.packing import pack, ranges
from .adapter import Adapter, RowShare, RowShares, SharedBase
from .inputs import DatumBatch
from .losses import LossFunction, LossReader, PlacedTargets, Targets

# Packing, by the learner's packer. Its sequences end with the token that their last column
# predicts; data come with their targets, so one more token is appended, which no column reads.


def pack_data(
    tokens: list[NDArray[np.int64]],
    *,
    microbatch_tokens: int,
    hidden_size: int,
    share_prompts: bool,
    one_per_row: bool = False,
) -> list[MicroBatch]:
    """Pack the tokens of data into micro-batches of at most `microbatch_tokens`, padding included.

    `index_N` of a micro-batch has its positions among those of all data in order. A longer datum
    has a micro-batch of its own. With `share_prompts` a row contains a common prefix of its data
    once; with `one_per_row` it contains one datum. Deterministic.
    """
    sequences = [_sequence(token) for token in tokens]
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    long = np.flatnonzero(lengths > microbatch_tokens)
    short = np.flatnonzero(lengths <= microbatch_tokens)
    calls = [(short, microbatch_tokens)] if len(short) else []
    calls += [(long[at : at + 1], int(lengths[long[at]])) for at in range(len(long))]
    micros: list[MicroBatch] = []
    for chosen, columns in calls:
        positions = ranges(first[chosen], lengths[chosen])
        result = pack(
            [sequences[at] for at in chosen],
            max_row_tokens=columns,
            microbatch_tokens=columns,
            share_prompts=share_prompts,
            one_per_row=one_per_row,
            hidden_size=hidden_size,
        )
        micros += [
            replace(micro, index_N=torch.as_tensor(positions[micro.index_N.numpy()]))
            for micro in result
        ]
    return micros


def _sequence(tokens: NDArray[np.int64]) -> TokenSequence:
    mask = np.ones(len(tokens) + 1, dtype=np.uint8)
    mask[0] = 0
    return TokenSequence(np.append(tokens, 0), mask, branches=True)


@dataclass(frozen=True)
class NextMicroBatch:
    """The next micro-batch of a loss."""

    micro: MicroBatch
    index_E: NDArray[np.int64]
    """The targets that it predicts, among those of the loss."""
    targets: Targets
    backward: bool
    """Whether it has gradients."""


class LossPass:
    """Computes a loss, and adds its gradients to the adapter's, one micro-batch at a time.

    Losses of several adapters may take turns between micro-batches without changing a bit.
    """

    def __init__(
        self,
        base: SharedBase,
        adapter: Adapter,
        batch: DatumBatch,
        loss: LossFunction,
        config: Mapping[str, float],
        *,
        at_end: Callable[[], None] | None,
        companies: Sequence[Company] | None = None,
    ) -> None:
        """Pack the data; nothing is computed yet.

        `at_end` is called after the last gradient; None: no gradients are computed. `companies` are
        those of an earlier computation (empty if all micro-batches were alone), whose bits are
        repeated.
        """
        self._base = base
        self.adapter = adapter
        """The adapter of the loss."""
        self.companies: list[Company] = []
        """Companies of the computed micro-batches."""
        self._past = companies
        self._batch = batch
        self._loss = loss
        self._output = LossReader(base.scorer, loss, config, base.logits_columns)
        self._at_end = at_end
        self._micros = pack_data(
            batch.tokens,
            microbatch_tokens=base.microbatch_tokens,
            hidden_size=base.scorer.hidden_size,
            share_prompts=base.share_prompts,
            one_per_row=base.scorer.one_per_row,
        )
        self._next: NextMicroBatch | None = None
        self._first_P = np.cumsum(batch.count_P) - batch.count_P
        self._logprobs_E, self._loss_E = np.zeros((2, len(batch.targets_E)), dtype=np.float32)
        self._num_clipped = self._num_clipped_next = 0

    @property
    def num_left(self) -> int:
        """Number of micro-batches not yet computed."""
        return len(self._micros) - len(self.companies)

    @property
    def next_tokens(self) -> int:
        """Tokens of the next micro-batch, shared ones counted once; 0 after the last one."""
        return self._micros[len(self.companies)].num_tokens if self.num_left else 0

    @property
    def past_company(self) -> Company | None:
        """The company of the next micro-batch in an earlier computation; None: there was none."""
        if self._past is None:
            return None
        done = len(self.companies)
        return self._past[done] if done < len(self._past) else ALONE

    def next(self) -> NextMicroBatch:
        """Return the next micro-batch, on the base's device; IndexError after the last."""
        if self._next is None:
            micro = self._micros[len(self.companies)]
            index_P = micro.index_N.numpy()
            index_E = ranges(self._first_P[index_P], self._batch.count_P[index_P])
            targets = self._targets(index_E)
            backward = self._at_end is not None and bool(self._loss.active_E(targets).any())
            device = self._base.scorer.device
            self._next = NextMicroBatch(micro.to(device), index_E, targets, backward)
        return self._next

    def read(self, states_UD: Tensor, place_P: Tensor) -> Tensor | None:
        """Compute the loss of the next micro-batch from hidden states; return their gradient.

        `place_P` has the state that predicts each position's targets. The output layer's adapter
        must be in use; its gradients are added to the adapter's. The returned gradient is None if
        the states have none.
        """
        following = self.next()
        count_P = self._batch.count_P[following.micro.index_N.cpu().numpy()]
        placed = PlacedTargets(
            token_E=self._tensor(self._batch.targets_E[following.index_E]),
            place_E=place_P.repeat_interleave(self._tensor(count_P)),
            targets=following.targets,
        )
        scores, gradient_UD = self._output.read(states_UD, placed, backward=following.backward)
        self._logprobs_E[following.index_E] = scores.logprobs_E.cpu().numpy()
        self._loss_E[following.index_E] = scores.loss_E.cpu().numpy()
        self._num_clipped_next = int(scores.clipped_E.sum())
        return gradient_UD

    def done(self, company: Company) -> None:
        """Record that the next micro-batch was computed, and its company."""
        self._num_clipped += self._num_clipped_next
        self._next = None
        self.companies.append(company)
        if not self.num_left and self._at_end is not None:
            self._at_end()

    def result(self) -> LossResult:
        """Return log-probs and metrics; RuntimeError before the last micro-batch."""
        if self.num_left:
            raise RuntimeError(f"{self.num_left} micro-batches are not computed yet")
        metrics = {
            "loss:sum": float(self._loss_E.sum(dtype=np.float64)),
            "tokens:sum": float(len(self._batch.count_P)),
        }
        if self._loss.has_bounds:
            metrics["clipped:sum"] = float(self._num_clipped)
        return LossResult(self._batch.by_datum(self._logprobs_E), metrics)

    def _targets(self, index_E: NDArray[np.int64]) -> Targets:
        """Return the loss's inputs for some targets."""
        batch = self._batch
        return Targets(
            weights_E=self._tensor(batch.weights_E[index_E]),
            datum_E=self._tensor(np.unique(batch.datum_E[index_E], return_inverse=True)[1]),
            inputs={name: self._tensor(value[index_E]) for name, value in batch.inputs.items()},
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._base.scorer.device)


# -- one pass for several adapters -----------------------------------------------------------------

_MOST_PADDED = 1.5
"""Columns of a pass for several adapters, as a multiple of their own."""


@dataclass(frozen=True)
class _Part:
    """Rows of one pass: of one loss, or filler rows."""

    micro: MicroBatch
    owner: LossPass | None

    @property
    def num_columns(self) -> int:
        return self.micro.input_ids_BT.shape[1]

    @property
    def num_rows(self) -> int:
        return self.micro.input_ids_BT.shape[0]


def choose_pass_mates(base: SharedBase, passes: Sequence[LossPass]) -> list[LossPass]:
    """Return the first loss, and others whose next micro-batch fits into the same pass.

    One that repeats an earlier computation gets no other company than it had.
    """
    chosen, backward = [passes[0]], passes[0].next().backward
    free = [entry for entry in passes if entry.past_company is None]
    for item in free[1:] if passes[0] in free else []:
        if item.next().backward == backward and _fit(base, [*chosen, item]):
            chosen.append(item)
    return chosen


def compute(base: SharedBase, passes: Sequence[LossPass]) -> None:
    """Compute the next micro-batches of losses in one pass, and add gradients to their adapters.

    One that repeats an earlier computation in company is computed among as many filler rows.
    """
    parts = [_Part(item.next().micro, item) for item in passes]
    past = passes[0].past_company
    if len(passes) == 1 and past is not None and past != ALONE:
        parts = _with_fillers(base, parts[0], past)
    joint = _concatenate([part.micro for part in parts])
    backward = passes[0].next().backward
    if backward:
        for entry in passes:
            entry.adapter.begin_gradients()
    with _in_use(base, parts):
        with torch.set_grad_enabled(backward):
            states_UD, place_N = base.scorer.states_UD(joint, logits=base.scorer.full_logits)
        gradient_UD = _read(base, passes, states_UD, place_N)
        if gradient_UD is not None:
            states_UD.backward(gradient_UD)
    for item, company in zip(passes, _companies(base, parts), strict=True):
        item.done(company)


def _read(
    base: SharedBase, passes: Sequence[LossPass], states_UD: Tensor, place_N: Tensor
) -> Tensor | None:
    """Compute each loss from its own states; return the gradient of all states, if any."""
    gradient_UD: Tensor | None = None
    first_n = first_u = 0
    for item in passes:
        own_N = place_N[first_n : first_n + len(item.next().micro.index_N)]
        end_u = int(own_N.max()) + 1  # columns are in the order of their rows
        own_U = slice(first_u, end_u)
        with base.layers.using(OneAdapter(item.adapter.by_layer)):
            slope_UD = item.read(states_UD[own_U], own_N - first_u)
        if slope_UD is not None:
            if gradient_UD is None:
                gradient_UD = torch.zeros_like(states_UD)
            gradient_UD[own_U] = slope_UD
        first_n, first_u = first_n + len(own_N), end_u
    return gradient_UD


def _in_use(base: SharedBase, parts: Sequence[_Part]) -> AbstractContextManager[None]:
    if len(parts) == 1 and (owner := parts[0].owner) is not None:
        return base.layers.using(OneAdapter(owner.adapter.by_layer))
    columns = max(part.num_columns for part in parts)
    flat = base.scorer.flat_rows
    shares = [
        RowShare(
            part.micro.num_tokens if flat else part.num_rows * columns,
            {} if part.owner is None else part.owner.adapter.by_layer,
        )
        for part in parts
    ]
    return base.layers.using(RowShares(shares))


def _companies(base: SharedBase, parts: Sequence[_Part]) -> list[Company]:
    """Return the company of each loss, in order."""
    columns = max(part.num_columns for part in parts)
    flat = base.scorer.flat_rows
    sizes = [part.micro.num_tokens if flat else part.num_rows for part in parts]
    collected: list[Company] = []
    for at, part in enumerate(parts):
        if part.owner is not None:
            before, behind = sum(sizes[:at]), sum(sizes[at + 1 :])
            collected.append(Company(before, behind, columns) if len(parts) > 1 else ALONE)
    return collected


def _fit(base: SharedBase, passes: Sequence[LossPass]) -> bool:
    micros = [item.next().micro for item in passes]
    if any(micro.images is not None for micro in micros):
        return False
    if base.scorer.flat_rows:
        return sum(micro.num_tokens for micro in micros) <= base.microbatch_tokens
    parts = [_Part(micro, None) for micro in micros]
    alone = sum(part.num_rows * part.num_columns for part in parts)
    padded = sum(part.num_rows for part in parts) * max(part.num_columns for part in parts)
    return padded <= min(base.microbatch_tokens, _MOST_PADDED * alone)


# -- rows ----------------------------------------------------------------------------------------


def _concatenate(micros: Sequence[MicroBatch]) -> MicroBatch:
    """Concatenate the rows of micro-batches; other fields are the first one's."""
    if len(micros) == 1:
        return micros[0]
    columns = max(micro.input_ids_BT.shape[1] for micro in micros)
    padded = [widened(micro, columns) for micro in micros]
    firsts = [0]
    for micro in padded:
        firsts.append(firsts[-1] + len(micro.input_ids_BT))
    rows = [micro.row_N + first for micro, first in zip(padded, firsts, strict=False)]
    return replace(
        padded[0],
        input_ids_BT=torch.cat([micro.input_ids_BT for micro in padded]),
        position_ids_BT=torch.cat([micro.position_ids_BT for micro in padded]),
        segment_ids_BT=torch.cat([micro.segment_ids_BT for micro in padded]),
        seen_until_BT=torch.cat([micro.seen_until_BT for micro in padded]),
        row_N=torch.cat(rows),
        source_col_N=torch.cat([micro.source_col_N for micro in padded]),
        segments=max(micro.segments for micro in padded),
        longest=max(micro.longest for micro in padded),
    )


def _with_fillers(base: SharedBase, part: _Part, company: Company) -> list[_Part]:
    """Return a part between filler rows that take the place of an earlier company."""
    before, behind, columns = company
    flat, device = base.scorer.flat_rows, base.scorer.device
    fillers = [_filler(size, columns, flat, device) for size in (before, behind)]
    matches = [
        _Part(fillers[0], None),
        _Part(widened(part.micro, columns), part.owner),
        _Part(fillers[1], None),
    ]
    return [item for item in matches if item.num_rows]


def _filler(size: int, columns: int, flat: bool, device: torch.device) -> MicroBatch:
    """Return `size` rows, or tokens in rows if `flat`, that predict no target."""
    rows = -(-size // columns) if flat else size
    column_BT = torch.arange(columns, device=device).expand(rows, columns)
    place_BT = torch.arange(rows, device=device)[:, None] * columns + column_BT
    real_BT = place_BT < size if flat else torch.ones_like(place_BT, dtype=torch.bool)
    ends_BT = real_BT.sum(1, keepdim=True).expand(rows, columns)
    return replace(
        MicroBatch.empty(device),
        input_ids_BT=torch.zeros_like(place_BT),
        position_ids_BT=torch.where(real_BT, column_BT, 0),
        segment_ids_BT=real_BT.long(),
        seen_until_BT=torch.where(real_BT, ends_BT, columns),
        longest=min(size, columns),
    )
