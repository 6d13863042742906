"""Trajectories and groups: what validation refuses, what rows share, what is cut, images."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.schemas.model_apis.canonical import CanonicalCall
from tinkermq.schemas.rollout import (
    Group,
    LoggedCall,
    Trajectory,
    check_group,
    largest_parts,
    with_cut_infos,
)
from tinkermq.schemas.task import Blame, Task
from tinkermq.schemas.wire.codec import INFO_CUT, cut_info, pack, packed_bytes, unpack
from tinkermq.schemas.wire.errors import DataError, MessageError
from tinkermq.schemas.wire.images import image_parts, images_of, with_data_urls

from tests.support.groups import make_group, make_trajectory


def trajectory(**changes: Any) -> Trajectory:
    """Two turns: prompt of 2, one token, an observation, two tokens."""
    fields: dict[str, Any] = {
        "token_ids": np.array([1, 2, 3, 4, 5, 6], np.int32),
        "mask": np.array([0, 0, 1, 0, 1, 1], np.uint8),
        "logprobs": np.array([0, 0, -1, 0, -2, -3], np.float32),
        "versions": np.array([-1, -1, 2, -1, 3, 3], np.int32),
        "turn_ends": np.array([2, 5], np.int32),
        "rewards": np.array([0.5, 1], np.float32),
    }
    return Trajectory(**(fields | changes))


def group(*items: Trajectory, size: int | None = None) -> Group:
    task = Task(task=7, seed=1, group_size=size or len(items))
    return Group(task=task, trajectories=list(items), source="test")


def check(item: Group, **limits: int) -> None:
    check_group(item, **({"vocab_size": 10, "max_tokens": 8, "version": 3} | limits))


def test_a_group_comes_back_from_its_bytes() -> None:
    back = Group.from_bytes(group(trajectory(), trajectory()).to_bytes())
    assert back.task.task == 7
    np.testing.assert_array_equal(back.trajectories[1].token_ids, [1, 2, 3, 4, 5, 6])
    assert (back.min_version, back.trajectories[0].reward) == (2, 1.5)
    check(back)


def test_an_episode_whose_last_turn_was_cut_ended_by_its_length() -> None:
    ends = {
        reasons: trajectory(finish="turns", finish_reasons=list(reasons)).ended_by
        for reasons in ((), ("stop", "stop"), ("length", "stop"), ("stop", "length"))
    }
    assert list(ends.values()) == ["turns", "turns", "turns", "length"]


def test_messages_of_before_turns_had_reasons_are_read() -> None:
    fields = msgpack.unpackb(group(trajectory()).to_bytes(), strict_map_key=False)
    for item in fields["trajectories"]:
        item.pop("finish_reasons", None)
    back = Group.from_bytes(pack(fields))
    assert back.trajectories[0].finish_reasons == []
    assert back.trajectories[0].ended_by == "done"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": np.zeros(5, np.uint8)}, "mask has 5 entries, token_ids has 6"),
        ({"token_ids": np.zeros(6, np.int64)}, "must be an array of int32"),
        ({"rewards": np.zeros(1, np.float32)}, "turn_ends has 2 entries and rewards 1"),
        ({"logprobs": [0.0] * 6}, "must be an array of float32, is a list"),
        ({"finish_reasons": ["stop"]}, "finish_reasons has 1 entries for 2 turns"),
        ({"finish_reasons": ["stop", "cancelled"]}, "'stop' or 'length'"),
    ],
)
def test_the_boundary_refuses_arrays_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, 2, 3, 4, 5, 10], np.int32)}, "token_ids must be from 0 to 9"),
        ({"token_ids": np.array([1, 2, 3, 4, 5, -1], np.int32)}, "token_ids must be from 0 to 9"),
        ({"mask": np.array([0, 0, 2, 0, 1, 1], np.uint8)}, "mask may hold 0 and 1"),
        ({"mask": np.array([1, 0, 1, 0, 1, 1], np.uint8)}, "versions"),
        ({"mask": np.array([0, 0, 1, 0, 1, 0], np.uint8)}, "turns must end"),
        ({"turn_ends": np.array([2, 4], np.int32)}, "turns must end"),
        ({"turn_ends": np.array([5, 2], np.int32)}, "turns must end"),
        ({"turn_ends": np.array([2, 6], np.int32)}, "turns must end"),
        ({"turn_ends": np.array([-1, 5], np.int32)}, "turns must end"),
        ({"logprobs": np.array([0, 0, 0.5, 0, -2, -3], np.float32)}, "logprobs"),
        ({"logprobs": np.array([0, 0, np.nan, 0, -2, -3], np.float32)}, "logprobs"),
        ({"logprobs": np.array([0, 0, -np.inf, 0, -2, -3], np.float32)}, "logprobs"),
        ({"versions": np.array([-1, -1, 4, -1, 3, 3], np.int32)}, "versions"),
        ({"versions": np.array([-1, -1, -1, -1, 3, 3], np.int32)}, "versions"),
        ({"rewards": np.array([np.inf, 0], np.float32)}, "rewards must be finite"),
    ],
)
def test_wrong_elements_are_found_in_any_trajectory(changes: dict[str, Any], message: str) -> None:
    for items in ([trajectory(**changes), trajectory()], [trajectory(), trajectory(**changes)]):
        with pytest.raises(MessageError, match=message):
            check(group(*items))


def test_lengths_are_checked_against_the_limit() -> None:
    with pytest.raises(MessageError, match="allowed are 2 to 5"):
        check(group(trajectory()), max_tokens=5)


def test_a_group_has_as_many_episodes_as_its_task_asked_for() -> None:
    with pytest.raises(ValueError, match="has 3 episodes, this has 1"):
        group(trajectory(), size=3)


def test_a_group_has_trajectories_or_an_error() -> None:
    blame = Blame(boundary="task", code="x", message="y")
    task = Task(task=0, seed=0, group_size=1)
    assert Group(task=task, error=blame, source="t").trajectories == []
    with pytest.raises(ValueError, match="either trajectories or an error"):
        Group(task=task, source="t")
    with pytest.raises(ValueError, match="either trajectories or an error"):
        Group(task=task, error=blame, trajectories=[trajectory()], source="t")


# -- What rows of an episode have in common travels once, and comes back to the bit ----------------


def rendered_anew(num_calls: int, episode: int = 0) -> list[Trajectory]:
    """Return the rows of an episode each of whose calls repeats the history."""
    rng = np.random.default_rng(episode)
    history = rng.integers(1, 200, 300).tolist()
    messages = [{"role": "user", "content": "look " * 300}]
    rows: list[Trajectory] = []
    for call in range(num_calls):
        said = rng.integers(1, 200, 12).tolist()
        answer = {"role": "assistant", "content": f"answer {call}"}
        last = call == num_calls - 1
        rows.append(
            make_trajectory(
                history,
                [(said, [])],
                [float(last)],
                versions=call,
                episode=episode,
                kind="main" if last else "edited",
                messages=[*messages, answer],
            )
        )
        history = [*history, *said[6:], *rng.integers(1, 200, 9).tolist()]
        messages = [*messages, answer, {"role": "tool", "content": f"result {call}"}]
    return rows[::-1]


def assert_equal(one: Group, other: Group) -> None:
    for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
        for name in Trajectory.model_fields:
            np.testing.assert_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def test_an_episode_rendered_anew_at_each_call_travels_once() -> None:
    rows = [row for episode in range(3) for row in rendered_anew(20, episode)]
    group = make_group(rows)
    assert_equal(Group.from_bytes(group.to_bytes()), group)
    apart = [row.model_copy(update={"episode": -1}) for row in rows]
    assert 6 * len(group.to_bytes()) < len(make_group(apart).to_bytes())
    whole = [row for row in unpack(group.to_bytes())["trajectories"] if "shared" not in row]
    assert len(whole) == 3, "each episode's first row is whole"


def test_what_was_generated_in_a_row_is_never_left_out_of_it() -> None:
    rows = [
        make_trajectory([1, 2], [([3, 4], [5]), ([6], [])], [0.0, 1.0], episode=0, kind="main"),
        make_trajectory([1, 2], [([3, 4], []), ([7], [])], [0.0, 0.0], episode=0, kind="sample"),
        make_trajectory([1, 2, 3, 4], [([8], [])], [0.0], episode=0, kind="sample"),
    ]
    group = make_group(rows)
    shared = [row.get("shared") for row in unpack(group.to_bytes())["trajectories"]]
    assert shared == [None, [2, 0], [4, 0]]
    assert_equal(Group.from_bytes(group.to_bytes()), group)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=2), min_size=1))
def test_any_rows_come_back(drawn: list[list[tuple[int, bool]]]) -> None:
    rows: list[Trajectory] = []
    for place, tokens in enumerate(drawn):
        mask = np.array([made for _, made in tokens[:-1]] + [True], np.uint8)
        rows.append(
            Trajectory(
                token_ids=np.array([token for token, _ in tokens], np.int32),
                mask=mask,
                logprobs=np.where(mask, -0.5, 0).astype(np.float32),
                versions=np.where(mask, 3, -1).astype(np.int32),
                turn_ends=np.array([len(mask) - 1], np.int32),
                rewards=np.zeros(1, np.float32),
                episode=place // 3,
                messages=[{"role": "user", "content": str(n)} for n in range(place % 3)],
            )
        )
    group = make_group(rows)
    assert_equal(Group.from_bytes(group.to_bytes()), group)


def _change(**changes: Any) -> bytes:
    fields = unpack(make_group(rendered_anew(3)).to_bytes())
    fields["trajectories"][1].update(changes)
    return pack(fields)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"shared": [10_000, 0]}, "less than 10000 tokens"),
        ({"shared": [1, 99]}, "99 messages"),
        ({"shared": [-1, 0]}, "a number of tokens"),
        ({"shared": "all"}, "a number of tokens"),
        ({"shared": [1 << 24, 0]}, "more than 8,388,608 tokens"),
        ({"mask": 3}, "must have one dimension"),
        ({"messages": {}}, "messages must be a list"),
    ],
)
def test_rows_that_cannot_be_whole_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(MessageError, match=told):
        Group.from_bytes(_change(**changes))


def test_a_first_row_has_nobody_to_share_with() -> None:
    fields = unpack(make_group(rendered_anew(2)).to_bytes())
    fields["trajectories"] = fields["trajectories"][1:]
    with pytest.raises(MessageError, match="no row stands before it"):
        Group.from_bytes(pack(fields))
    fields["trajectories"] = [7, *fields["trajectories"]]
    with pytest.raises(MessageError, match="no row stands before it"):
        Group.from_bytes(pack(fields))


# -- What does not fit into a message is cut where only people read it, and named where not --------


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
    assert cut[INFO_CUT] == {"bytes": packed_bytes(told), "keys": len(told)}
    assert (cut["success"], cut["score"], cut["type"]) == (True, 0.5, "maze")
    assert cut.keys() == {*told, INFO_CUT}
    assert "[cut: it had " in str(cut)


def test_of_thousands_of_keys_the_first_are_left() -> None:
    cut = cut_info({f"key {number}": number for number in range(MB)}, 300_000)
    assert packed_bytes(cut) <= 300_000
    assert cut[INFO_CUT]["keys"] == MB
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
    assert [INFO_CUT in item.info for item in cut.trajectories] == [True, False, True]
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


# -- Images in messages: their forms, and how they travel to other people's endpoints --------------


PNG = b"\x89PNG\r\n\x1a\n and more"
WEBP = b"RIFF1234WEBP and more"


def _asked(image: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]


@pytest.mark.parametrize("encoded", [PNG, WEBP])
def test_an_image_goes_to_an_endpoint_as_a_data_url_and_comes_back_as_it_was(
    encoded: bytes,
) -> None:
    sent = with_data_urls(_asked({"bytes": encoded, "path": None}))
    assert sent[0] == {"role": "system", "content": "Look."}
    image, text = sent[1]["content"]
    assert text == {"type": "text", "text": "What?"}
    assert image["image_url"]["url"].startswith("data:image/")
    assert images_of(sent) == (encoded,)


@pytest.mark.parametrize(
    ("image", "words"),
    [(b"RIFF1234WAVE", "12 bytes is of no known kind"), ("a.png", r"as 'a\.png'")],
)
def test_what_is_no_image_is_not_sent(image: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        with_data_urls(_asked(image))


def test_messages_without_images_have_none() -> None:
    assert not any(image_parts([{"role": "user", "content": "<image>"}, {"role": "user"}]))


def test_a_logged_call_without_later_fields_is_read() -> None:
    """Runs with programs that were recorded before messages had further fields stay readable."""
    message = {"role": "tool", "content": ["3", b"\x89PNG"], "call_id": "c1"}
    assistant = {"role": "assistant", "calls": [["add", '{"a": 1}', "c1"]], "reasoning": "hm"}
    fields = {"context": b"tools", "num_given": 3, "name": "c00001", "has_tools": True}
    fields |= {"is_thinking": False, "finish": "stop", "num_seen": 1, "request": b"digest"}
    call = LoggedCall.from_map({"v": 1, "given": [assistant, message], **fields})
    answered, result = call.given
    assert answered.calls == (CanonicalCall("add", '{"a": 1}', "c1"),)
    assert (answered.reasoning, result.call_id) == ("hm", "c1")
    assert result.content == ("3", b"\x89PNG")
    assert LoggedCall.from_bytes(call.to_bytes()) == call
