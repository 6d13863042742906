"""Data, adapter, optimiser settings and results of training operations of the Tinker API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Datum:
    """One sequence, and its loss's inputs for each position."""

    tokens: NDArray[np.int32]
    """[T], the model's input."""
    inputs: Mapping[str, NDArray[Any]]
    """By name: `target_tokens` int64 [T] or [T, K]; `weights`, `logprobs`, `advantages` … float32
    of the same shape."""


@dataclass(frozen=True)
class LoraSpec:
    """The adapter of a model."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class AdamParams:
    """Settings of `torch.optim.AdamW` for one step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm to which larger gradients are scaled down; 0: they are not."""


@dataclass(frozen=True)
class LossResult:
    """The result of a loss."""

    logprobs: list[NDArray[np.float32]]
    """Of each datum, in the shape of its `target_tokens`."""
    metrics: dict[str, float]
    """By name, with a suffix that says how clients combine chunks; always with `loss:sum`."""
