"""Fit groups into a message: cut what only people read, and name the rest.

A game's `info` is for people, except its numbers, which become metrics. Texts in it are cut first,
then whole values; numbers stay.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

from .codec import MAX_MESSAGE_BYTES, pack

CUT = "info_cut"
"""Key of an `info` that was cut; its value says what it had: `{"bytes": 2000000, "keys": 3}`."""
_TEXTS = (1 << 16, 1 << 12, 1 << 9)
"""Lengths to which texts are cut: the largest that fits."""
_SHORT_BYTES = 1 << 9
"""Size of values that are never cut."""
_MOST_ITEMS = 10_000
"""Keys left in a cut `info`; larger lists and maps are cut as a whole."""


def most_bytes(max_payload_bytes: int, read_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Return the largest message that a server accepts and readers can read."""
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
    mark = {CUT: {"bytes": size, "keys": len(info)}}
    info = dict(islice(info.items(), _MOST_ITEMS))
    cut = dict(info)
    for characters in _TEXTS:
        cut = {**{key: _with_short_texts(value, characters) for key, value in info.items()}, **mark}
        if packed_bytes(cut) <= most:
            return cut
    sizes = {key: packed_bytes(value) for key, value in cut.items() if key != CUT}
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
