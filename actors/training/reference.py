"""The reference policy of the KL: frozen, or following the policy.

It is the run's initial model, or another model. With `ema` it moves towards the policy after each
step; with `reset_every` it is set to the policy every so many steps (as in ProRL, arXiv
2505.24864). A moving reference is part of checkpoints, so that resumed and replayed runs have the
same one.

The reference of an adapter is its base model, or the adapter's initial weights: no second model is
loaded, and only the adapter moves.
"""

# torch leaves some of its methods untyped, safetensors its paths.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...schemas.config.algorithm import ReferenceConfig
from ...schemas.wire.errors import ConfigError
from ..policy.lora import has_adapter, initial_adapter, other_adapter, policy_tensors
from .checkpoint_copy import REFERENCE
from .model import Scorer
from .parallel import divided


class Reference:
    """The reference of one policy."""

    def __init__(
        self,
        config: ReferenceConfig,
        model: nn.Module,
        path: str,
        scorer: Scorer,
        load: Callable[[str], Scorer],
    ) -> None:
        """`model` is the policy, loaded from `path` and scored by `scorer`.

        `load` opens a frozen model by its folder. Raises ConfigError for a model that cannot follow
        the policy because its weights have other shapes.
        """
        self._config = config
        self._model = model
        self.is_adapter = config.path is None and has_adapter(model)
        """Whether the policy's model computes the scores, with its adapter replaced meanwhile."""
        if self.is_adapter:
            self.scorer = scorer
            mine = policy_tensors(model)
            begun = zip(initial_adapter(model, path), mine.values(), strict=True)
            self._tensors = dict(zip(mine, (divided(*pair) for pair in begun), strict=True))
        else:
            self.scorer = load(config.path or path)
            self._tensors = dict(self.scorer.inside.model.named_parameters())
        if config.moves:
            self._check_alike()

    def _check_alike(self) -> None:
        mine = self._policy()
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in mine.items()}:
            raise ConfigError(
                f"algorithm.reference.path={self._config.path}: its weights have other shapes than "
                "the policy's, and it cannot follow it",
                hint="take a model of the same kind, or remove algorithm.reference.ema and "
                "reset_every",
            )

    def _policy(self) -> dict[str, Tensor]:
        if self.is_adapter:
            return policy_tensors(self._model)
        return dict(self._model.named_parameters())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[Scorer]:
        """Yield the scorer of the reference, for use within the block."""
        if not self.is_adapter:
            yield self.scorer
            return
        with other_adapter(self._model, list(self._tensors.values())):
            yield self.scorer

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the reference after a step, as configured."""
        config = self._config
        resets = bool(config.reset_every) and step % config.reset_every == 0
        if not resets and config.ema is None:
            return
        share = 1.0 if resets or config.ema is None else 1 - config.ema
        policy = self._policy()
        for name, tensor in self._tensors.items():
            if share == 1.0:
                tensor.copy_(policy[name])
            else:
                tensor.lerp_(policy[name].detach(), share)

    def moving(self) -> dict[str, Tensor]:
        """Return the moving tensors, by reference, for a checkpoint."""
        if not self._config.moves:
            return {}
        return {name: tensor.detach() for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def load(self, folder: Path) -> bool:
        """Load the moving tensors from a checkpoint; False if it has none that fit."""
        file = folder / REFERENCE
        if not self._config.moves:
            return True
        if not file.is_file():
            return False
        saved = load_file(file)
        for name, tensor in self._tensors.items():
            tensor.copy_(divided(saved[name], tensor))
        return True
