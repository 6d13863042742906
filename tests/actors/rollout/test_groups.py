"""Groups of the log: too large for a message, of conversations, with words for a teacher."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.demonstrations import demonstrate
from tinkermq.actors.rollout.groups import GroupFailed, append_given_up, append_group
from tinkermq.actors.rollout.teachers import TeacherContext, with_text
from tinkermq.actors.runtime import JobContext
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_dead, read_events
from tinkermq.broker.jetstream.streams import create_job_streams, delete_job_streams
from tinkermq.broker.partial_rollouts import SegmentWriter
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.envs import StepResult
from tinkermq.envs.data import ChatData
from tinkermq.envs.host_replies import ResetAnswer, StepAnswer
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.rollout import Group, Segment, Trajectory, check_group
from tinkermq.schemas.task import Blame, Task
from tinkermq.schemas.wire.codec import INFO_CUT, most_bytes
from tinkermq.schemas.wire.errors import DataError, MessageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.policy.test_chat import CHATML, chat_of
from tests.support.contexts import job_context
from tests.support.groups import make_group, make_trajectory

MB = 1_000_000
CONFIG = JobConfig.model_validate({"model": {"path": "none"}, "env": {"game": "none"}})


@pytest.fixture
async def context(broker: Broker, scope: JobScope) -> JobContext:
    return await job_context(broker, scope, "generator", CONFIG)


def episode(**fields: Any) -> Trajectory:
    return make_trajectory([1, 2], [([3], [])], [1.0], **fields)


def log_of(context: JobContext) -> RolloutLog:
    return RolloutLog(context.broker, context.scope)


async def stored(context: JobContext, number: int = 0) -> Group:
    found = await log_of(context).find(number)
    assert found is not None
    assert found.group is not None
    return found.group


async def test_eight_episodes_with_two_megabytes_of_info_are_trained_with_less_of_it(
    context: JobContext,
) -> None:
    infos = [{"score": 0.5, "log": "x" * 2 * MB} for _ in range(8)]
    log = log_of(context)
    for number in range(3):
        group = make_group([episode(info=info) for info in infos], number)
        assert await append_group(log, group, "generator-0")
    for item in (await stored(context)).trajectories:
        assert item.info["score"] == 0.5
        assert item.info[INFO_CUT]["bytes"] > 2 * MB
        assert "[cut: it had 2,000,000 characters" in item.info["log"]
    (event,) = await read_events(context.broker, context.scope)  # not one for each group
    assert event.kind == "group_cut"
    assert "the group of task 0 had 16," in event.message


LONG = [{"role": "user", "content": "x" * 2 * MB}]
TOO_LARGE = {
    "messages": (lambda: [episode(messages=LONG) for _ in range(8)], {}, "messages of episode"),
    "images": (
        lambda: [episode() for _ in range(2)],
        {"images": [b"\x89" * MB] * 9},
        "images (9,000,000 bytes)",
    ),
    "tokens": (
        lambda: [make_trajectory([1], [(list(range(300_000)), [])], [1.0]) for _ in range(3)],
        {},
        "token_ids of episode",
    ),
    "experts": (
        lambda: [episode(experts=np.zeros((2, 1_000_000, 2), np.uint8)) for _ in range(3)],
        {},
        "experts of episode",
    ),
    "one of many episodes": (
        lambda: [*[episode() for _ in range(60)], episode(messages=LONG * 5)],
        {},
        "messages of episode 60 (10,0",
    ),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_a_group_that_is_too_large_becomes_a_dead_letter_that_names_what_is(
    kind: str, context: JobContext
) -> None:
    make, fields, named = TOO_LARGE[kind]
    group = make_group(make(), **fields)
    log = log_of(context)
    with pytest.raises(GroupFailed) as failed:
        await append_group(log, group, "generator-0")
    assert await append_given_up(context, log, failed.value)
    assert (await stored(context)).error is not None  # its credit returns
    (letter,) = await read_dead(context.broker, context.scope)
    assert named in letter.blame.message
    assert "the group of task 0 has " in letter.blame.message
    assert "rollout.group_size" in letter.blame.hint


async def test_a_task_that_leaves_no_room_for_its_failure_is_told_without_its_arguments(
    context: JobContext,
) -> None:
    log = log_of(context)
    task = Task(task=4, seed=0, group_size=1, reset_kwargs={"board": "x" * (log.max_bytes - 5000)})
    blame = Blame(boundary="environment", code="game", message="no rule " * 1000)
    failure = GroupFailed(Group(task=task, error=blame, source="test"), blame, 1)
    assert await append_given_up(context, log, failure)
    (letter,) = await read_dead(context.broker, context.scope)
    assert letter.task.reset_kwargs[INFO_CUT]["bytes"] > 8 * MB
    assert (await stored(context, 4)).error == blame


async def test_a_group_over_the_limit_is_named_to_whoever_appends_it(context: JobContext) -> None:
    group = make_group([episode(messages=LONG * 5)])
    with pytest.raises(MessageError, match="the largest are messages of episode 0"):
        await log_of(context).append(group)


async def test_a_segment_that_is_larger_than_a_message_is_not_written_down(
    broker: Broker,
) -> None:
    scope = JobScope("local", "large-segments")
    await create_job_streams(broker, scope, LimitsConfig(), segments=True)
    writer = SegmentWriter(broker, scope, 1, 0, delivery=1, writer="one")
    long = [{"role": "user", "content": "x" * 9 * MB}]
    fields: dict[str, Any] = {"delivery": 1, "writer": "one", "start": 0}
    large = Segment.empty(observations=long, rewards=[0.0], **fields)
    assert not await writer.append(large)
    assert await writer.append(Segment.empty(**fields))
    await delete_job_streams(broker, scope)


def done(result: Any) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future


LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: {"log": "x" * 20 * MB},
    "bytes": lambda: {"log": b"x" * 20 * MB},
    "list": lambda: {"list": list(range(5 * MB))},
    "numbers": lambda: {f"{number}": number for number in range(MB)},
}


@pytest.mark.parametrize("kind", LARGE)
async def test_a_hosts_answer_holds_a_large_info_cut(kind: str, broker: Broker) -> None:
    more = LARGE[kind]()
    most = most_bytes(broker.max_payload_bytes) * 3 // 4
    answer = StepAnswer(most)
    answer.add(done(StepResult("ok", 1.0, True, {"score": 1.0, **more})))
    reply = answer.reply()
    assert reply.observations == ["ok"]
    assert reply.infos[0]["score"] == 1.0
    assert reply.infos[0][INFO_CUT]["bytes"] > 8 * MB
    assert len(reply.to_bytes()) < broker.max_payload_bytes


@pytest.mark.parametrize(
    "result",
    [
        StepResult("x" * 20 * MB, 1.0, True),
        StepResult("é" * 4 * MB, 1.0, True),
    ],
    ids=["observation", "characters"],
)
async def test_what_a_hosts_answer_cannot_hold_fails_its_own_episode(
    result: StepResult, broker: Broker
) -> None:
    most = most_bytes(broker.max_payload_bytes) * 3 // 4
    answer = StepAnswer(most)
    answer.add(done(StepResult("first", 0.0, False)))
    answer.add(done(result))
    answer.add(done(StepResult("third", 0.0, False)))
    reply = answer.reply()
    assert reply.observations == ["first", None, "third"]
    (failed,) = reply.failed
    assert failed.index == 1
    assert "of the game has " in failed.error.message
    assert len(reply.to_bytes()) < broker.max_payload_bytes


async def test_a_first_prompt_that_no_message_holds_fails_its_own_episode(broker: Broker) -> None:
    answer = ResetAnswer(most_bytes(broker.max_payload_bytes) * 3 // 4)
    answer.add(done([{"role": "user", "content": "x" * 20 * MB}]))
    answer.add(done([{"role": "user", "content": "short"}]))
    first, second = answer.episodes
    assert first.error is not None
    assert "the first prompt of the game has 20," in first.error.message
    assert second.prompt == 0


# -- Rows of conversations as groups of the rollout log --------------------------------------------


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


def demonstrated(data: ChatData, sample: int | None, model: str = "m") -> Any:
    config = JobConfig.model_validate(
        {
            "model": {"path": model},
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
    assert row.messages == ROWS[0]["messages"][:2]  # up to the last one that is learnt


@pytest.mark.parametrize("key", ["weight", "trainable", "train", "training", "loss"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_message_that_its_author_excludes_is_context(
    tmp_path: Path, key: str, suffix: str
) -> None:
    def said(text: str, value: Any = None) -> dict[str, Any]:
        return {"role": "assistant", "content": text} | ({} if value is None else {key: value})

    on, off = (1, 0) if key == "weight" else (True, False)
    rows = [
        {"messages": [ASKED, said("3", off), ASKED, said("4", on), ASKED, said("5", off)]},
        {"messages": [ASKED, said("3", off)]},
    ]
    path = write_rows(tmp_path / f"c.{suffix}", rows)
    with contextlib.closing(ChatData([str(path)])) as data:
        (row,) = demonstrated(data, 0).trajectories
        chat = ChatTokenizer(make_tokenizer())
        assert chat.decode(row.token_ids[row.mask == 1]) == "4"
        assert len(row.turn_ends) == 1
        assert row.turn_ends[-1] == len(row.token_ids) - 1
        whole = chat.conversation(rows[0]["messages"][:4])  # the same tokens, one turn less
        assert row.token_ids.tolist() == whole.token_ids.tolist()
        with pytest.raises(GroupFailed, match="no assistant message is learnt in row 1"):
            demonstrated(data, 1)
        assert data.note == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "weight": 0.5}, r"row 0 of .*: message 1 has weight 0\.5"),
        ({"role": "assistant", "train": "no"}, "message 1 has train 'no'"),
        ({"role": "user", "weight": 1}, "message 1 has weight 1, and its role is 'user'"),
    ],
)
def test_a_weight_that_cannot_be_honoured_is_refused_by_row_and_key(
    tmp_path: Path, message: dict[str, Any], words: str
) -> None:
    row = {"messages": [ASKED, {"content": "4", **message}]}
    path = write_rows(tmp_path / "c.jsonl", [row])
    with contextlib.closing(ChatData([str(path)])) as data, pytest.raises(DataError, match=words):
        data.row(0)


def test_keys_that_may_have_no_effect_are_named_with_their_first_row(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "4", "mask_it": True, "tool_calls": None}
    path = write_rows(tmp_path / "c.jsonl", [ROWS[0], {"messages": [ASKED, said]}] * 2)
    with contextlib.closing(ChatData([str(path)])) as data:
        for number in range(4):
            data.row(number)
        assert data.note.startswith("keys of messages that only a chat template may read: 'mask_it")
        assert data.note.count("row 1 of") == 1


def test_a_row_longer_than_the_models_positions_is_given_up(data: ChatData, tmp_path: Path) -> None:
    length = len(demonstrated(data, 0).trajectories[0].token_ids)
    for positions in (length, length - 1):
        folder = tmp_path / str(positions)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    demonstrated(data, 0, str(tmp_path / str(length)))
    with pytest.raises(GroupFailed, match=f"{length} tokens, model .* positions for {length - 1}"):
        demonstrated(data, 0, str(tmp_path / str(length - 1)))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (1, "no assistant message is learnt in row 1"),
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


# -- What only a teacher reads: where it stands in the first prompt, and what is refused -----------


USER = {"role": "user", "content": "What is 6 * 7?"}


def test_the_text_stands_at_the_end_of_the_users_words() -> None:
    system = {"role": "system", "content": "Answer."}
    assert with_text([system, USER], "It is 42.") == [
        system,
        {"role": "user", "content": "What is 6 * 7?\n\nIt is 42."},
    ]
    image = {"type": "image", "image": b"..."}
    (shown,) = with_text([{"role": "user", "content": [image]}], "It is 42.")
    assert shown["content"] == [image, {"type": "text", "text": "\n\nIt is 42."}]
    assert with_text([system], "It is 42.")[-1] == {"role": "user", "content": "It is 42."}


def test_the_teachers_prompt_is_the_policys_with_the_text_in_it() -> None:
    chat = chat_of(CHATML)
    own = chat.first_prompt([USER])
    context = TeacherContext("solution", 40, chat)
    prompt = context.prompt([USER], [], len(own), {"solution": "It is 42."})
    wanted = chat.first_prompt([{"role": "user", "content": "What is 6 * 7?\n\nIt is 42."}])
    np.testing.assert_array_equal(prompt, wanted)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"correct": 1.0}, "the game's `info` has None under this name"),
        ({"solution": 42}, "the game's `info` has 42 under this name"),
        ({"solution": ""}, "the game's `info` has '' under this name"),
        ({"solution": "It is " + "4" * 99}, "tokens longer than the policy's"),
    ],
)
def test_a_game_that_tells_no_text_or_too_long_a_one_is_named(
    info: dict[str, Any], message: str
) -> None:
    chat = chat_of(CHATML)
    with pytest.raises(DataError, match=message):
        TeacherContext("solution", 40, chat).prompt([USER], [], 20, info)
