"""New weights are prepared beside the running ones; taking them over only exchanges pointers.

Two sets of weights exist from the first update on: the one that decodes and the one that is
filled next. So a swap costs microseconds whatever the model's size, and an update that is refused
has touched nothing.
"""

from collections.abc import Mapping

import numpy as np
import torch

from ....models.weight_tensors import TensorSource, as_tensor, bytes_of, dtype_of
from ..weight_names import WeightNames


class DoubleBuffer:
    """The second set of the weights that change: all of a model, or those of its adapter.

    `prepare` may run in any thread while the model decodes; `swap` runs in the engine's thread.
    One update at a time.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name; a tied one has several names."""
        self._names = WeightNames(weights)
        self._spare: list[torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of one set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._names.tensors)

    def prepare(self, tensors: Mapping[str, TensorSource]) -> list[torch.Tensor]:
        """Copy and convert new weights into the spare set; return it.

        Raises EngineError listing the names that are missing, unknown, or of the wrong shape.
        """
        self._names.check(tensors)
        given = self._names.once(tensors)
        spare, self._spare = self._spare, None
        fresh = spare or [torch.empty_like(t, requires_grad=False) for t in self._names.tensors]
        for target, source in zip(fresh, given.values(), strict=True):
            _fill(target, source)
        if fresh and fresh[0].is_cuda:
            torch.cuda.synchronize(fresh[0].device)
        return fresh

    def swap(self, fresh: list[torch.Tensor]) -> None:
        """Make a prepared set the model's weights; the old set is filled next time."""
        old = [tensor.data for tensor in self._names.tensors]
        for tensor, new in zip(self._names.tensors, fresh, strict=True):
            tensor.data = new
        self._spare = old


def _fill(target: torch.Tensor, source: TensorSource) -> None:
    in_place = target.device.type == "cpu" and target.is_contiguous() and target.numel()
    if not isinstance(source, torch.Tensor) and in_place and dtype_of(source) == target.dtype:
        np.copyto(target.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        target.copy_(as_tensor(source))
