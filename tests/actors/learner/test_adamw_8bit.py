"""Moments in 8 bits: rounded as the paper says, in a quarter of the memory, near to AdamW."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.learner.training.optimizers import adamw_8bit
from tinkermq.actors.learner.training.optimizers.adamw_8bit import (
    AdamW8bit,
    dequantised,
    dynamic_map,
    quantised,
)
from tinkermq.actors.learner.training.optimizers.matrices import MatrixOptimizer
from tinkermq.schemas.config.learner import LearnerConfig
from torch import Tensor, nn

torch.set_num_threads(1)

LEARNER = LearnerConfig(optimizer="adamw_8bit", lr=1e-3, weight_decay=0.1)
CPU = torch.device("cpu")


def _optimizer(weight: nn.Parameter) -> MatrixOptimizer:
    rule = AdamW8bit(LEARNER.betas, LEARNER.eps)
    return MatrixOptimizer([weight], [], rule, LEARNER, LEARNER.lr)


def _gradients(shape: tuple[int, ...], num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(shape, generator=generator)
    return [0.3 * mean + torch.randn(shape, generator=generator) for _ in range(num)]


def _train(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()


def test_the_map_has_twice_as_many_values_for_each_power_of_ten() -> None:
    signed, unsigned = dynamic_map(True, CPU), dynamic_map(False, CPU)
    for codes, of_largest in ((signed, 64), (unsigned, 128)):
        assert len(codes.unique()) == 256
        assert codes.max() == 1
        assert (codes == 0).sum() == 1
        counts = [int(((codes > 10**-e / 10) & (codes < 10**-e)).sum()) for e in range(7)]
        assert counts == [of_largest >> e for e in range(7)]
    assert unsigned.min() == 0
    assert torch.equal(signed[signed < 0], -signed[(signed > 0) & (signed < 1)].flip(0))


@given(
    num_columns=st.integers(1, 600),
    exponent=st.integers(-9, 9),
    signed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_value_becomes_the_nearest_of_its_blocks_map(
    num_columns: int, exponent: int, signed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.normal(size=(3, num_columns)) ** 3 * 10.0**exponent).float()
    values = values if signed else values.abs()
    codes, scales = quantised(values, signed=signed)
    assert codes.dtype == torch.uint8
    num_blocks = -(-num_columns // 256)
    assert scales.shape == (3, num_blocks)
    made = dequantised(codes, scales, signed=signed)
    size = -(-num_columns // num_blocks)
    scale = scales.repeat_interleave(size, dim=1)[:, :num_columns]
    nearest = (values[..., None] / scale[..., None] - dynamic_map(signed, CPU)).abs().amin(-1)
    error = (made / scale - values / scale).abs()
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-6)


def _plain(weight: Tensor, gradients: list[Tensor]) -> np.ndarray:
    """Update a matrix of one block a row as the paper says, in float64."""
    w = weight.double().numpy()
    mean, square = np.zeros_like(w), np.zeros_like(w)

    def rounded(values: np.ndarray, signed: bool) -> np.ndarray:
        codes = dynamic_map(signed, CPU).double().numpy()
        scale = np.abs(values).max(-1, keepdims=True).clip(1e-12)
        nearest = np.abs((values / scale)[..., None] - codes).argmin(-1)
        return codes[nearest] * scale

    for step, gradient in enumerate(gradients, 1):
        g = gradient.double().numpy()
        m, v = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        w = w * (1 - 1e-3 * 0.1)
        w = w - 1e-3 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        mean, square = rounded(m, True), rounded(v, False)
    return w


def test_a_matrix_moves_by_the_formula() -> None:
    weight = nn.Parameter(torch.randn(7, 100))
    gradients = _gradients((7, 100), 4)
    expected = _plain(weight.detach(), gradients)
    _train(_optimizer(weight), weight, gradients)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=1e-6)


def test_the_first_update_is_adamws_and_later_ones_stay_near() -> None:
    begun = torch.randn(64, 300)
    ours, plain = (nn.Parameter(begun.clone()) for _ in range(2))
    eight = _optimizer(ours)
    adamw = torch.optim.AdamW([plain], lr=1e-3, weight_decay=0.1)
    gradients = _gradients((64, 300), 30)
    _train(eight, ours, gradients[:1])
    _train(adamw, plain, gradients[:1])
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)
    _train(eight, ours, gradients[1:])
    _train(adamw, plain, gradients[1:])
    apart, moved = (ours - plain).detach().norm(), (plain.detach() - begun).norm()
    assert 0 < float(apart / moved) < 0.03


def test_a_weight_takes_two_bytes_of_state() -> None:
    weight = nn.Parameter(torch.randn(64, 1024))
    optimizer = _optimizer(weight)
    _train(optimizer, weight, _gradients((64, 1024), 1))
    num_bytes = sum(value.nbytes for value in optimizer.state[weight].values())
    assert num_bytes / weight.numel() == pytest.approx(2 + 2 * 4 / 256, abs=1e-3)


def test_in_pieces_it_comes_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = torch.randn(3, 9, 20)
    made: list[Tensor] = []
    for at_once in (1 << 24, 100):
        monkeypatch.setattr(adamw_8bit, "_VALUES_AT_ONCE", at_once)
        weight = nn.Parameter(begun.clone())
        _train(_optimizer(weight), weight, _gradients((3, 9, 20), 3))
        made.append(weight.detach())
    assert torch.equal(*made)
