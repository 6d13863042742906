"""New weights are prepared beside the running ones; taking them over only exchanges pointers.

Two sets of weights exist from the first update on: the one that decodes and the one that is
filled next. So a swap costs microseconds whatever the model's size, and an update that is refused
has touched nothing.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from ...schemas.errors import EngineError
from .engine import TensorSource

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES_SHOWN = 8


class ShadowWeights:
    """The second set of the weights that change: all of a model, or those of its adapter.

    `prepare` may run in any thread while the model decodes; `swap` runs in the engine's thread.
    One update at a time.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name; a tied one has several names."""
        self._live: list[torch.Tensor] = []
        self._names: list[list[str]] = []
        self._spare: list[torch.Tensor] | None = None
        seen: dict[int, int] = {}
        for name, tensor in weights.items():
            index = seen.setdefault(id(tensor), len(self._live))
            if index == len(self._live):
                self._live.append(tensor)
                self._names.append([])
            self._names[index].append(name)

    @property
    def num_bytes(self) -> int:
        """Size of one set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._live)

    def prepare(self, tensors: Mapping[str, TensorSource]) -> list[torch.Tensor]:
        """Copy and convert new weights into the spare set; return it.

        Raises EngineError listing the names that are missing, unknown, or of the wrong shape.
        """
        self._check(tensors)
        spare, self._spare = self._spare, None
        fresh = spare or [torch.empty_like(t, requires_grad=False) for t in self._live]
        for target, names in zip(fresh, self._names, strict=True):
            given = [name for name in names if name in tensors]
            _fill(target, tensors[given[0]])
            for other in given[1:]:
                _check_tied(target, given[0], other, tensors[other])
        if fresh and fresh[0].is_cuda:
            torch.cuda.synchronize(fresh[0].device)
        return fresh

    def swap(self, fresh: list[torch.Tensor]) -> None:
        """Make a prepared set the model's weights; the old set is filled next time."""
        old = [tensor.data for tensor in self._live]
        for tensor, new in zip(self._live, fresh, strict=True):
            tensor.data = new
        self._spare = old

    def _check(self, tensors: Mapping[str, TensorSource]) -> None:
        known = {name for names in self._names for name in names}
        problems: list[str] = []
        missing = [names[0] for names in self._names if not any(n in tensors for n in names)]
        extra = sorted(name for name in tensors if name not in known)
        wrong: list[str] = []
        for live, names in zip(self._live, self._names, strict=True):
            for name in names:
                shape = _shape(tensors[name]) if name in tensors else tuple(live.shape)
                if shape != tuple(live.shape):
                    wrong.append(f"{name} {list(shape)}, the model's is {list(live.shape)}")
        for what, names in (("missing", missing), ("unknown", extra), ("wrong shape", wrong)):
            if names:
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                problems.append(f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
        if problems:
            raise EngineError(
                f"the new weights do not fit the model: {'; '.join(problems)}",
                hint="learner and generator must run the same model",
            )


def _shape(source: TensorSource) -> tuple[int, ...]:
    return tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source[1])


def _fill(target: torch.Tensor, source: TensorSource) -> None:
    if isinstance(source, torch.Tensor):
        target.copy_(source.detach())
        return
    dtype = _DTYPES.get(source[0])
    if dtype is None:
        raise EngineError(
            f"weights of dtype {source[0]!r} cannot be loaded",
            hint=f"publish one of {', '.join(_DTYPES)}",
        )
    if dtype == target.dtype and target.device.type == "cpu" and target.is_contiguous():
        _copy_bytes(target, source[1], source[2])
        return
    staged = torch.empty(tuple(source[1]), dtype=dtype)
    _copy_bytes(staged, source[1], source[2])
    target.copy_(staged)


def _copy_bytes(
    target: torch.Tensor, shape: Sequence[int], buffer: bytes | bytearray | memoryview
) -> None:
    data = np.frombuffer(buffer, dtype=np.uint8)
    expected = prod(shape) * target.element_size()
    if data.size != expected:
        raise EngineError(
            f"a tensor of shape {list(shape)} has {data.size} bytes instead of {expected}",
            hint="the payload is damaged: fetch it again",
        )
    if expected:
        np.copyto(target.view(-1).view(torch.uint8).numpy(), data)


def _check_tied(target: torch.Tensor, first: str, name: str, source: TensorSource) -> None:
    other = torch.empty_like(target)
    _fill(other, source)
    if not torch.equal(target, other):
        raise EngineError(
            f"{first} and {name} are one tensor in this model, the new weights give two",
            hint="learner and generator must both tie their embeddings",
        )
