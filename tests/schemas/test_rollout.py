"""Trajectories and groups: what validation refuses at the boundary, and what is checked later."""

from typing import Any

import msgpack
import numpy as np
import pytest
from tinkermq.schemas.rollout import Group, Trajectory, check_group
from tinkermq.schemas.task import Blame, Task
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import MessageError


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
    with pytest.raises(ValueError, match="or an error and none"):
        Group(task=task, source="t")
    with pytest.raises(ValueError, match="or an error and none"):
        Group(task=task, error=blame, trajectories=[trajectory()], source="t")
