"""`tinkermq decode`: one msgpack payload from a pipe as text that people can read.

`nats sub --translate "tinkermq decode" 'tmq.v1.job.>'` starts it once for each message, so this
module imports nothing that is slow. Payloads of other programs on the same server (JSON, text) are
printed unchanged.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ...schemas.wire.codec import MAX_MESSAGE_BYTES, unpack
from ...schemas.wire.errors import ConfigError, MessageError

SHOWN_ELEMENTS = 8
SHOWN_ITEMS = 20
SHOWN_CHARACTERS = 400


def decode(*, json: bool = False, full: bool = False) -> int:
    """Print one msgpack payload from standard input as text; arrays as dtype[shape] and values.

    Use it with the NATS command line: `nats sub --translate "tinkermq decode" 'tmq.v1.job.>'`.

    Parameters
    ----------
    json
        Print JSON; arrays become maps of dtype, shape and values.
    full
        Show whole arrays, lists and strings.
    """
    flags = [*(["--json"] if json else []), *(["--full"] if full else [])]
    return run(flags)


def run(flags: Sequence[str]) -> int:
    """Decode standard input; see `decode`."""
    unknown = set(flags) - {"--json", "--full"}
    if unknown:
        raise ConfigError(
            f"tinkermq decode has no option {sorted(unknown)[0]}", hint="it has --json and --full"
        )
    payload = sys.stdin.buffer.read(MAX_MESSAGE_BYTES + 1)
    sys.stdout.write(render(payload, as_json="--json" in flags, full="--full" in flags) + "\n")
    return 0


def render(payload: bytes, *, as_json: bool = False, full: bool = False) -> str:
    """Return a payload as text.

    Raises MessageError when it is neither msgpack nor text.
    """
    if not payload:
        return "null" if as_json else "(empty payload)"
    try:
        value = unpack(payload)
    except MessageError:
        text = _as_text(payload)
        if text is None:
            raise
        return text
    if as_json:
        import json

        return json.dumps(_plain(value), allow_nan=True, ensure_ascii=False)
    return "\n".join(_lines(value, full=full))


def _as_text(payload: bytes) -> str | None:
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char.isspace() for char in text) else None


def _lines(value: Any, *, full: bool) -> Iterator[str]:
    """Yield `value` in the manner of YAML, one scalar or array a line."""
    if isinstance(value, Mapping) and value:
        for key, inner in cast("Mapping[str, Any]", value).items():
            yield from _labelled(f"{key}:", inner, full=full)
    elif isinstance(value, list) and value:
        items = cast("list[Any]", value)
        shown = items if full else items[:SHOWN_ITEMS]
        for inner in shown:
            yield from _labelled("-", inner, full=full)
        if len(shown) < len(items):
            yield f"… {len(items) - len(shown)} more of {len(items)}"
    else:
        yield _scalar(value, full=full)


def _labelled(label: str, value: Any, *, full: bool) -> Iterator[str]:
    inner = list(_lines(value, full=full))
    if isinstance(value, (Mapping, list)) and value:
        yield label
        yield from (f"  {line}" for line in inner)
        return
    yield f"{label} {inner[0]}"
    yield from (f"    {line}" for line in inner[1:])


def _scalar(value: Any, *, full: bool) -> str:
    if isinstance(value, np.ndarray):
        return _array(cast("np.ndarray[Any, Any]", value), full=full)
    if isinstance(value, bytes):
        shown = value if full else value[:32]
        return f"bytes[{len(value)}] {shown.hex()}{'' if len(shown) == len(value) else ' …'}"
    if isinstance(value, str):
        text = value if full else value[:SHOWN_CHARACTERS]
        rest = len(value) - len(text)
        return repr(text)[1:-1] + (f" … {rest} more characters" if rest else "") or "''"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (Mapping, list)):
        return "{}" if isinstance(value, Mapping) else "[]"
    return str(value)


def _array(array: "np.ndarray[Any, Any]", *, full: bool) -> str:
    flat = array.reshape(-1)
    shown = flat if full else flat[:SHOWN_ELEMENTS]
    numbers = " ".join(
        f"{number:.6g}" if array.dtype.kind == "f" else str(number) for number in shown.tolist()
    )
    more = " …" if len(shown) < len(flat) else ""
    shape = ", ".join(str(length) for length in array.shape)
    return f"{array.dtype}[{shape}] {numbers}{more}".rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return {"dtype": str(array.dtype), "shape": list(array.shape), "values": array.tolist()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    return value
