"""Muon moves hidden matrices as its formula says, and AdamW all the rest."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training.critic import ValueModel
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.optimizer import Muon, make_optimizer
from tinkermq.actors.training.parallel import Parallel
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.config.sections import LearnerConfig, LoraConfig
from torch import nn

from tests.support.models import make_tiny_model

torch.set_num_threads(1)

LEARNER = LearnerConfig(optimizer="muon", lr=0.01, weight_decay=0.1)
SHAPES = [(12, 40), (40, 12), (16, 16), (3, 8, 20)]
Gradients = list[np.ndarray]


def _plain(weight: np.ndarray, gradients: Gradients, rate: float) -> np.ndarray:
    """Update one matrix as the papers write it, in float64."""
    momentum = np.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        if tall := x.shape[0] > x.shape[1]:
            x = x.T
        x = x / max(np.linalg.norm(x), 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        update = x.T if tall else x
        weight = weight * (1 - rate * 0.1) - rate * 0.2 * math.sqrt(max(weight.shape)) * update
    return weight


def _moved(weight: np.ndarray, gradients: Gradients, dtype: str) -> torch.Tensor:
    parameter = nn.Parameter(torch.from_numpy(weight).float())
    learner = LEARNER.model_copy(update={"dtype": dtype})
    optimizer = Muon([parameter], None, learner, LEARNER.lr)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).float()
        optimizer.step()
    return parameter.detach()


def _drawn(shape: tuple[int, ...]) -> tuple[np.ndarray, Gradients]:
    rng = np.random.default_rng(len(shape))
    return rng.normal(size=shape), [rng.normal(size=shape) for _ in range(4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_moves_by_the_formula(shape: tuple[int, ...]) -> None:
    weight, gradients = _drawn(shape)
    if len(shape) == 2:
        expected = _plain(weight, gradients, LEARNER.lr)
    else:  # many matrices
        each = [_plain(weight[at], [g[at] for g in gradients], LEARNER.lr) for at in range(3)]
        expected = np.stack(each)
    made = _moved(weight, gradients, "float32").double().numpy()
    np.testing.assert_allclose(made, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_in_bfloat16_it_is_torchs_muon_to_the_bit(shape: tuple[int, ...]) -> None:
    weight, gradients = _drawn(shape)
    parameter = nn.Parameter(torch.from_numpy(weight).float())
    theirs = torch.optim.Muon(
        [parameter], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient).float()
        theirs.step()
    assert torch.equal(_moved(weight, gradients, "bfloat16"), parameter.detach())


# -- which weights those are -----------------------------------------------------------------------


def _matrices(model: nn.Module) -> set[str]:
    """Name the weights that Muon moves."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    optimizer = make_optimizer(model, LEARNER, 0.1)
    groups = {"muon" in group: group["params"] for group in optimizer.param_groups}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trained) == sum(map(len, groups.values()))
    return {names[id(weight)].rpartition("layers.")[2] for weight in groups[True]}


LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
DENSE = [*LAYER, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def _of_layers(names: list[str], ending: str = ".weight") -> set[str]:
    return {f"{layer}.{name}{ending}" for layer in (0, 1) for name in names}


def test_hidden_matrices_alone_are_made_orthogonal(folder: Path) -> None:
    model = load_model(ModelConfig(path=str(folder)), LEARNER)
    assert _matrices(model) == _of_layers(DENSE)
    value_model = ValueModel(model, LEARNER, Parallel())
    assert _matrices(value_model) == _of_layers(DENSE)


def test_so_are_both_matrices_of_an_adapter(folder: Path) -> None:
    config, lora = ModelConfig(path=str(folder)), LoraConfig(rank=2)
    made = _matrices(load_model(config, LEARNER, lora=lora))
    assert made == _of_layers([f"{name}.lora_{ab}.default" for name in DENSE for ab in "AB"])


def test_each_expert_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(make_tiny_model(tmp_path, "qwen3_moe"))), LEARNER)
    experts = _of_layers(["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "")
    assert _matrices(model) == _of_layers([*LAYER, "mlp.gate"]) | experts


def test_all_else_is_updated_by_adamw_to_the_bit(folder: Path) -> None:
    ours, plain = (load_model(ModelConfig(path=str(folder)), LEARNER) for _ in range(2))
    muon = make_optimizer(ours, LEARNER, LEARNER.lr)
    adamw: Any = make_optimizer(plain, LearnerConfig(weight_decay=0.1), LEARNER.lr)
    assert type(adamw) is torch.optim.AdamW
    for seed in range(3):
        for model, optimizer in ((ours, muon), (plain, adamw)):
            generator = torch.Generator().manual_seed(seed)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    hidden = _matrices(ours)
    for (name, made), wanted in zip(ours.named_parameters(), plain.parameters(), strict=True):
        is_hidden = name.rpartition("layers.")[2] in hidden
        assert torch.equal(made, wanted) != is_hidden, name
