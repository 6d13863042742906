"""Which rank computes which sequences: longest processing time first, on cost cL + L².

The linear layers of a decoder cost 24 D² for each of L columns, attention 4 D L (D: hidden size):
in units of 4 D that is cL + L² with c = 6 D. Sequences that begin with the same prompt share its
columns where they lie on the same rank, so whole families are kept together where that leaves the
slowest rank less to do than spreading them. So it is with the rows of agents' episodes that begin
alike (`trees`).
"""

from collections import defaultdict
from collections.abc import Sequence

from .micro_batch import TokenSequence
from .trees import DepthFirst


def cost(num_columns: int, hidden_size: int) -> int:
    """Return what a piece of a row costs, in units of 4 · hidden_size operations per layer."""
    return 6 * hidden_size * num_columns + num_columns**2


def longest_first(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Give each item, the most costly first, to the rank with the least so far.

    Returns the items of each rank, ascending. The largest load is at most 4/3 − 1/(3 · ranks) of
    the least possible (Graham 1969). Deterministic: equal items keep their order, and of equal
    ranks the first takes the item.
    """
    loads, items = [0] * ranks, [list[int]() for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        rank = loads.index(min(loads))
        loads[rank] += costs[item]
        items[rank].append(item)
    return [sorted(found) for found in items]


def share_out(
    prompts: Sequence[int],
    lengths: Sequence[int],
    families: Sequence[int],
    *,
    ranks: int,
    hidden_size: int,
) -> list[list[int]]:
    """Return the sequences of each rank, ascending.

    `prompts` and `lengths` are columns of each sequence, prompt included in the length; those of
    one family share their prompt's. Every sequence is on one rank; deterministic.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for sequence, family in enumerate(families):
        members[family].append(sequence)

    def load(sequences: Sequence[int]) -> int:
        columns: dict[int, int] = {}
        for sequence in sequences:
            before = columns.get(families[sequence], prompts[sequence])
            columns[families[sequence]] = before + lengths[sequence] - prompts[sequence]
        return sum(cost(number, hidden_size) for number in columns.values())

    whole = list(members.values())
    together = [
        sorted(sequence for family in rank for sequence in whole[family])
        for rank in longest_first([load(family) for family in whole], ranks)
    ]
    apart = longest_first([cost(length, hidden_size) for length in lengths], ranks)
    return min(together, apart, key=lambda shares: max(map(load, shares)))


def share_sequences(
    sequences: Sequence[TokenSequence], *, ranks: int, hidden_size: int, share_prompts: bool
) -> list[list[int]]:
    """Return the sequences of each rank, ascending; see `share_out`."""
    lengths = [len(sequence.mask) for sequence in sequences]
    if share_prompts and any(sequence.branches for sequence in sequences):
        shared, trees = _in_trees(sequences, lengths)
        return share_out(shared, lengths, trees, ranks=ranks, hidden_size=hidden_size)
    prompts = [int(sequence.mask.argmax()) for sequence in sequences]
    known: dict[bytes, int] = {}
    families = [
        known.setdefault(sequence.token_ids[:length].tobytes(), at) if share_prompts else at
        for at, (sequence, length) in enumerate(zip(sequences, prompts, strict=True))
    ]
    return share_out(prompts, lengths, families, ranks=ranks, hidden_size=hidden_size)


def _in_trees(
    sequences: Sequence[TokenSequence], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the columns that each shares with those of its family, and its family.

    A family begins where a sequence has less than half in common with the one before it: under one
    system prompt all tasks are one tree, and different episodes share little else.
    """
    walk = DepthFirst.of(sequences, lengths, lambda _: None)
    shared, families = [0] * len(sequences), [0] * len(sequences)
    begins: list[int] = []
    for seq, common in zip(walk.order, walk.shared, strict=True):
        if 2 * common < lengths[seq]:
            begins.append(seq)
        shared[seq], families[seq] = common, len(begins) - 1
    # Whichever is met first is counted whole: it takes the place of the one that the family begins
    # with.
    for family, first in enumerate(begins):
        shared[first] = shared[families.index(family)]
    return shared, families
