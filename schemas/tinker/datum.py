"""What an operation of the Tinker API trains on, how, and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Datum:
    """One sequence, and what its loss needs for each position."""

    tokens: NDArray[np.int32]
    """[T], the model's input."""
    inputs: Mapping[str, NDArray[Any]]
    """By name: `target_tokens` int64 [T] or [T, K]; `weights`, `logprobs`, `advantages` … float32
    of the same shape."""


@dataclass(frozen=True)
class LoraSpec:
    """Which adapter a model trains."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class AdamParams:
    """AdamW at one step, as `torch.optim.AdamW` has it."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Norm above which gradients are scaled down; 0 for none."""


@dataclass(frozen=True)
class LossResult:
    """What a loss was, by datum and in sum."""

    logprobs: list[NDArray[np.float32]]
    """Of each datum, in the shape of its `target_tokens`."""
    metrics: dict[str, float]
    """By names with one colon, whose suffix says how a client combines chunks: `loss:sum` is always
    there."""
