"""Messages for tests: small valid ones, and payloads that no actor may be ended by."""

from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Blame, Task
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.message import Message


def make_task(number: int, group_size: int = 1) -> Task:
    """Return task `number`."""
    return Task(task=number, seed=number, group_size=group_size)


def make_group(number: int, num_tokens: int = 16, source: str = "test") -> Group:
    """Return a group of one trajectory, half prompt and half generated."""
    half = num_tokens // 2
    generated = np.arange(num_tokens) >= half
    trajectory = Trajectory(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        mask=generated.astype(np.uint8),
        logprobs=np.where(generated, -0.5, 0).astype(np.float32),
        versions=np.where(generated, 0, -1).astype(np.int32),
        turn_ends=np.array([num_tokens - 1], np.int32),
        rewards=np.array([1.0], np.float32),
    )
    return Group(task=make_task(number), trajectories=[trajectory], source=source)


def make_tombstone(number: int) -> Group:
    """Return the group of a task that was given up."""
    blame = Blame(boundary="task", code="game", message="it failed")
    return Group(task=make_task(number), error=blame, source="test")


def nested(depth: int) -> bytes:
    """Return msgpack lists within lists, `depth` deep."""
    return b"\x91" * depth + b"\xc0"


def hostile_payloads(valid: Message) -> st.SearchStrategy[bytes]:
    """Payloads that are not `valid`: noise, cuts, flips, wrong types, versions and sizes."""
    good = valid.to_bytes()
    fields = valid.to_map()
    return st.one_of(
        st.binary(max_size=200),
        st.integers(0, len(good) - 1).map(lambda cut: good[:cut]),
        st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)).map(
            lambda flip: good[: flip[0]] + bytes([flip[1]]) + good[flip[0] + 1 :]
        ),
        st.sampled_from([1, 10, 1023, 1024, 5000, 200_000]).map(nested),
        st.integers(-3, 300).filter(lambda v: v != 1).map(lambda v: pack({**fields, "v": v})),
        st.tuples(st.sampled_from(sorted(fields)), _values()).map(
            lambda change: msgpack.packb({**_plain(fields), change[0]: change[1]})
        ),
        st.sampled_from(
            [
                b"",
                b"\xdd\xff\xff\xff\xff",  # a list that claims four billion entries
                b"\xdf\xff\xff\xff\xff",  # a map that does
                b"\xc6\xff\xff\xff\xff",  # bytes that do
                b"\xc9\xff\xff\xff\xff\x01",  # an array extension that does
                msgpack.packb({"v": 1, "x": msgpack.ExtType(1, b"\x03\x01<f4" + b"\xff" * 8)}),
                msgpack.packb({"v": 1, "x": msgpack.ExtType(99, b"")}),
                bytes(1 << 20),
            ]
        ),
    )


def _values() -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**63), 2**64 - 1),
            st.floats(),
            st.text(max_size=20),
            st.binary(max_size=20),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    )


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only our codec packs."""
    return {key: value for key, value in fields.items() if not isinstance(value, np.ndarray | list)}
