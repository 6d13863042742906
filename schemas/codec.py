"""msgpack with one extension type for numeric arrays, and limits that hold before allocation.

An array travels as extension type 1: a msgpack-packed pair (dtype string, shape) followed by its
little-endian bytes, and is decoded as a read-only NumPy view of the received payload, without a
copy. Nesting is bounded by the decoder's own stack (1,024 levels), the number of objects by the
size of a message. bfloat16 has no NumPy dtype: it travels as raw bytes in the weights' own format
and never here.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from .errors import MessageError

ARRAY_EXT = 1
MAX_MESSAGE_BYTES = 8 * 2**20
MAX_CONTAINER_LENGTH = 1_000_000
ARRAY_DTYPES = frozenset(
    {"<f2", "<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1"}
)
_HEADER: struct.Struct = struct.Struct("<BB")  # length of the dtype string, number of dimensions
_MAX_DIMS = 8
_DTYPES_BY_NAME: dict[bytes, "np.dtype[Any]"] = {
    name.encode(): np.dtype(name) for name in ARRAY_DTYPES
}
_SHAPES: list[struct.Struct] = [struct.Struct(f"<{ndim}Q") for ndim in range(_MAX_DIMS + 1)]
_packb = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpackb = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def pack(value: Any) -> bytes:
    """Pack plain values and NumPy arrays to msgpack.

    Raises MessageError when a value has no msgpack form.
    """
    try:
        return _packb(value, default=_pack_array, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(
            f"cannot pack a {type(value).__name__}: {error}",
            hint="send maps, lists, strings, numbers, bytes and NumPy arrays only",
        ) from error


def unpack(payload: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Unpack one msgpack value; arrays come back as read-only views of `payload`.

    Raises MessageError for a payload that is truncated, too large, too deep or not msgpack.
    """
    if len(payload) > max_bytes:
        raise MessageError(
            f"a payload of {len(payload):,} bytes is over the limit of {max_bytes:,}",
            hint="send large data as weights or in several messages",
        )
    try:
        return _unpackb(
            payload,
            ext_hook=_unpack_ext,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_CONTAINER_LENGTH,
            max_map_len=MAX_CONTAINER_LENGTH,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"the payload is not valid msgpack: {type(error).__name__}: {error}",
            hint="see docs/messages.md for the format of this subject",
        ) from error


def _pack_array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.generic):
        value = np.array(cast("Any", value))
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no msgpack form")
    shape: tuple[int, ...] = cast("Any", value).shape
    array = np.ascontiguousarray(cast("np.ndarray[Any, Any]", value))
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype = array.dtype.str
    if dtype not in ARRAY_DTYPES:
        raise TypeError(f"arrays of {array.dtype} do not travel")
    name = dtype.encode()
    head = _HEADER.pack(len(name), len(shape)) + name
    head += _SHAPES[len(shape)].pack(*shape)
    return msgpack.ExtType(ARRAY_EXT, head + array.tobytes())


def _unpack_ext(code: int, data: bytes) -> "np.ndarray[Any, Any]":
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
