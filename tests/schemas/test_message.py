"""The base of messages: versions, unknown keys, errors, and the names of subjects."""

from typing import get_args

import numpy as np
import pytest
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import (
    Boundary,
    BrokerError,
    ConfigError,
    ConflictError,
    DataError,
    DeadlineError,
    EngineError,
    FencedError,
    GameError,
    InternalError,
    MessageError,
    ModelError,
    NotFoundError,
    StateError,
    error_from_reply,
    of_boundary,
)
from tinkermq.schemas.wire.message import ErrorReply
from tinkermq.schemas.wire.subjects import JobScope, number_of, rpc, user_of_rpc

TASK = {"task": 3, "seed": 5, "group_size": 2}


def test_an_unknown_key_is_ignored_and_an_unknown_version_refused() -> None:
    assert Task.from_bytes(pack({"v": 1, "later": True, **TASK})).task == 3
    with pytest.raises(MessageError, match="schema version 2, this actor speaks 1"):
        Task.from_bytes(pack({"v": 2, **TASK}))
    with pytest.raises(MessageError, match="schema version None"):
        Task.from_bytes(pack(TASK))


def test_a_malformed_field_is_named_with_its_value() -> None:
    with pytest.raises(MessageError, match=r"group_size: .*\(got 0\)"):
        Task.from_bytes(pack({"v": 1, **TASK, "group_size": 0}))
    with pytest.raises(MessageError, match="a Task is a map, this is a list"):
        Task.from_bytes(pack([1]))


@pytest.mark.parametrize(
    "version", [np.zeros(2, np.int32), b"1", [1], {"v": 1}, "1" * 10_000, 1.5, 2**63, None]
)
def test_a_version_of_any_type_is_refused_in_a_few_words(version: object) -> None:
    with pytest.raises(MessageError, match="schema version") as raised:
        Task.from_map({**TASK, "v": version})
    assert len(raised.value.message) < 300


def test_a_wrong_array_is_told_by_its_shape() -> None:
    array = np.zeros((4,) * 7, np.int32)
    for value in (array, [array], {"a": array}):
        with pytest.raises(MessageError) as raised:
            Task.from_bytes(pack({"v": 1, **TASK, "seed": value}))
        assert "int32 array of (4, 4, 4, 4, 4, 4, 4)" in raised.value.message
        assert len(raised.value.message) < 300


def test_of_very_many_mistakes_the_number_is_told() -> None:
    fields = {"v": 1, "actor": "a", "attempt": 1, "lines": [None] * 900, "time": 1.0}
    with pytest.raises(MessageError, match="LogLines is malformed: 900 of its values are wrong"):
        LogLines.from_bytes(pack(fields))


def test_an_error_of_any_length_fits_into_a_reply() -> None:
    reply = ErrorReply.of("config", "\ud800" + "x" * 10_000_000, "y" * 10_000_000)
    assert len(ErrorReply.from_bytes(reply.to_bytes()).to_bytes()) < 50_000


def test_a_deep_value_in_a_field_is_shown_short() -> None:
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(MessageError) as raised:
        Task.from_bytes(pack({"v": 1, **TASK, "seed": deep}))
    assert len(raised.value.message) < 300


def test_an_error_comes_back_as_the_class_that_was_raised() -> None:
    error = error_from_reply("fenced", "another learner", "end this one")
    assert isinstance(error, FencedError)
    assert str(error) == "another learner\n  end this one"
    assert type(error_from_reply("broker", "m", "")) is BrokerError
    assert type(error_from_reply("not_found", "m", "")) is NotFoundError  # not what is below it
    assert type(error_from_reply("internal", "m", "")) is InternalError
    assert type(error_from_reply("from the future", "m", "")) is InternalError


def test_an_actor_ended_by_a_mistake_of_its_user_is_not_started_again() -> None:
    mistakes = (ConfigError, DataError, ModelError, GameError, NotFoundError, StateError)
    passing = (BrokerError, DeadlineError, EngineError, ConflictError, FencedError, InternalError)
    assert not [one for one in mistakes if one.may_pass]
    assert not [one for one in passing if not one.may_pass]


@pytest.mark.parametrize("boundary", get_args(Boundary))
def test_each_boundary_of_an_episode_has_one_kind_of_error(boundary: Boundary) -> None:
    assert of_boundary(boundary).boundary == boundary


def test_subjects_are_built_from_whole_tokens() -> None:
    scope = JobScope("ann", "j1")
    assert scope.rollout(7) == "tmq.v1.job.ann.j1.rollout.7"
    assert scope.env("h1", "step") == "tmq.v1.job.ann.j1.env.h1.step"
    assert scope.stream_task == "tmq-ann-j1-task"
    assert user_of_rpc(rpc("ann", "scheduler", "submit")) == "ann"
    assert number_of(scope.task(12)) == 12


@pytest.mark.parametrize("name", ["", "a.b", "A", "*", ">", "a b", "x" * 65, "-a", "ä"])
def test_a_name_that_cannot_be_a_token_is_refused(name: str) -> None:
    with pytest.raises(MessageError, match="cannot be part of a subject"):
        JobScope(name, "j1")
