"""Functions of the user, loaded by `module:function` or an entry point.

They have the signature of the library's functions and run in the learner's process. Every return
value is checked, so that a faulty function ends the job with an error that names it and the value.

Shape letters: N generated tokens.
"""

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Literal

import torch
from torch import Tensor

from ...schemas.wire.errors import ConfigError, TinkermqError, root_cause
from ...schemas.wire.foreign import blaming, look_here, place_of, words_of
from .advantages import AdvantageInputs
from .losses import LossInputs, TokenLoss
from .off_policy import Correction, CorrectionInputs

Kind = Literal["advantage", "loss", "correction", "mask", "filter", "curriculum"]
ENTRY_POINTS = "tinkermq.algorithms"
"""Group under which packages register functions by a short name."""
_LATER = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
_CHECK = "test it with `tinkermq algorithm check {target}`"


class CustomFunction:
    """One function of the user."""

    def __init__(self, kind: Kind, target: str) -> None:
        """Import the function; raises ConfigError with the import's error."""
        self.key = f"{'training' if kind == 'curriculum' else 'algorithm'}.own_{kind}={target}"
        self._hint = _CHECK.format(target=target)
        self._call = self._find(target)

    def advantage(self, inputs: AdvantageInputs) -> Tensor:
        """Return float32[N], the advantage of each token. Raises ConfigError."""
        advantages_N = self._vector(self.called(inputs), len(inputs.seq_N), "advantages")
        return advantages_N.detach().float()

    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, with gradient, and no statistics. Raises ConfigError."""
        loss_N = self._vector(self.called(inputs), len(inputs.seq_N), "losses")
        if len(loss_N) and not loss_N.requires_grad:
            raise self.wrong(
                "returned losses without a gradient: nothing would be learnt",
                "compute them from inputs.logprobs_N, without detach() or item()",
            )
        return loss_N, {}

    def correction(self, inputs: CorrectionInputs) -> Correction:
        """Return the weight of each token, 0 to drop it. Raises ConfigError."""
        weight_N = self._vector(self.called(inputs), len(inputs.seq_N), "weights").detach()
        if bool((weight_N < 0).any()):
            raise self.wrong(f"returned a negative weight: {float(weight_N.min()):g}")
        return Correction(weight_N, inputs.old_logprobs_N)

    def mask(self, inputs: CorrectionInputs) -> Tensor:
        """Return whether each token is trained: float32[N] of 0 and 1. Raises ConfigError."""
        kept_N = self.called(inputs)
        if isinstance(kept_N, Tensor) and kept_N.dtype == torch.bool:
            kept_N = kept_N.float()
        kept_N = self._vector(kept_N, len(inputs.seq_N), "marks").detach()
        if not bool(((kept_N == 0) | (kept_N == 1)).all()):
            raise self.wrong("returned marks that are neither 0 nor 1", "return a bool tensor")
        return kept_N

    def _find(self, target: str) -> Callable[[Any], Any]:
        module_name, _, name = self._place(target).partition(":")
        look_here()

        def blame(error: BaseException) -> ConfigError:
            place = place_of(error, (__file__,))
            return ConfigError(
                f"{self.key} cannot be imported: {words_of(error)}",
                hint=f"{f'raised at {place}; ' if place else ''}see that `python -c 'import "
                f"{module_name}'` works where the learner runs",
            )

        with blaming(blame):
            function = getattr(importlib.import_module(module_name), name, None)
        if not callable(function):
            raise ConfigError(
                f"{self.key}: module {module_name} has no function {name!r}",
                hint="name a function of the module, as module:function",
            )
        if any(kind(function) for kind in _LATER):
            raise ConfigError(
                f"{self.key} is async or a generator, but is called within a step",
                hint="write it with def, and return the value",
            )
        return function

    def _place(self, target: str) -> str:
        """Return `module:function` of a function registered by a package under a short name."""
        if ":" in target:
            return target
        there = {
            entry_point.name: entry_point.value for entry_point in entry_points(group=ENTRY_POINTS)
        }
        if target not in there:
            raise ConfigError(
                f"{self.key} is registered by no package here",
                hint=f"registered under {ENTRY_POINTS}: {', '.join(sorted(there)) or 'nothing'}; "
                "or write module:function",
            )
        return there[target]

    def called(self, inputs: object) -> Any:
        """Return the function's result; raises ConfigError with its error and the location of it."""
        with blaming(self.failure):
            try:
                return self._call(inputs)
            except torch.OutOfMemoryError as error:
                full = error
        raise full  # not an error of the function: the step is retried in smaller micro-batches

    def failure(self, error: BaseException) -> TinkermqError:
        """Return the ConfigError for an error in the function or in its result."""
        ours = root_cause(error)
        if isinstance(ours, TinkermqError):
            return ours
        place = place_of(error, (__file__,))
        return self.wrong(f"raised {words_of(error)} ({place or 'within a library'})")

    def _vector(self, value: Any, num: int, what: str) -> Tensor:
        if not isinstance(value, Tensor):
            raise self.wrong(f"returned a {type(value).__name__} in place of a tensor of {what}")
        if value.shape != (num,):
            raise self.wrong(
                f"returned {what} of shape {list(value.shape)} for {num} tokens",
                f"return one value for each token: shape [{num}]",
            )
        if not value.is_floating_point():
            raise self.wrong(f"returned {what} of {value.dtype}, which are not real numbers")
        if not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise self.wrong(f"returned {count} {what} of {num} that are NaN or infinite")
        return value

    def wrong(self, what: str, hint: str = "") -> ConfigError:
        """Return the ConfigError for an unusable result."""
        return ConfigError(f"{self.key} {what}", hint="; ".join(filter(None, (hint, self._hint))))


def custom_function(kind: Kind, target: str | None) -> CustomFunction | None:
    """Return the function that a key names; None if the key is empty. Raises ConfigError."""
    return None if target is None else CustomFunction(kind, target)
