"""What the trainer needs of whoever computes: adapters of many models on one base.

All of it runs in one thread, one call after the other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ...schemas.tinker.datum import AdamParams, Datum, LoraSpec, LossResult


class Adapters(Protocol):
    """The adapters, with their gradients and optimisers."""

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Make a new adapter; raises ConfigError."""
        ...

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float | str],
        *,
        backward: bool = True,
        operation: str = "",
    ) -> LossResult:
        """Compute a loss and, with `backward`, add its gradients; raises DataError, ConfigError.

        `operation` is what it is called when the step behind it fails because of it.
        """
        ...

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Take a step with the gradients since the last; raises when one of these failed."""
        ...

    def save(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Write an adapter to a folder that is not there yet, whole or not at all."""
        ...

    def load(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """Make an adapter what a folder holds; the model need not be there. Raises ModelError."""
        ...

    def evict(self, model_id: str) -> None:
        """Forget a model."""
        ...
