"""Rows of conversations as groups of the rollout log."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.demonstrations import demonstrate
from tinkermq.actors.rollout.groups import GroupFailed
from tinkermq.envs.data import ChatData
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, check_group
from tinkermq.schemas.task import Blame, Task

ASKED = {"role": "user", "content": "2+2"}
ROWS = [
    {"messages": [ASKED, {"role": "assistant", "content": "4"}, ASKED]},
    {"messages": [ASKED]},
    {"messages": [ASKED, {"role": "assistant", "content": "four" * 9}]},
]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[ChatData]:
    with contextlib.closing(ChatData([str(write_rows(tmp_path / "c.jsonl", ROWS))])) as data:
        yield data


def demonstrated(data: ChatData, sample: int | None) -> Any:
    config = JobConfig.model_validate(
        {
            "model": {"path": "m"},
            "sft": {"data": ["c.jsonl"]},
            "rollout": {"max_prompt_tokens": 8, "max_turn_tokens": 8, "max_response_tokens": 16},
        }
    )
    size = config.rollout.group_size
    task = Task(task=5, sample=sample, seed=1, min_version=3, group_size=size)
    return demonstrate(task, data, ChatTokenizer(make_tokenizer()), config, "g-0")


def test_the_group_of_a_row_is_what_the_assistant_says_of_the_version_that_is_asked_for(
    data: ChatData,
) -> None:
    group = demonstrated(data, 0)
    check_group(group, vocab_size=264, max_tokens=24, version=3)
    (row,) = group.trajectories
    chat = ChatTokenizer(make_tokenizer())
    made = row.mask == 1
    assert chat.decode(row.token_ids[made]) == "4"
    assert set(row.versions[made].tolist()) == {3}
    assert not row.logprobs.any()
    assert row.messages == ROWS[0]["messages"]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (1, "has no message of the assistant"),
        (2, r"row 2 of .* has \d+ tokens, rollout.max_prompt_tokens \+ rollout"),
        (3, "row 3 does not exist"),
        (None, "task 5 names no row"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_given_up_with_the_reason(
    data: ChatData, sample: int | None, words: str
) -> None:
    with pytest.raises(GroupFailed, match=words) as caught:
        demonstrated(data, sample)
    assert caught.value.group.error == caught.value.blame
    assert caught.value.blame.boundary == "task"


@pytest.mark.parametrize(
    "said",
    ["\ud83d", "cut \udcff here", {"text": "\ud83d"}, 7, [3], [{"type": "text", "text": "\ude00"}]],
)
def test_a_row_that_nobody_has_foreseen_is_given_up_and_its_reason_travels(
    tmp_path: Path, said: Any
) -> None:
    path = tmp_path / "c.jsonl"
    bad = {"messages": [ASKED, {"role": "assistant", "content": said}]}
    path.write_text("\n".join(json.dumps(row) for row in (ROWS[0], bad)))
    with contextlib.closing(ChatData([str(path)])) as data:
        assert demonstrated(data, 0).trajectories
        with pytest.raises(GroupFailed) as caught:
            demonstrated(data, 1)
    assert caught.value.blame.boundary == "task"
    assert "row 1" in caught.value.blame.message
    Group.from_bytes(caught.value.group.to_bytes())


def test_a_reason_with_half_a_character_travels() -> None:
    blame = Blame(boundary="task", code="data", message="cut \ud83d", hint="\udcff" * 9000)
    assert Blame.from_bytes(blame.to_bytes()) == blame
    assert blame.message == "cut \\ud83d"
