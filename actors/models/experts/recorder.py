"""Recording, where tokens are generated, which experts read them.

Shape letters: X tokens of a forward pass, L layers with experts, K experts that read a token.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .routers import ExpertShape, routers_of, shape_of


class RouterRecorder:
    """Notes what the routers of a model choose in its latest forward pass."""

    def __init__(self, model: nn.Module) -> None:
        """Listen to the routers; ModelError for a model whose choices cannot be recorded."""
        self.shape: ExpertShape = shape_of(model)
        self._chosen: dict[int, Tensor] = {}
        for layer, router in enumerate(routers_of(model)):
            router.register_forward_hook(partial(self._note, layer))

    def take(self) -> NDArray[np.uint8]:
        """Return the choices of the latest pass, once: uint8[X, L, K], in the order of its tokens.

        Within a token's experts the order is the router's own, the likeliest first.
        """
        chosen = [self._chosen.pop(layer) for layer in range(self.shape.layers)]
        return torch.stack(chosen, 1).to(torch.uint8).cpu().numpy()

    def _note(self, layer: int, _router: nn.Module, _args: Any, output: Any) -> None:
        self._chosen[layer] = output[2]
