"""The scale of a loss whose gradients are computed in float16 (arXiv 1710.03740).

Small gradients are 0 in float16, so the loss is multiplied before the backward pass and the
gradients divided after it. A gradient that is not finite then says that the scale is too large: the
update is left out, and the scale halved. The numbers are those of `torch.amp.GradScaler`.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import math
from typing import Any

import torch
from torch import Tensor

from .....schemas.wire.errors import ModelError

FIRST_SCALE = 65536.0
GROWTH_INTERVAL = 2000
"""Updates in a row with finite gradients, after which the scale is doubled."""
_LEAST_SCALE = 1.0
SCALE = "loss_scale"
GOOD_UPDATES = "loss_scale_good_updates"


class LossScale:
    """The scale of one optimiser's loss, and 1 where none is needed.

    It lies among the settings of the optimiser, with which it is saved and loaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: str) -> None:
        """Begin anew for what is computed in `dtype`."""
        self._optimizer = optimizer
        self._is_needed = dtype == "float16"
        if self._is_needed:
            self._set(FIRST_SCALE, 0)

    @property
    def value(self) -> float:
        """By what the loss is multiplied."""
        return self._settings.get(SCALE, FIRST_SCALE) if self._is_needed else 1.0

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, which are as many times too large."""
        (loss * self.value if self._is_needed else loss).backward()

    def unscale(self) -> None:
        """Make the gradients those of the loss."""
        if not self._is_needed:
            return
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.mul_(1 / self.value)

    def is_good(self, norm: float) -> bool:
        """Whether gradients of that norm can be used; the next scale hangs on it.

        Raises ModelError where no scale is small enough.
        """
        good = math.isfinite(norm)
        if self._is_needed:
            num = self._settings.get(GOOD_UPDATES, 0) + 1 if good else 0
            grown = 2.0 if num == GROWTH_INTERVAL else 1.0
            self._set(self.value * (grown if good else 0.5), num % GROWTH_INTERVAL)
            self._require_a_use()
        return good

    def _require_a_use(self) -> None:
        if self.value < _LEAST_SCALE:
            raise ModelError(
                "no gradient was finite in float16, however small the loss was made: what this "
                "model computes is over 65504, the largest number there",
                hint="set learner.dtype=bfloat16, or float32, in which updates that are not finite "
                "are left out one by one",
            )

    def numbers(self, whose: str) -> dict[str, float]:
        """Name the scale as a metric, where there is one."""
        return {f"{whose}/loss_scale": self.value} if self._is_needed else {}

    @property
    def _settings(self) -> dict[str, Any]:
        return self._optimizer.param_groups[0]

    def _set(self, scale: float, good_updates: int) -> None:
        for group in self._optimizer.param_groups:
            group.update({SCALE: scale, GOOD_UPDATES: good_updates})
