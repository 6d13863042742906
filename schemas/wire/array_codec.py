"""Numeric arrays as msgpack extension type 1, imported with the first array.

Most processes send none and need not load NumPy.
"""

import math
import struct
from functools import lru_cache
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from .errors import MessageError

ARRAY_EXT = 1
ARRAY_DTYPES = frozenset(
    {"<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1"}
)
_HEADER: struct.Struct = struct.Struct("<BB")  # length of the dtype string, number of dimensions
_MAX_DIMS = 8
_DTYPES_BY_NAME: dict[bytes, "np.dtype[Any]"] = {
    name.encode(): np.dtype(name) for name in ARRAY_DTYPES
}
_NAMES_BY_DTYPE = {dtype: name for name, dtype in _DTYPES_BY_NAME.items()}
_SHAPES: list[struct.Struct] = [struct.Struct(f"<{ndim}Q") for ndim in range(_MAX_DIMS + 1)]
_extension = cast("Any", tuple).__new__
"""Creates an extension without the constructor's checks, which cost more than the array."""


def pack_array(value: Any) -> msgpack.ExtType:
    """Return an array or a NumPy scalar as an extension; TypeError for anything else."""
    if not isinstance(value, np.ndarray):
        if not isinstance(value, np.generic):
            raise TypeError(f"{type(value).__name__} has no msgpack form")
        value = np.array(cast("Any", value))
    array = cast("np.ndarray[Any, Any]", value)
    head = _head(array.dtype, array.shape)
    if head is None:
        array = _little_endian(array)
        head = _head(array.dtype, array.shape)
    return _extension(msgpack.ExtType, (ARRAY_EXT, cast("bytes", head) + array.tobytes()))


@lru_cache(1024)
def _head(dtype: "np.dtype[Any]", shape: tuple[int, ...]) -> bytes | None:
    """Return the header before the numbers, None for an unsupported dtype.

    Raises TypeError for too many dimensions.
    """
    if len(shape) > _MAX_DIMS:
        raise TypeError(f"arrays of {len(shape)} dimensions do not travel, at most {_MAX_DIMS} do")
    name = _NAMES_BY_DTYPE.get(dtype)
    if name is None:
        return None
    return bytes((len(name), len(shape))) + name + _SHAPES[len(shape)].pack(*shape)


def _little_endian(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a big-endian array as little-endian; TypeError for unsupported types."""
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _NAMES_BY_DTYPE:
        raise TypeError(f"arrays of {array.dtype} do not travel")
    return array


def unpack_array(code: int, data: bytes) -> "np.ndarray[Any, Any]":
    """Return an extension as a read-only array over `data`; MessageError if it is invalid."""
    if code != ARRAY_EXT:
        raise MessageError(f"unknown msgpack extension type {code}")
    try:
        header: tuple[int, int] = _HEADER.unpack_from(data, 0)
        name_len, ndim = header
        offset = _HEADER.size + name_len
        dtype = _DTYPES_BY_NAME.get(data[_HEADER.size : offset])
        if dtype is None or ndim > _MAX_DIMS:
            name = data[_HEADER.size : offset]
            raise MessageError(f"an array of dtype {name!r} with {ndim} dimensions is refused")
        shape: tuple[int, ...] = _SHAPES[ndim].unpack_from(data, offset)
    except struct.error as error:
        raise MessageError(f"an array's header is broken: {error}") from error
    offset += 8 * ndim
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - offset:
        raise MessageError(
            f"an array of shape {shape} and dtype {dtype} needs {count * dtype.itemsize} bytes, "
            f"the payload has {len(data) - offset}"
        )
    array = np.frombuffer(data, dtype, count, offset)
    return array if ndim == 1 else array.reshape(shape)
