"""Tensors as they come off the wire, for engines to load."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

TensorSource: TypeAlias = "torch.Tensor | tuple[str, Sequence[int], bytes | bytearray | memoryview]"
"""A tensor, or (dtype name such as `bfloat16`, shape, little-endian row-major bytes)."""


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
