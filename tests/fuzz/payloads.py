"""Messages made from the schemas: valid ones, and what becomes of them in hostile hands.

Everything follows from the seed of a `random.Random`, so a payload that did harm is made again by
its number.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgpack
import numpy as np
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.message import Message

_WORDS = ("", "a", "run", "x" * 64, "ä€𝄞", "a b", "../..", "*", ">", "a.b", "null", "0", "\n", "\0")
_SHAPED = (
    "a",
    "run-1",
    "v1-0123abcd",
    "https://x.example",
    "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
)
_NUMBERS = (-1, 0, 1, 2, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
_HUGE = 50_000
MAX_DEPTH = 4


class Schemas:
    """Makes valid maps of a model from its JSON schema."""

    def __init__(self, rng: random.Random, known: Mapping[str, tuple[Any, ...]]) -> None:
        """`known`: values by the name of a field, such as ids that exist; each is used often."""
        self._rng = rng
        self._known = known
        self._schemas: dict[type[Message], dict[str, Any]] = {}

    def valid(self, model: type[Message]) -> dict[str, Any]:
        """Return the fields of one message, with its version."""
        schema = self._schemas.get(model)
        if schema is None:
            schema = self._schemas[model] = model.model_json_schema()
        return {"v": 1, **self._map(schema, schema.get("$defs", {}), 0)}

    def _map(self, schema: dict[str, Any], defs: dict[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made: dict[str, Any] = {}
        for name, inner in schema.get("properties", {}).items():
            if name in required or self._rng.random() < 0.4:
                known = self._known.get(name)
                if known and self._rng.random() < 0.7:
                    made[name] = self._rng.choice(known)
                else:
                    made[name] = self._value(inner, defs, depth + 1)
        return made

    def _value(self, schema: dict[str, Any], defs: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        if "$ref" in schema:
            return self._value(defs[schema["$ref"].rpartition("/")[2]], defs, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self._value(rng.choice(schema[several]), defs, depth)
        kind = schema.get("type")
        if kind == "object":
            if "properties" in schema:
                return self._map(schema, defs, depth)
            inner = schema.get("additionalProperties")
            inner = inner if isinstance(inner, dict) else {}
            count = 0 if depth > MAX_DEPTH else rng.randint(0, 2)
            return {self._word(): self._value(inner, defs, depth + 1) for _ in range(count)}
        if kind == "array":
            return self._array(schema, defs, depth)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "string":
            return self._text(schema)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        return rng.choice((None, 1, "x", True, [1], {"a": 1}))

    def _array(self, schema: dict[str, Any], defs: dict[str, Any], depth: int) -> Any:
        rng, told = self._rng, str(schema.get("description", ""))
        dtype, _, shape = told.partition("[")
        if dtype in ("int32", "float32", "uint8") and "items" not in schema:
            return np.zeros((rng.randint(0, 8),) * shape.count("n"), np.dtype(dtype))
        least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
        count = rng.randint(least, max(least, min(most, least + 2)))
        inner = schema.get("items") or {}
        return [self._value(cast("dict[str, Any]", inner), defs, depth + 1) for _ in range(count)]

    def _number(self, schema: dict[str, Any], kind: str) -> Any:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 8))
        if kind == "integer":
            first = int(low) + int("exclusiveMinimum" in schema)
            return self._rng.randint(
                first, max(first, int(high) - int("exclusiveMaximum" in schema))
            )
        return low + (high - low) * (0.1 + 0.8 * self._rng.random())

    def _text(self, schema: dict[str, Any]) -> Any:
        if schema.get("format") == "binary":
            return self._rng.randbytes(self._rng.randint(0, 40))
        if "pattern" in schema:
            return self._rng.choice(_SHAPED)
        text = self._word()
        text += "a" * max(0, schema.get("minLength", 0) - len(text))
        return text[: schema.get("maxLength", len(text))]

    def _word(self) -> str:
        return self._rng.choice(_WORDS)


class Hostile:
    """Makes payloads that are not what they should be."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ways: tuple[Callable[[dict[str, Any]], bytes], ...] = (
            self._of_another_type,
            self._of_another_type,
            self._of_another_type,
            self._without_a_key,
            self._with_strange_keys,
            self._of_another_version,
            self._cut,
            self._flipped,
            self._garbage,
        )

    def payload(self, fields: dict[str, Any]) -> bytes:
        """Return the bytes of a message that was tampered with in one way."""
        return self._rng.choice(self._ways)(fields)

    def headers(self) -> dict[str, str] | None:
        """Return headers that a request may come with."""
        rng = self._rng
        names = (
            "traceparent",
            "Nats-Msg-Id",
            "Nats-Expected-Last-Subject-Sequence",
            "Nats-Rollup",
            "KV-Operation",
            "Nats-TTL",
            "Nats-Service-Error-Code",
            "Tmq-Write",
            "Status",
        )
        values = ("", "1", "-1", "x" * 2000, "PURGE", "all", "00-zz", "503", "\u00e4", "1h")
        if rng.random() < 0.6:
            return None
        return {rng.choice(names): rng.choice(values).strip() or "x" for _ in range(2)}

    def _of_another_type(self, fields: dict[str, Any]) -> bytes:
        place: Any = fields
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return pack(fields)
            key = self._rng.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and self._rng.random() < 0.6:
                place = inner
                continue
            place[key] = self._value()
            break
        return _packed(fields)

    def _value(self) -> Any:
        rng = self._rng
        deep: Any = 1
        for _ in range(rng.choice((2, 60, 500, 900))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return rng.choice(
            (
                None,
                True,
                float("nan"),
                float("inf"),
                -float("inf"),
                1.5,
                1e308,
                b"\xff\xfe",
                b"",
                "x" * rng.choice((1, 65, 5000, _HUGE)),
                [],
                {},
                [[]] * _HUGE,
                {str(n): n for n in range(2000)},
                {b"\xff": 1},
                [None] * 100,
                np.zeros((2, 3), np.float32),
                np.array(3),
                np.zeros(0, np.int32),
                np.full(4, np.nan, np.float32),
                deep,
                *_NUMBERS,
                *_WORDS,
            )
        )

    def _without_a_key(self, fields: dict[str, Any]) -> bytes:
        fields.pop(self._rng.choice(list(fields)))
        return pack(fields)

    def _with_strange_keys(self, fields: dict[str, Any]) -> bytes:
        keys = (b"\xff", "x" * 5000, "v ", "__class__", "model_config", "")
        return _packed({**fields, self._rng.choice(keys): self._value()})

    def _of_another_version(self, fields: dict[str, Any]) -> bytes:
        return _packed({**fields, "v": self._value()})

    def _cut(self, fields: dict[str, Any]) -> bytes:
        good = pack(fields)
        return good[: self._rng.randrange(len(good))]

    def _flipped(self, fields: dict[str, Any]) -> bytes:
        good = bytearray(pack(fields))
        for _ in range(self._rng.randint(1, 4)):
            good[self._rng.randrange(len(good))] = self._rng.randrange(256)
        return bytes(good)

    def _garbage(self, _: dict[str, Any]) -> bytes:
        rng, many = self._rng, (900_000).to_bytes(4, "big")
        return rng.choice(
            (
                b"",
                b"\xc1",
                rng.randbytes(rng.randint(1, 300)),
                b"\x91" * rng.choice((5, 1023, 1025, 100_000)),
                b"\x81\xa1v" * 2000,
                b"\xdd\xff\xff\xff\xff",
                b"\xdf\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
                b"\xdd" + many + b"\x80" * 900_000,
                _packed_as_it_is({"v": 1, "x": msgpack.ExtType(99, b"x")}),
                _packed_as_it_is({"v": 1, "x": msgpack.ExtType(1, b"\x03\x01<f4" + b"\xff" * 8)}),
                b"\x82\xa1v\x01\xa1x\xd7\xff" + b"\xff" * 8,  # a time
                b"\x82\xa1v\x01\xa1x\xa3\xed\xa0\x80",  # a surrogate
                _packed_as_it_is([1, 2, 3]),
                _packed_as_it_is("text"),
                b"{}",
            )
        )


def _packed(value: Any) -> bytes:
    """Pack what our own codec would not."""
    from tinkermq.schemas.wire.array_codec import pack_array

    try:
        return cast("bytes", msgpack.packb(value, default=pack_array, use_bin_type=True))
    except (TypeError, ValueError, OverflowError):
        return pack({"v": 1})


def _packed_as_it_is(value: Any) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None
    return packed
