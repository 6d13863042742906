"""Which tensors new weights must have: their names, shapes, sizes, and which of them are one."""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from ....schemas.wire.errors import EngineError
from ...models.weight_tensors import DTYPES, TensorSource

_NAMES_SHOWN = 8


class WeightNames:
    """The tensors that change from version to version; a tied one has several names."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name, on whatever device."""
        self.tensors: list[torch.Tensor] = []
        self.names: list[list[str]] = []
        """The names of each of `tensors`."""
        seen: dict[int, int] = {}
        for name, tensor in weights.items():
            index = seen.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
                self.names.append([])
            self.names[index].append(name)

    def check(self, given: Mapping[str, TensorSource]) -> None:
        """Raise EngineError listing the names that are missing, unknown, or of the wrong shape."""
        known = {name for names in self.names for name in names}
        problems: list[str] = []
        missing = [names[0] for names in self.names if not any(n in given for n in names)]
        extra = sorted(name for name in given if name not in known)
        wrong: list[str] = []
        for live, names in zip(self.tensors, self.names, strict=True):
            for name in names:
                shape = shape_of(given[name]) if name in given else tuple(live.shape)
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

    def once(self, given: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return each tensor under one of its names.

        Raises EngineError for a dtype or size that cannot be, and where names of one tensor are
        given different ones.
        """
        found: dict[str, TensorSource] = {}
        for names in self.names:
            first, *others = [name for name in names if name in given]
            found[first] = given[first]
            for other in others:
                both = [as_tensor(given[name]).float() for name in (first, other)]
                if not torch.equal(*both):
                    raise EngineError(
                        f"{first} and {other} are one tensor in this model, the new weights give "
                        "two",
                        hint="learner and generator must both tie their embeddings",
                    )
        return found


def dtype_of(source: TensorSource) -> torch.dtype:
    """Return the dtype of new weights; EngineError for one that is not known."""
    if isinstance(source, torch.Tensor):
        return source.dtype
    dtype = DTYPES.get(source[0])
    if dtype is None:
        raise EngineError(
            f"weights of dtype {source[0]!r} cannot be loaded",
            hint=f"publish one of {', '.join(DTYPES)}",
        )
    return dtype


def bytes_of(source: TensorSource) -> np.ndarray:
    """Return new weights as uint8[N], row-major; EngineError for a size that does not fit."""
    if isinstance(source, torch.Tensor):
        flat = source.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return flat.numpy()
    data = np.frombuffer(source[2], dtype=np.uint8)
    expected = prod(source[1]) * dtype_of(source).itemsize
    if data.size != expected:
        raise EngineError(
            f"a tensor of shape {list(source[1])} has {data.size} bytes instead of {expected}",
            hint="the payload is damaged: fetch it again",
        )
    return data


def as_tensor(source: TensorSource) -> torch.Tensor:
    """Return new weights as a tensor; EngineError where they are none."""
    if isinstance(source, torch.Tensor):
        return source.detach()
    tensor = torch.empty(tuple(source[1]), dtype=dtype_of(source))
    if tensor.numel():
        np.copyto(tensor.view(-1).view(torch.uint8).numpy(), bytes_of(source))
    else:
        bytes_of(source)
    return tensor


def shape_of(source: TensorSource) -> tuple[int, ...]:
    """Return the shape of new weights."""
    return tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source[1])
