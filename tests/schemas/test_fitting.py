"""What does not fit into a message is cut where only people read it, and named where not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.schemas.rollout import largest_parts, with_cut_infos
from tinkermq.schemas.wire.fitting import CUT, cut_info, packed_bytes

from tests.support.groups import make_group, make_trajectory

MB = 1_000_000


@pytest.mark.parametrize(
    "info",
    [
        {"log": "x" * MB},
        {"log": "é" * MB},
        {"screen": b"\x89" * MB},
        {"frames": [b"\x89" * 100_000] * 10},
        {"steps": [{"thought": "y" * 1000}] * 1000},
        {"a": {"b": {"c": {"d": "z" * MB}}}},
        {"numbers": list(range(MB // 3))},
        {"array": np.zeros(MB // 4, np.float32)},
        {f"key {number}": "w" * 2000 for number in range(500)},
        {"tuple": ("x" * MB, 1)},
    ],
    ids=lambda info: next(iter(info)),
)
def test_a_large_info_is_cut_says_so_and_keeps_its_numbers(info: dict[str, Any]) -> None:
    told = {"success": True, "score": 0.5, "type": "maze", **info}
    cut = cut_info(told, 100_000)
    assert packed_bytes(cut) <= 100_000
    assert cut[CUT] == {"bytes": packed_bytes(told), "keys": len(told)}
    assert (cut["success"], cut["score"], cut["type"]) == (True, 0.5, "maze")
    assert cut.keys() == {*told, CUT}
    assert "[cut: it had " in str(cut)


def test_of_thousands_of_keys_the_first_are_left() -> None:
    cut = cut_info({f"key {number}": number for number in range(MB)}, 300_000)
    assert packed_bytes(cut) <= 300_000
    assert cut[CUT]["keys"] == MB
    assert cut["key 9999"] == 9999


def test_an_info_that_fits_stays_as_it_is() -> None:
    info = {"log": "x" * 1000, "score": 1}
    assert cut_info(info, 10_000) == info


def test_the_beginning_of_a_text_is_left() -> None:
    cut = cut_info({"log": "begin" + "x" * MB}, 100_000)
    assert cut["log"].startswith("begin")
    assert cut["log"].endswith("[cut: it had 1,000,005 characters, more than fits into a message]")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3000) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=5), st.integers(0, 10_000))
def test_a_cut_info_is_never_larger_but_for_its_mark(info: dict[str, Any], most: int) -> None:
    cut = cut_info(info, most)
    assert packed_bytes(cut) <= packed_bytes(info) + 100 * (len(info) + 1)
    if packed_bytes(info) <= most:
        assert cut == info


def group_of(*infos: dict[str, Any], **fields: Any) -> Any:
    return make_group(
        [make_trajectory([1, 2], [([3], [])], [1.0], info=info, **fields) for info in infos]
    )


def test_only_the_large_infos_of_a_group_are_cut() -> None:
    group = group_of({"log": "x" * MB}, {"log": "short"}, {"log": "y" * 2 * MB})
    cut = with_cut_infos(group, len(group.to_bytes()), MB)
    assert len(cut.to_bytes()) <= MB
    assert [CUT in item.info for item in cut.trajectories] == [True, False, True]
    assert cut.trajectories[1].info == {"log": "short"}


def test_a_group_that_is_large_elsewhere_is_left_alone() -> None:
    group = group_of({"log": "x"}, {}, messages=[{"role": "user", "content": "x" * MB}])
    assert with_cut_infos(group, len(group.to_bytes()), MB) is group


def test_what_is_large_is_named_by_field_episode_and_bytes() -> None:
    group = group_of({"log": "x" * MB}, {}, messages=[{"role": "user", "content": "x" * 10_000}])
    group = group.model_copy(update={"images": [b"x" * 50_000]})
    first, second, third = largest_parts(group)
    assert first == "info['log'] of episode 0 (1,000,010 bytes)"
    assert second == "images (50,000 bytes)"
    assert third.startswith("messages of episode ")
