"""Tensors as they come off the wire, for engines to load."""

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import torch

from ...schemas.wire.errors import EngineError

TensorSource: TypeAlias = "torch.Tensor | tuple[str, Sequence[int], bytes | bytearray | memoryview]"
"""A tensor, or (dtype name such as `bfloat16`, shape, little-endian row-major bytes)."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
