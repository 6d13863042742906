"""msgpack with one extension type for numeric arrays, and limits that hold before allocation.

An array travels as extension type 1: a msgpack-packed pair (dtype string, shape) followed by its
little-endian bytes, and is decoded as a read-only NumPy view of the received payload, without a
copy. Nesting is bounded by the decoder's own stack (1,024 levels), the number of objects by the
size of a message. bfloat16 has no NumPy dtype: it travels as raw bytes in the weights' own format
and never here.
"""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import islice
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from .errors import MessageError

MAX_MESSAGE_BYTES = 8 * 2**20
MAX_CONTAINER_LENGTH = 1_000_000
MAX_CONTAINERS = 200_000
"""Lists and maps of one payload, empty ones included."""
MAX_JSON_COMMAS = 500_000
_SHOWN = 300
_MAX_DEPTH = 512
_MOST_SHOWN_BITS = 512
_packb = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpackb = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def pack(value: Any, *, plain: Callable[[Any], Any] | None = None) -> bytes:
    """Pack plain values and NumPy arrays to msgpack; `plain` may convert others.

    Raises MessageError for a value without a msgpack form.
    """
    try:
        return _packb(value, default=partial(_pack_other, plain), use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        if (large := _large_integer(value, "")) is not None:
            place, number = large
            raise MessageError(
                f"{place or 'the value'} is an integer of {number.bit_length()} bits, "
                f"{_digits(number)}: messages hold integers of 64 bits",
                hint="send a smaller number, or a text",
            ) from error
        raise MessageError(
            f"cannot pack a {type(value).__name__}: {error}",
            hint="send maps, lists, strings, numbers, bytes and NumPy arrays only",
        ) from error


def _large_integer(value: Any, place: str) -> tuple[str, int] | None:
    """Return place and value of the first integer that msgpack does not hold; None: there is none.

    Raises no error for values that are nested too deep: packing them failed for that reason.
    """
    level = [(place, value)]
    for _ in range(_MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for at, item in level:
            if isinstance(item, int) and not -(1 << 63) <= item < 1 << 64:
                return at, item
            if isinstance(item, Mapping):
                entries = cast("Mapping[Any, Any]", item).items()
                inner += [(f"{at}.{key!s:.40}".lstrip("."), part) for key, part in entries]
            elif isinstance(item, list | tuple):
                parts = cast("list[Any]", item)
                inner += [(f"{at}[{number}]", part) for number, part in enumerate(parts)]
        level = inner
    return None


def _digits(number: int) -> str:
    """Return the begin of a number; Python refuses to write very long ones."""
    return str(number) if number.bit_length() < _MOST_SHOWN_BITS else "too long to be shown"


def unpack(payload: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Unpack one msgpack value; arrays are read-only views of `payload`.

    Raises MessageError for a payload that is truncated, too large, too deep or not msgpack.
    """
    if len(payload) > max_bytes:
        raise too_large(len(payload), max_bytes)
    counting = _Counting() if len(payload) > MAX_CONTAINERS else None
    try:
        return _unpackb(
            payload,
            object_hook=counting,
            list_hook=counting,
            ext_hook=_unpack_other,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_CONTAINER_LENGTH,
            max_map_len=MAX_CONTAINER_LENGTH,
        )
    except MessageError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(
            f"the payload is not valid msgpack: {type(error).__name__}: {str(error)[:_SHOWN]}",
            hint="see docs/messages.md for the format of this subject",
        ) from error


def read_json(text: str | bytes) -> Any:
    """Read one untrusted JSON value; bytes are UTF-8.

    Raises MessageError if it is invalid, nests too deep, has too many values, or holds a lone
    surrogate.
    """
    comma = "," if isinstance(text, str) else b","
    if text.count(cast("Any", comma)) > MAX_JSON_COMMAS:
        raise MessageError(
            f"the JSON holds more than {MAX_JSON_COMMAS:,} commas",
            hint="send less at a time",
        )
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value: Any = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise MessageError("the JSON nests too deep") from error
    except UnicodeEncodeError as error:
        raise MessageError("a text of the JSON holds half a character (\\ud800 …)") from error
    except ValueError as error:
        raise MessageError(f"it is not valid JSON: {str(error)[:_SHOWN]}") from error
    return value


class _Counting:
    """Counts a payload's lists and maps: each takes one byte in it and many in memory."""

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MessageError(f"the payload holds more than {MAX_CONTAINERS:,} lists and maps")
        return value


def to_base64url(data: bytes) -> str:
    """Return bytes as text for URLs and file names, without padding (RFC 4648, section 5)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    """Return the bytes of such a text; raises ValueError."""
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def too_large(num_bytes: int, max_bytes: int) -> MessageError:
    """Return the error of a payload over its limit."""
    return MessageError(
        f"a payload of {num_bytes:,} bytes is over the limit of {max_bytes:,}",
        hint="send large data as weights or in several messages",
    )


def _pack_other(plain: Callable[[Any], Any] | None, value: Any) -> Any:
    if plain is not None and (replaced := plain(value)) is not value:
        return replaced
    if "numpy" not in sys.modules:  # then it is not an array
        raise TypeError(f"{type(value).__name__} has no msgpack form")
    return _arrays()[0](value)


def _unpack_other(code: int, data: bytes) -> Any:
    return _arrays()[1](code, data)


@cache
def _arrays() -> tuple[Callable[[Any], Any], Callable[[int, bytes], Any]]:
    """Return the array packer and unpacker, imported at first use."""
    from .array_codec import pack_array, unpack_array

    return pack_array, unpack_array


# Trees of maps, such as unvalidated configurations.


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overlaid with the leaves of `over`."""
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            result[key] = merged(cast("Mapping[str, Any]", inner), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result


# -- fitting into a message ------------------------------------------------------------------------
#
# Only texts for people are cut. A game's `info` is for people, except its numbers, which become
# metrics.

INFO_CUT = "info_cut"
"""Key in a cut `info`; its value is the original size: `{"bytes": 2000000, "keys": 3}`."""
_TEXTS = (1 << 16, 1 << 12, 1 << 9)
"""Lengths to which texts are cut: the largest that fits is used."""
_SHORT_BYTES = 1 << 9
"""Size of values that are never cut."""
_MOST_ITEMS = 10_000
"""Keys left in a cut `info`; larger lists and maps are cut as a whole."""


def most_bytes(max_payload_bytes: int, read_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Return the largest message that the server accepts and readers can read."""
    return min(max_payload_bytes, read_bytes)


def packed_bytes(value: Any) -> int:
    """Return the packed size of a value; raises MessageError."""
    return len(pack(value))


def cut_info(info: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return an `info` of about `most` bytes, with marks where it was cut.

    Texts are cut first, then the largest values are replaced. Numbers stay, so many of them may
    exceed `most`. Raises MessageError for an unsupported value.
    """
    size = packed_bytes(info)
    if size <= most:
        return dict(info)
    mark = {INFO_CUT: {"bytes": size, "keys": len(info)}}
    info = dict(islice(info.items(), _MOST_ITEMS))
    cut = dict(info)
    for characters in _TEXTS:
        cut = {**{key: _with_short_texts(value, characters) for key, value in info.items()}, **mark}
        if packed_bytes(cut) <= most:
            return cut
    sizes = {key: packed_bytes(value) for key, value in cut.items() if key != INFO_CUT}
    left = packed_bytes(cut)
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if left <= most or sizes[key] <= _SHORT_BYTES:
            break
        mark = _mark(f"{packed_bytes(info[key]):,} bytes")
        cut[key] = mark
        left += packed_bytes(mark) - sizes[key]
    return cut


def _with_short_texts(value: Any, characters: int) -> Any:
    """Return a value with all its texts and bytes cut to this length."""
    if isinstance(value, str):
        if len(value) <= characters:
            return value
        return value[:characters] + _mark(f"{len(value):,} characters")
    if isinstance(value, bytes | bytearray):
        return value if len(value) <= characters else _mark(f"{len(value):,} bytes")
    if isinstance(value, Mapping | list | tuple) and len(cast("Any", value)) > _MOST_ITEMS:
        return _mark(f"{len(cast('Any', value)):,} items")
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _with_short_texts(item, characters) for key, item in items}
    if isinstance(value, list | tuple):
        return [_with_short_texts(item, characters) for item in cast("list[Any]", value)]
    return value


def _mark(size: str) -> str:
    return f"[cut: it had {size}, more than fits into a message]"
