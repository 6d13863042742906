"""msgpack with arrays: what goes in comes out, and nothing hostile gets further than an error."""

import contextlib
from typing import cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from tinkermq.schemas.wire.array_codec import ARRAY_DTYPES, ARRAY_EXT
from tinkermq.schemas.wire.codec import (
    MAX_CONTAINERS,
    MAX_JSON_COMMAS,
    MAX_MESSAGE_BYTES,
    pack,
    read_json,
    unpack,
)
from tinkermq.schemas.wire.errors import MessageError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert unpack(pack(value)) == value


@given(st.sampled_from(sorted(ARRAY_DTYPES)), st.data())
def test_arrays_come_back_with_dtype_shape_and_bytes(dtype: str, data: st.DataObject) -> None:
    shape = array_shapes(max_dims=3, max_side=4, min_side=0)
    array = data.draw(arrays(np.dtype(dtype), shape))
    back = unpack(pack({"a": array}))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_arrays_of_any_order_in_memory_come_back_the_same() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    for found in (array, array[:, ::2], np.asfortranarray(array), np.array(3.0), np.float32(2)):
        back = unpack(pack(found))
        assert back.dtype == found.dtype.newbyteorder("<")
        assert back.shape == found.shape
        assert np.array_equal(back, found)


def test_an_array_that_does_not_travel_is_refused_with_why() -> None:
    for array, why in (
        (np.zeros((1,) * 9), "arrays of 9 dimensions do not travel, at most 8 do"),
        (np.array(["x"]), "arrays of <U1 do not travel"),
    ):
        with pytest.raises(MessageError, match=why):
            pack(array)


def test_a_decoded_array_is_a_read_only_view() -> None:
    back = unpack(pack(np.arange(4)))
    assert not back.flags.writeable
    assert not back.flags.owndata


@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_or_an_error_of_ours(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        unpack(payload)


@given(st.integers(1, 60))
def test_a_truncated_message_is_refused(cut: int) -> None:
    payload = pack({"name": "x" * 30, "ids": np.arange(8, dtype=np.int32)})
    with pytest.raises(MessageError):
        unpack(payload[:-cut])


def test_deep_nesting_is_refused_without_recursion() -> None:
    with pytest.raises(MessageError, match="not valid msgpack"):
        unpack(b"\x91" * 100_000 + b"\xc0")


def test_a_message_over_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(MessageError, match="over the limit of 8,388,608"):
        unpack(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x03",
        b"\x03\x01<f4" + (2**63).to_bytes(8, "little"),
        b"\x03\x01<O8" + (1).to_bytes(8, "little") + bytes(8),
        b"\x03\x09<f4" + bytes(72),
        b"\x03\x01<f4" + (3).to_bytes(8, "little") + bytes(8),
    ],
)
def test_a_broken_array_is_refused_before_anything_is_allocated(body: bytes) -> None:
    with pytest.raises(MessageError, match="array"):
        unpack(cast("bytes", msgpack.packb(msgpack.ExtType(ARRAY_EXT, body))))


def test_what_has_no_form_is_refused_by_its_type() -> None:
    with pytest.raises(MessageError, match="cannot pack a set"):
        pack({1, 2})
    with pytest.raises(MessageError, match="complex128"):
        pack(np.zeros(2, complex))


@pytest.mark.parametrize("empty", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_a_payload_of_single_bytes_that_each_become_an_object_is_refused(empty: bytes) -> None:
    few = b"\xdd" + (1000).to_bytes(4, "big") + empty * 1000
    assert len(unpack(few)) == 1000
    inner = b"\xdd" + (900_000).to_bytes(4, "big") + empty * 900_000
    for payload in (inner, b"\x98" + inner * 8):
        with pytest.raises(MessageError, match=f"more than {MAX_CONTAINERS:,} lists and maps"):
            unpack(payload)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[1", "", "nul", "9" * 5000, "[" + "1," * MAX_JSON_COMMAS],
)
def test_json_that_cannot_be_read_is_a_message_error(text: str) -> None:
    for one in (text, text.encode()):
        with pytest.raises(MessageError) as raised:
            read_json(one)
        assert len(raised.value.message) < 500
    with pytest.raises(MessageError):
        read_json(b"\xff\xfe" + text.encode())
