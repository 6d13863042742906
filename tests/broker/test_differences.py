"""The codec of differences: tables computed by hand, and any two versions at all."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.broker.weights.history import apply, encode
from tinkermq.schemas.wire.errors import MessageError


def changed(old: np.ndarray, new: np.ndarray, block_words: int = 1 << 22) -> tuple[bytes, bytes]:
    """Return the difference, and what it makes of `old`."""
    difference = encode(old.data, new.data, block_words)
    made = old.copy()
    apply(memoryview(difference), made.data)
    return difference, made.tobytes()


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def test_a_block_as_it_is_on_the_wire() -> None:
    old = np.zeros(400, np.uint16)
    new = old.copy()
    new[0], new[3], new[399] = 1, 0xFFFF, 300  # +1, -1, a step of two bytes after a far gap
    difference, made = changed(old, new)
    assert made == new.tobytes()
    assert difference[:5] == b"TMQD\x01"
    assert struct.unpack_from("<QI", difference, 5) == (400, 1 << 22)
    changes, far, wide, num_bytes, _ = struct.unpack_from("<5I", difference, 17)
    assert (changes, far, wide, num_bytes) == (3, 1, 1, 12)


def test_equal_versions_differ_in_nothing_but_heads() -> None:
    same = np.arange(10_000, dtype=np.uint16)
    assert len(changed(same, same, 4096)[0]) == 17 + 3 * 20


def test_small_steps_of_few_weights_take_a_seventieth() -> None:
    draw = np.random.default_rng(0)
    old = draw.integers(0, 1 << 16, 1 << 20, np.uint16)
    new = old.copy()
    places = draw.choice(old.size, old.size * 15 // 1000, replace=False)
    new[places] += draw.choice(np.array([1, 0xFFFF], np.uint16), places.size)
    difference, made = changed(old, new)
    assert made == new.tobytes()
    assert old.nbytes / len(difference) > 70


@given(
    st.binary(max_size=600),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 65535)), max_size=60),
    st.sampled_from([1, 7, 256, 4096]),
)
@settings(max_examples=150, deadline=None)
def test_any_target_is_made_to_the_bit(base: bytes, writes: list, block_words: int) -> None:
    old = np.frombuffer(base[: len(base) // 2 * 2], np.uint16)
    new = old.copy()
    for place, value in writes:
        if place < new.size:
            new[place] = value
    assert changed(old, new, block_words)[1] == new.tobytes()


@given(st.integers(0, 10**9), st.integers(0, 255), st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_damage_raises_one_error_or_makes_other_words(place: int, byte: int, cut: int) -> None:
    old = np.arange(500, dtype=np.uint16)
    new = old.copy()
    new[::7] += 3
    new[123] = 9999
    damaged = bytearray(encode(old.data, new.data, 128))
    damaged[place % len(damaged)] = byte
    damaged = damaged[: 1 + cut % len(damaged)]
    made = old.copy()
    try:
        apply(memoryview(bytes(damaged)), made.data)
    except MessageError as error:
        assert "does not fit 500 words" in error.message  # noqa: PT017


@pytest.mark.parametrize("difference", [b"", b"TMQD\x01", encode(words(1).data, words(2).data)])
def test_one_of_another_size_is_refused(difference: bytes) -> None:
    with pytest.raises(MessageError, match="does not fit 3 words"):
        apply(memoryview(difference), words(1, 2, 3).data)


def test_versions_of_different_sizes_have_no_difference() -> None:
    with pytest.raises(ValueError, match="a difference of 1 and 2 words"):
        encode(words(1).data, words(1, 2).data)
