"""Layers and output layers that compute by oneDNN have the values and gradients of torch's."""

from typing import cast

import pytest
import torch
from tinkermq.actors.policy.devices import TRAINED_WEIGHTS, can_use_onednn, multiply, use_onednn
from tinkermq.actors.training.output_layer import OutputLayer, score_tokens
from torch import Tensor, nn


def _gradients(layer: nn.Module, input: Tensor) -> list[Tensor]:
    output = cast(Tensor, layer(input))
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    leaves = [one for one in (input, *layer.parameters()) if one.requires_grad]
    return [output, *torch.autograd.grad(output, leaves, slope)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 48)])
def test_a_layer_has_the_values_and_gradients_of_torchs(
    shape: tuple[int, ...], frozen: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 33, bias=bias).requires_grad_(not frozen)
    input = torch.randn(shape, requires_grad=True)
    expected = _gradients(layer, input)
    use_onednn(layer, min_weights=48 * 33)
    made = _gradients(layer, input)
    assert "_Linear" in type(layer(input).grad_fn).__name__
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.inference_mode():
        torch.testing.assert_close(layer(input.detach()), expected[0].detach())


def test_layers_that_are_small_or_of_another_type_compute_as_before() -> None:
    layer = nn.Linear(8, 4)
    use_onednn(layer, min_weights=33)
    assert "_Linear" not in type(layer(torch.randn(2, 8)).grad_fn).__name__
    halves = nn.Linear(8, 4, dtype=torch.bfloat16)
    use_onednn(halves, min_weights=1)
    input = torch.randn(2, 8, dtype=torch.bfloat16)
    assert torch.equal(halves(input), nn.functional.linear(input, halves.weight, halves.bias))
    assert not can_use_onednn(input)


class _Router(nn.Linear):
    """A layer that answers more than a product, as some models' routers do."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return logits and the best of them."""
        logits = super().forward(input)
        return logits, logits.argmax(-1)


def test_layers_of_another_class_compute_what_they_did() -> None:
    router, input = _Router(8, 4), torch.randn(2, 8)
    expected = router(input)
    use_onednn(router, min_weights=1)
    assert all(map(torch.equal, router(input), expected))


@pytest.mark.parametrize("shape", [(2, 8), (2, 3, 8)])
def test_an_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    layer, input = nn.Linear(8, 4), torch.randn(shape)
    expected = _gradients(nn.Sequential(layer, nn.ReLU()), input)
    use_onednn(layer, min_weights=1)
    made = _gradients(nn.Sequential(layer, nn.ReLU(inplace=True)), input)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)])
def test_no_rows_and_a_single_one_compute_as_before(shape: tuple[int, ...]) -> None:
    layer = nn.Linear(8, 4)
    use_onednn(layer, min_weights=1)
    input = torch.randn(shape, requires_grad=True)
    output = layer(input)
    output.sum().backward()
    assert torch.equal(output, nn.functional.linear(input, layer.weight, layer.bias))
    assert layer.weight.grad is not None


def test_products_take_rows_of_any_strides() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(9, 6)[:, 1:5], torch.randn(4, 11).t()
    torch.testing.assert_close(multiply(left, right), left @ right.t())


@pytest.mark.parametrize("chunk_rows", [4, 100])
def test_a_large_output_layer_has_the_gradients_of_written_out_logits(chunk_rows: int) -> None:
    torch.manual_seed(0)
    num_words, width = 5000, 16  # more words than are added up at once
    assert num_words * width >= TRAINED_WEIGHTS
    states_UD = torch.randn(6, width, requires_grad=True)
    weight_VD = torch.randn(num_words, width, requires_grad=True)
    row_M, token_M = torch.arange(6), torch.randint(num_words, (6,))
    layer = OutputLayer(weight_VD, temperature=0.7, chunk_rows=chunk_rows)
    scores = score_tokens(states_UD, layer, row_M, token_M)
    logits_UV = states_UD @ weight_VD.t() / 0.7
    expected_M = logits_UV.log_softmax(-1)[row_M, token_M]
    torch.testing.assert_close(scores.logprobs_M, expected_M)
    leaves = [states_UD, weight_VD]
    made = torch.autograd.grad(scores.logprobs_M.sum(), leaves)
    expected = torch.autograd.grad(expected_M.sum(), leaves)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
