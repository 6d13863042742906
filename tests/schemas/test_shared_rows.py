"""What rows of an episode have in common travels once, and comes back to the bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.wire.codec import pack, unpack
from tinkermq.schemas.wire.errors import MessageError

from tests.support.groups import make_group, make_trajectory


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
        ({"mask": 3}, "vectors of its tokens"),
        ({"messages": {}}, "messages are a list"),
    ],
)
def test_rows_that_cannot_be_whole_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(MessageError, match=told):
        Group.from_bytes(_change(**changes))


def test_a_first_row_has_nobody_to_share_with() -> None:
    fields = unpack(make_group(rendered_anew(2)).to_bytes())
    fields["trajectories"] = fields["trajectories"][1:]
    with pytest.raises(MessageError, match="none before it"):
        Group.from_bytes(pack(fields))
    fields["trajectories"] = [7, *fields["trajectories"]]
    with pytest.raises(MessageError, match="none before it"):
        Group.from_bytes(pack(fields))
