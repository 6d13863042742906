"""Micro-batches of several adapters in one forward and backward pass.

The rows of each lie beside those of the others, and each layer adds to them what their own adapter
says: no value of one reaches another. But how many rows there are decides in which order products
are added up, so that the last bits of a result depend on its company. It is noted with the result,
and a pass that is computed again stands among rows that nobody reads, as many as there were before
and behind it: it gives the same bits.

Shape letters: B rows, T columns of a row, N positions, U columns that predict, D hidden size.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ....schemas.tinker.operation import ALONE, Company
from ...training.micro_batch import MicroBatch
from .layers import RowShare, SharedBase
from .loss_pass import LossPass

_MOST_PADDED = 1.5
"""Columns of a pass over several, as a multiple of what each has alone."""


@dataclass(frozen=True)
class _Part:
    """Rows of one pass, or of nobody."""

    micro: MicroBatch
    owner: LossPass | None

    @property
    def num_columns(self) -> int:
        return self.micro.input_ids_BT.shape[1]

    @property
    def num_rows(self) -> int:
        return self.micro.input_ids_BT.shape[0]


def those_that_fit(base: SharedBase, passes: Sequence[LossPass]) -> list[LossPass]:
    """Return the first pass, and those of the others whose next micro-batch fits beside its.

    One that is computed as it once was has the company that it had.
    """
    chosen, backward = [passes[0]], passes[0].next().backward
    free = [one for one in passes if one.past_company is None]
    for one in free[1:] if passes[0] in free else []:
        if one.next().backward == backward and _fit(base, [*chosen, one]):
            chosen.append(one)
    return chosen


def compute(base: SharedBase, passes: Sequence[LossPass]) -> None:
    """Compute the next micro-batch of each pass in one, and add gradients to their adapters.

    One pass that was computed before in a company stands among as many rows now.
    """
    parts = [_Part(one.next().micro, one) for one in passes]
    past = passes[0].past_company
    if len(passes) == 1 and past is not None and past != ALONE:
        parts = _among(base, parts[0], past)
    joint = _joined([part.micro for part in parts])
    backward = passes[0].next().backward
    if backward:
        for one in passes:
            one.adapter.begin_gradients()
    with _in_use(base, parts):
        with torch.set_grad_enabled(backward):
            states_UD, place_N = base.scorer.states_UD(joint, logits=base.scorer.full_logits)
        gradient_UD = _read(base, passes, states_UD, place_N)
        if gradient_UD is not None:
            states_UD.backward(gradient_UD)
    for one, company in zip(passes, _companies(base, parts), strict=True):
        one.done(company)


def _read(
    base: SharedBase, passes: Sequence[LossPass], states_UD: Tensor, place_N: Tensor
) -> Tensor | None:
    """Let each pass read its own states; return the gradient of all, if there is one."""
    gradient_UD: Tensor | None = None
    first_n = first_u = 0
    for one in passes:
        own_N = place_N[first_n : first_n + len(one.next().micro.index_N)]
        end_u = int(own_N.max()) + 1  # columns stand in the order of their rows
        own_U = slice(first_u, end_u)
        with base.in_use.using(one.adapter.by_layer):
            slope_UD = one.read(states_UD[own_U], own_N - first_u)
        if slope_UD is not None:
            if gradient_UD is None:
                gradient_UD = torch.zeros_like(states_UD)
            gradient_UD[own_U] = slope_UD
        first_n, first_u = first_n + len(own_N), end_u
    return gradient_UD


def _in_use(base: SharedBase, parts: Sequence[_Part]) -> AbstractContextManager[None]:
    if len(parts) == 1 and (owner := parts[0].owner) is not None:
        return base.in_use.using(owner.adapter.by_layer)
    columns = max(part.num_columns for part in parts)
    flat = base.scorer.flat_rows
    shares = [
        RowShare(
            part.micro.num_tokens if flat else part.num_rows * columns,
            {} if part.owner is None else part.owner.adapter.by_layer,
        )
        for part in parts
    ]
    return base.in_use.sharing(shares)


def _companies(base: SharedBase, parts: Sequence[_Part]) -> list[Company]:
    """Return beside how much each pass was computed, in order."""
    columns = max(part.num_columns for part in parts)
    flat = base.scorer.flat_rows
    sizes = [part.micro.num_tokens if flat else part.num_rows for part in parts]
    found: list[Company] = []
    for at, part in enumerate(parts):
        if part.owner is not None:
            before, behind = sum(sizes[:at]), sum(sizes[at + 1 :])
            found.append(Company(before, behind, columns) if len(parts) > 1 else ALONE)
    return found


def _fit(base: SharedBase, passes: Sequence[LossPass]) -> bool:
    micros = [one.next().micro for one in passes]
    if any(micro.images is not None for micro in micros):
        return False
    if base.scorer.flat_rows:
        return sum(micro.num_tokens for micro in micros) <= base.microbatch_tokens
    parts = [_Part(micro, None) for micro in micros]
    alone = sum(part.num_rows * part.num_columns for part in parts)
    padded = sum(part.num_rows for part in parts) * max(part.num_columns for part in parts)
    return padded <= min(base.microbatch_tokens, _MOST_PADDED * alone)


# -- rows ----------------------------------------------------------------------------------------


def _joined(micros: Sequence[MicroBatch]) -> MicroBatch:
    """Lay the rows of micro-batches below each other; what tells of sequences is the first's."""
    if len(micros) == 1:
        return micros[0]
    columns = max(micro.input_ids_BT.shape[1] for micro in micros)
    padded = [_padded(micro, columns) for micro in micros]
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
    )


def _padded(micro: MicroBatch, columns: int) -> MicroBatch:
    more = columns - micro.input_ids_BT.shape[1]
    if not more:
        return micro
    return replace(
        micro,
        input_ids_BT=functional.pad(micro.input_ids_BT, (0, more)),
        position_ids_BT=functional.pad(micro.position_ids_BT, (0, more)),
        segment_ids_BT=functional.pad(micro.segment_ids_BT, (0, more)),
        seen_until_BT=functional.pad(micro.seen_until_BT, (0, more), value=columns),
    )


def _among(base: SharedBase, part: _Part, company: Company) -> list[_Part]:
    """Return a part among rows that nobody reads, as it once stood among those of others."""
    before, behind, columns = company
    flat, device = base.scorer.flat_rows, base.scorer.device
    fillers = [_filler(size, columns, flat, device) for size in (before, behind)]
    found = [
        _Part(fillers[0], None),
        _Part(_padded(part.micro, columns), part.owner),
        _Part(fillers[1], None),
    ]
    return [one for one in found if one.num_rows]


def _filler(size: int, columns: int, flat: bool, device: torch.device) -> MicroBatch:
    """Return so many rows, or tokens in rows, that predict nothing."""
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
    )
