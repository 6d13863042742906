"""The fused output layer gives the scores and gradients of logits that are written out."""

import math
from typing import Any

import pytest
import torch
from tinkermq.actors.training.output_layer import OutputLayer, score_tokens
from torch import Tensor

torch.set_num_threads(1)

U, D, V, M = 11, 8, 19, 30


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return states, weights, biases, and tokens in rows, some of them twice and in any order."""
    torch.manual_seed(0)
    states_UD = torch.randn(U, D, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(V, D, requires_grad=True)
    bias_V = torch.randn(V, requires_grad=True)
    row_M, token_M = torch.randint(U, (M,)), torch.randint(V, (M,))
    row_M[:3], token_M[:3] = 4, 5
    return states_UD, weight_VD, bias_V, row_M, token_M


def _written_out(
    states_UD: Tensor, layer: OutputLayer, row_M: Tensor, token_M: Tensor
) -> tuple[Tensor, Tensor]:
    logits_UV = states_UD
    if layer.weight_VD is not None:
        logits_UV = states_UD @ layer.weight_VD.to(states_UD.dtype).t()
    if layer.bias_V is not None:
        logits_UV = logits_UV + layer.bias_V.to(states_UD.dtype)
    log_softmax_UV = (logits_UV.float() / layer.temperature).log_softmax(-1)
    entropy_U = -(log_softmax_UV.exp() * log_softmax_UV).sum(-1)
    return log_softmax_UV[row_M, token_M], entropy_U


def _gradients(logprobs_M: Tensor, entropy_U: Tensor | None, leaves: list[Tensor]) -> list[Tensor]:
    total = (logprobs_M * torch.linspace(-1, 2, len(logprobs_M))).sum()
    if entropy_U is not None:
        total = total + (entropy_U * torch.linspace(1, -1, len(entropy_U))).sum()
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_scores_and_gradients_are_those_of_whole_logits(
    chunk_rows: int, temperature: float, with_bias: bool, entropy: bool
) -> None:
    states_UD, weight_VD, bias_V, row_M, token_M = _inputs()
    layer = OutputLayer(weight_VD, bias_V if with_bias else None, temperature, chunk_rows)
    scores = score_tokens(states_UD, layer, row_M, token_M, entropy_gradient=entropy)
    logprobs_M, entropy_U = _written_out(states_UD, layer, row_M, token_M)
    torch.testing.assert_close(scores.logprobs_M, logprobs_M)
    torch.testing.assert_close(scores.entropy_U, entropy_U)
    assert scores.entropy_U.requires_grad is entropy
    leaves = [states_UD, weight_VD, *([bias_V] if with_bias else [])]
    made = _gradients(scores.logprobs_M, scores.entropy_U if entropy else None, leaves)
    expected = _gradients(logprobs_M, entropy_U if entropy else None, leaves)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_logits_have_the_same_scores_and_gradients() -> None:
    states_UD, *_, row_M, token_M = _inputs()
    row_M, token_M = row_M, token_M % D
    for chunk_rows in (3, 100):
        layer = OutputLayer(temperature=0.5, chunk_rows=chunk_rows)
        scores = score_tokens(states_UD, layer, row_M, token_M)
        expected = _written_out(states_UD, layer, row_M, token_M)
        torch.testing.assert_close(scores.logprobs_M, expected[0])
        made = _gradients(scores.logprobs_M, None, [states_UD])
        torch.testing.assert_close(made, _gradients(expected[0], None, [states_UD]))


def test_gradients_of_16_bits_add_up_over_chunks_in_32() -> None:
    states_UD, weight_VD, _, row_M, token_M = _inputs(torch.bfloat16)
    found: list[list[Tensor]] = []
    for chunk_rows in (1, 100):
        layer = OutputLayer(weight_VD, None, 1.0, chunk_rows)
        scores = score_tokens(states_UD, layer, row_M, token_M)
        assert scores.logprobs_M.dtype == torch.float32
        found.append(_gradients(scores.logprobs_M, None, [states_UD, weight_VD]))
    assert [gradient.dtype for gradient in found[0]] == [torch.bfloat16, torch.float32]
    expected = _written_out(states_UD, OutputLayer(weight_VD), row_M, token_M)[0]
    plain = _gradients(expected, None, [states_UD, weight_VD])
    for made in found:
        for one, other in zip(made, plain, strict=True):
            scale = float(other.abs().max())
            torch.testing.assert_close(one, other, atol=0.02 * scale, rtol=0.02)


def test_a_frozen_layer_has_no_gradient_and_the_states_have_theirs() -> None:
    states_UD, weight_VD, _, row_M, token_M = _inputs()
    layer = OutputLayer(weight_VD.detach(), None, 1.0, 4)
    score_tokens(states_UD, layer, row_M, token_M).logprobs_M.sum().backward()
    assert states_UD.grad is not None
    expected = _written_out(states_UD, layer, row_M, token_M)[0]
    [wanted] = torch.autograd.grad(expected.sum(), [states_UD])
    torch.testing.assert_close(states_UD.grad, wanted)


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_a_gradient_that_is_added_in_place_is_the_one_that_autograd_gets(chunk_rows: int) -> None:
    states_UD, weight_VD, _, row_M, token_M = _inputs()
    found: list[Tensor | None] = []
    for in_place in (False, True):
        layer = OutputLayer(weight_VD, None, 1.0, chunk_rows, adds_to_gradient=in_place)
        weight_VD.grad = None
        for _ in range(2):  # as over two micro-batches
            score_tokens(states_UD, layer, row_M, token_M).logprobs_M.sum().backward()
        found.append(weight_VD.grad)
    assert float(found[0].abs().max()) > 0  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_the_likeliest_tokens_are_told_without_a_gradient(chunk_rows: int) -> None:
    states_UD, weight_VD, _, row_M, token_M = _inputs()
    layer = OutputLayer(weight_VD, None, 1.0, chunk_rows)
    scores = score_tokens(states_UD, layer, row_M, token_M, top_k=3)
    top: Any = (states_UD @ weight_VD.t()).log_softmax(-1).topk(3, -1)
    torch.testing.assert_close(scores.top_logprobs_UK, top.values)
    assert torch.equal(scores.top_ids_UK, top.indices)
    assert not scores.top_logprobs_UK.requires_grad


def _entropy(logits_UV: Tensor) -> Tensor:
    none = torch.empty(0, dtype=torch.int64)
    return score_tokens(logits_UV, OutputLayer(), none, none, entropy_gradient=True).entropy_U


def test_tokens_that_cannot_occur_add_nothing_to_the_entropy_nor_to_its_gradient() -> None:
    logits = torch.tensor([[math.log(3), 0.0, -math.inf, 1.0]], requires_grad=True)
    few = logits.detach()[:, [0, 1, 3]].requires_grad_()
    for each in (logits, few):
        _entropy(each).sum().backward()
    torch.testing.assert_close(_entropy(logits), _entropy(few))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, [0, 1, 3]], few.grad)
    assert float(logits.grad[0, 2]) == 0.0


def test_entropy_is_that_of_the_distribution() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3), 0.0, -1e9, -1e9]])
    half = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    torch.testing.assert_close(_entropy(logits), torch.tensor([math.log(4), half]))
