"""Arrays as the Tinker API's protobuf messages hold them: little-endian bytes and a type."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ....schemas.wire.errors import DataError

FLOAT32: Final = 1
_INT64, _INT32, _BFLOAT16 = 2, 3, 4
_TYPES: Final[dict[int, Any]] = {FLOAT32: "<f4", _INT64: "<i8", _INT32: "<i4"}
MAX_ELEMENTS: Final = 1 << 26
"""Of one array: a sparse one could name any size in a few bytes."""


def read_tensor(tensor: Any, *, what: str) -> NDArray[Any]:
    """Return a `Tensor` message as an array: integers as int64, all else as float32.

    Raises DataError for bytes that do not fit the shape, and for a type that there is not.
    """
    shape = tuple(int(size) for size in tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise DataError(f"{what} cannot have the shape {shape}", hint=f"up to {MAX_ELEMENTS:,}")
    which = tensor.WhichOneof("encoding")
    if which == "dense":
        flat = _values(tensor.dense, tensor.dtype, what)
        wanted = shape or (len(flat),)
        if math.prod(wanted) != len(flat):
            raise DataError(f"{what} has {len(flat)} values for the shape {wanted}")
        return flat.reshape(wanted)
    if which == "sparse_csr":
        return _from_csr(tensor.sparse_csr, tensor.dtype, shape, what)
    raise DataError(f"{what} has no values", hint="send it dense or as sparse CSR")


def _values(raw: bytes, dtype: int, what: str) -> NDArray[Any]:
    if dtype == _BFLOAT16:
        halves = _from_bytes(raw, "<u2", what).astype("<u4")
        return (halves << np.uint32(16)).view("<f4")
    if dtype not in _TYPES:
        raise DataError(f"{what} is of type {dtype}", hint="float32, bfloat16, int32 or int64")
    values = _from_bytes(raw, _TYPES[dtype], what)
    return values if dtype == FLOAT32 else values.astype(np.int64)


def _from_bytes(raw: bytes, dtype: str, what: str) -> NDArray[Any]:
    if len(raw) % np.dtype(dtype).itemsize:
        raise DataError(f"{what} has {len(raw)} bytes, which are no values of type {dtype}")
    return np.frombuffer(raw, dtype)


def _from_csr(csr: Any, dtype: int, shape: Sequence[int], what: str) -> NDArray[Any]:
    values = _values(csr.values, dtype, what)
    rows = _from_bytes(csr.crow_indices, "<i8", what)
    columns = _from_bytes(csr.col_indices, "<i8", what)
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(f"{what} is no sparse array of the shape {tuple(shape)}")
    counts = np.diff(rows)
    whole = len(rows) > 0 and rows[0] == 0 and rows[-1] == len(values) and bool((counts >= 0).all())
    if not whole or bool(((columns < 0) | (columns >= shape[1])).any()):
        raise DataError(f"{what} has indices outside the shape {tuple(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_batch(target: Any, arrays: Sequence[NDArray[np.float32]]) -> None:
    """Put arrays, alike but for their first size, into a `BatchedTensor` message."""
    packed = [np.ascontiguousarray(array, dtype="<f4") for array in arrays]
    offsets = np.zeros(len(packed) + 1, dtype="<i8")
    np.cumsum([array.nbytes for array in packed], out=offsets[1:])
    target.data = b"".join(array.tobytes() for array in packed)
    target.offsets = offsets.tobytes()
    target.dtype = FLOAT32
    if packed:
        target.trailing_shape.extend(packed[0].shape[1:])
