"""The learning rate at a step."""

import math

from ....schemas.config.learner import LearnerConfig
from ....schemas.wire.errors import ConfigError


def _decay(kind: str, progress: float) -> float:
    """Fall from 1 at progress 0 to 0 at progress 1."""
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ConfigError(
        f"learner.schedule={kind} does not exist", hint="choose constant, linear or cosine"
    )


def learning_rate(
    step: int,
    *,
    base: float,
    kind: str = "constant",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_ratio: float = 0.0,
) -> float:
    """Give the learning rate of `step` (from 0).

    It rises linearly over `warmup_steps`, reaching `base` at the last of them; no step has 0.
    Then it stays, or falls to `min_ratio * base` at the last step and stays there.
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    if kind == "constant":
        return base
    if total_steps is None:
        raise ConfigError(
            f"learner.schedule={kind} needs a known number of steps",
            hint="set training.num_steps, or learner.schedule=constant",
        )
    span = max(total_steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / span, 1.0)
    return base * (min_ratio + (1.0 - min_ratio) * _decay(kind, progress))


def rate_of(learner: LearnerConfig, step: int, base: float, total_steps: int) -> float:
    """Give the learning rate of training step `step` (from 1), as the learner is configured."""
    return learning_rate(
        step - 1,
        base=base,
        kind=learner.schedule,
        warmup_steps=learner.warmup_steps,
        total_steps=total_steps,
        min_ratio=learner.min_lr_ratio,
    )
