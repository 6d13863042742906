"""The repeated layers of a model: what ranks gather, and torch.compile translates, one at a time.

Compiling one layer serves all of its kind: they share its code. Rows and columns are dynamic, so
that micro-batches of other sizes are not compiled anew. Hooks of FSDP2 and the recomputation of
activations stay outside of what is compiled.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any, cast

import torch
from torch import nn

from ....schemas.wire.errors import ConfigError

_MAX_VARIANTS = 64
"""Of one layer's code: with and without gradients, masks, dropout; more is an error of torch's."""


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers names as those not to be split, in order."""
    kinds: set[str] = set(cast(Any, model)._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def compile_layers(model: nn.Module) -> None:
    """Compile the decoder's layers at their first use; each is one graph, or an error.

    Raises ConfigError where torch cannot compile anything.
    """
    _require_compiler()
    torch.compiler.config.recompile_limit = _MAX_VARIANTS
    decoder: nn.Module = cast(Any, model).get_decoder()
    inside = {id(module) for module in decoder.modules()}
    for layer in repeated_layers(model):
        if id(layer) in inside:
            layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)


def _require_compiler() -> None:
    """Compile something small, where the models are computed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"learner.compile=true, and torch cannot compile on this machine: {reason}",
            hint="install a C++ compiler (Debian: g++) and Python's headers (python3-dev), or "
            "remove learner.compile",
        ) from error
