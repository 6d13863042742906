"""A prompt and its responses: what a group of episodes of one conversation each is packed as.

Each response is a segment of its own that sees the prompt and itself. Equal responses, frequent
where answers are short, share one segment. Where experts are replayed, only what was computed with
the same ones is equal.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.vision import SeenImages
from .bins import first_fit_decreasing
from .layout import IntArray, See, TokenLayout, ranges
from .micro_batch import TokenSequence
from .row_writer import RowWriter


@dataclass(frozen=True)
class PromptUnit:
    """What goes into a row as a whole: a shared prompt and its responses, or one sequence."""

    prompt: NDArray[Any]
    copies: tuple[tuple[int, ...], ...]
    """Sequences, those together whose columns are the same."""
    length: int
    """Columns that it takes."""
    seen: SeenImages | None = None
    """The images of the prompt."""

    @property
    def members(self) -> list[int]:
        """Its sequences."""
        return [index for same in self.copies for index in same]

    def write(
        self, writer: RowWriter, sequences: Sequence[TokenSequence], layout: TokenLayout
    ) -> tuple[IntArray, IntArray]:
        """Write it into a row; return its generated tokens and the columns that predict them."""
        first = writer.num_used
        seqs = np.concatenate(self.copies)
        counts = layout.counts_S[seqs]
        index = ranges(layout.first_S[seqs], counts)
        shared = len(self.prompt) if len(self.copies) > 1 else 0
        if shared:
            start = writer.append([self.prompt], 0, np.array([shared]), first + self.length)
            writer.replay(start, _experts_of(sequences, [self.members[0]], 0, [shared]))
        ids = [
            sequences[same[0]].token_ids[shared : layout.totals[same[0]]] for same in self.copies
        ]
        lengths = np.array([len(part) for part in ids], dtype=np.int64)
        starts = writer.append(ids, shared, lengths)
        owners = [same[0] for same in self.copies]
        ends = [layout.totals[seq] for seq in owners]
        writer.replay(starts, _experts_of(sequences, owners, shared, ends))
        starts = np.repeat(starts, [len(same) for same in self.copies])
        columns = np.repeat(starts, counts) + layout.place_N[index] - shared - 1
        if shared:
            columns[np.cumsum(counts) - counts] = starts[0] - 1  # the prompt's end
        writer.show(first, self.seen)
        return index, columns


def _experts_of(
    sequences: Sequence[TokenSequence], chosen: Sequence[int], start: int, ends: Sequence[int]
) -> list[NDArray[Any] | None]:
    """Return the experts of some sequences' tokens from `start` on, where they are replayed."""
    found = ((sequences[seq].experts, end) for seq, end in zip(chosen, ends, strict=True))
    return [None if experts is None else experts[start:end] for experts, end in found]


def _key(sequence: TokenSequence, start: int, end: int) -> tuple[bytes, ...]:
    """Return what two sequences have in common there if the model computes the same for them."""
    ids = np.ascontiguousarray(sequence.token_ids[start:end], dtype=np.int64).tobytes()
    experts = sequence.experts
    return (ids,) if experts is None else (ids, experts[start:end].tobytes())


def make_prompt_units(
    sequences: Sequence[TokenSequence],
    layout: TokenLayout,
    row_tokens: int,
    share_prompts: bool,
    see: See,
) -> list[PromptUnit]:
    """Put the sequences of one prompt together, as far as they fit into a row."""
    prompts, totals = layout.prompts, layout.totals
    families: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        if totals[index]:
            same = (_key(sequence, 0, prompts[index]), sequence.images)
            families[same if share_prompts else (index,)].append(index)
    units: list[PromptUnit] = []
    for members in families.values():
        length = prompts[members[0]]
        prompt = sequences[members[0]].token_ids[:length]
        seen = see(sequences[members[0]])
        copies = _same_columns(members, sequences, layout)
        responses = [totals[same[0]] - length for same in copies]
        for part in _split_to_budget(responses, row_tokens - length):
            total = length + sum(responses[item] for item in part)
            units.append(PromptUnit(prompt, tuple(copies[item] for item in part), total, seen))
    return units


def _same_columns(
    members: Sequence[int], sequences: Sequence[TokenSequence], layout: TokenLayout
) -> list[tuple[int, ...]]:
    """Put together the sequences of one prompt that are equal but for their last token."""
    if len(members) == 1:
        return [(members[0],)]
    found: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for index in members:
        key = _key(sequences[index], layout.prompts[index], layout.totals[index])
        found[key].append(index)
    return [tuple(same) for same in found.values()]


def _split_to_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut a group whose responses do not fit beside one prompt; an oversized one stands alone."""
    small = [index for index, length in enumerate(lengths) if length <= budget]
    large = [[index] for index, length in enumerate(lengths) if length > budget]
    bins = first_fit_decreasing([lengths[index] for index in small], budget)
    return large + [sorted(small[index] for index in bin_) for bin_ in bins]
