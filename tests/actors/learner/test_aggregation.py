"""Aggregation: tables, and any cut into micro-batches gives the value of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.training.losses import (
    AGGREGATIONS,
    Denominators,
    LossInputs,
    aggregate,
    compute_loss,
)
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.variants import variants

LOSS = torch.tensor([1.0, 2.0, 3.0, 10.0])
SEQ = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 8),
    ],
)
def test_modes_weigh_tokens_and_sequences_as_named(mode, expected):
    denominators = Denominators.of(SEQ, constant_length=8)
    assert float(aggregate(mode, LOSS, SEQ, 2, denominators)) == pytest.approx(expected)


def test_sequences_without_tokens_are_not_counted():
    seq_N = torch.tensor([0, 2, 2])
    denominators = Denominators.of(seq_N)
    assert (denominators.tokens, denominators.sequences) == (3, 2)
    value = aggregate("seq-mean-token-mean", torch.tensor([4.0, 1.0, 3.0]), seq_N, 4, denominators)
    assert float(value) == pytest.approx((4 + 2) / 2)


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_an_empty_micro_batch_adds_nothing(mode):
    none = torch.zeros(0, requires_grad=True)
    value = aggregate(mode, none, torch.zeros(0, dtype=torch.int64), 0, Denominators(4, 2, 8))
    value.backward()
    assert float(value.detach()) == 0


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="loss_agg=token_mean") as caught:
        aggregate("token_mean", LOSS, SEQ, 2, Denominators.of(SEQ))
    assert "token-mean" in caught.value.hint


@st.composite
def batches_cut_into_parts(draw):
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    part_of_S = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return lengths, part_of_S, draw(st.integers(0, 1000))


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("mode", variants(sorted(AGGREGATIONS), "token-mean"))
@given(case=batches_cut_into_parts())
def test_any_cut_between_sequences_gives_the_same_total_and_gradients(mode, loss, case):
    lengths, part_of_S, seed = case
    generator = torch.Generator().manual_seed(seed)
    seq_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old_N, start_N, advantages_N = torch.randn(
        3, len(seq_N), generator=generator, dtype=torch.float64
    )
    denominators = Denominators.of(seq_N, constant_length=5)

    def total(parts):
        logprobs_N = start_N.clone().requires_grad_()
        value = torch.zeros((), dtype=torch.float64)
        for part_S in parts:
            chosen_N = part_S[seq_N]
            local = part_S.cumsum(0) - 1
            inputs = LossInputs(
                logprobs_N=logprobs_N[chosen_N],
                advantages_N=advantages_N[chosen_N],
                old_logprobs_N=old_N[chosen_N],
                behaviour_logprobs_N=old_N[chosen_N],
                seq_N=local[seq_N[chosen_N]],
                num_seqs=int(part_S.sum()),
            )
            loss_N, _ = compute_loss(loss, inputs)
            value = value + aggregate(mode, loss_N, inputs.seq_N, inputs.num_seqs, denominators)
        return value, torch.autograd.grad(value, logprobs_N)[0]

    part_of_S = torch.tensor(part_of_S)
    whole, whole_gradient = total([torch.ones_like(part_of_S, dtype=torch.bool)])
    parts, parts_gradient = total([part_of_S == part for part in range(4)])
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parts_gradient, whole_gradient)
