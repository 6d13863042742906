"""Sequences are divided over the ranks so that the slowest has little more to do than others."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.rank_batches import cost, longest_first, share_out, share_sequences

COSTS = st.lists(st.integers(1, 10_000), max_size=40)
HIDDEN = 64


def test_a_table_worked_out_by_hand() -> None:
    assert longest_first([7, 5, 4, 3, 3], 2) == [[0, 3], [1, 2, 4]]
    assert longest_first([2, 2, 2], 2) == [[0, 2], [1]]
    assert longest_first([], 3) == [[], [], []]


def test_the_cost_of_a_column_grows_with_the_length_of_its_sequence() -> None:
    assert cost(10, 2) == 12 * 10 + 100
    assert 2 * cost(1000, HIDDEN) < cost(2000, HIDDEN)


@given(costs=COSTS, ranks=st.integers(1, 8))
def test_each_item_is_on_one_rank_and_the_largest_load_is_bounded(
    costs: list[int], ranks: int
) -> None:
    shares = longest_first(costs, ranks)
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert shares == longest_first(costs, ranks)
    loads = [sum(costs[item] for item in share) for share in shares]
    # Whoever ends last took its last item while no other rank had less.
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=24),
    group=st.integers(1, 8),
    ranks=st.integers(1, 4),
)
def test_families_stay_together_only_where_the_slowest_rank_gains(
    sizes: list[tuple[int, int]], group: int, ranks: int
) -> None:
    families = [at // group for at in range(len(sizes))]
    prompts = [sizes[family * group][0] for family in families]
    lengths = [prompt + answer for prompt, (_, answer) in zip(prompts, sizes, strict=True)]

    def slowest(shares: list[list[int]]) -> int:
        return max(
            sum(
                cost(
                    prompts[family * group]
                    + sum(lengths[at] - prompts[at] for at in share if families[at] == family),
                    HIDDEN,
                )
                for family in {families[at] for at in share}
            )
            for share in shares
        )

    shares = share_out(prompts, lengths, families, ranks=ranks, hidden_size=HIDDEN)
    assert Counter(at for share in shares for at in share) == Counter(range(len(sizes)))
    spread = longest_first([cost(length, HIDDEN) for length in lengths], ranks)
    assert slowest(shares) <= slowest(spread)


def test_uneven_sequences_differ_by_little_where_equal_counts_differ_by_much() -> None:
    rng = np.random.default_rng(0)
    costs = [cost(int(length), 896) for length in rng.lognormal(6.5, 1.0, 512).clip(16, 8192)]
    loads = [sum(costs[at] for at in share) for share in longest_first(costs, 8)]
    assert max(loads) / min(loads) < 1.001
    counted = [sum(costs[rank::8]) for rank in range(8)]
    assert max(counted) / min(counted) > 1.1


@pytest.mark.parametrize(
    ("share_prompts", "shares"), [(True, [[0, 1], [2, 3]]), (False, [[0, 3], [1, 2]])]
)
def test_answers_to_one_long_prompt_are_computed_where_the_prompt_is(
    share_prompts: bool, shares: list[list[int]]
) -> None:
    def answer(prompt: int, length: int) -> TokenSequence:
        ids = np.array([prompt] * 200 + [9] * length)
        return TokenSequence(ids, np.array([0] * 200 + [1] * length))

    sequences = [answer(1, 20), answer(1, 19), answer(2, 2), answer(2, 1)]
    found = share_sequences(sequences, ranks=2, hidden_size=HIDDEN, share_prompts=share_prompts)
    assert found == shares
