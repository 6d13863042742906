"""The table of jobs finds, filters and pages."""

from typing import Any

import pytest
from tinkermq.actors.gateway.data.jobs import Query, differences, row, select
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import MessageError


def record(number: int, state: str = "RUNNING", **fields: Any) -> JobRecord:
    base: dict[str, Any] = {
        "job": f"id{number}",
        "name": f"run-{number}",
        "user": "local",
        "state": state,
        "config": {"env": {"game": "bandit"}, "model": {"path": "m/tiny"}},
        "created": float(number),
    }
    return JobRecord(**{**base, **fields})


RECORDS = [record(3), record(2, "QUEUED", reason="waits for 4 slots"), record(1, "FAILED")]


def names(query: Query) -> list[str]:
    return [one.name for one in select(RECORDS, query).records]


def test_all_jobs_are_shown_in_their_order_and_counted() -> None:
    page = select(RECORDS, Query())
    assert [one.name for one in page.records] == ["run-3", "run-2", "run-1"]
    assert page.counts == {
        "all": 3, "active": 1, "queued": 1, "completed": 0, "failed": 1, "cancelled": 0,
    }  # fmt: skip


def test_archived_jobs_are_listed_when_they_are_asked_for_and_only_then() -> None:
    away = record(4, "COMPLETED", archived=1.0)
    page = select([*RECORDS, away], Query())
    assert "run-4" not in [one.name for one in page.records]
    assert page.counts["completed"] == 0
    assert [one.name for one in select([*RECORDS, away], Query(state="archived")).records] == [
        "run-4"
    ]


def test_a_state_and_a_group_of_states_filter() -> None:
    assert names(Query(state="queued")) == ["run-2"]
    assert names(Query(state="RUNNING")) == ["run-3"]
    assert names(Query(state="active")) == ["run-3"]
    assert names(Query(state="no-such-state")) == []


def test_every_word_of_a_search_must_be_found_somewhere() -> None:
    assert names(Query(search="slots")) == ["run-2"]
    assert names(Query(search="BANDIT tiny run-1")) == ["run-1"]
    assert names(Query(search="bandit nothing")) == []


def test_a_page_is_cut_out_and_the_total_told() -> None:
    page = select(RECORDS, Query(offset=1, limit=1))
    assert [one.name for one in page.records] == ["run-2"]
    assert page.total == 3


def test_jobs_are_sorted_by_what_their_records_say() -> None:
    assert names(Query(sort="name")) == ["run-1", "run-2", "run-3"]
    assert names(Query(sort="-name")) == ["run-3", "run-2", "run-1"]
    assert names(Query(sort="state")) == ["run-1", "run-2", "run-3"]
    with pytest.raises(MessageError, match="by 'colour'") as raised:
        names(Query(sort="colour"))
    assert "reward" in raised.value.hint


def test_runs_differ_where_their_configurations_do() -> None:
    one = {"name": "a", "learner": {"lr": 1e-3, "betas": [0.9, 0.99]}, "storage": None}
    two = {"name": "b", "learner": {"lr": 1e-4, "betas": [0.9, 0.99]}, "storage": {"url": "s3://x"}}
    assert differences([one, two]) == [
        ("learner.lr", ["0.001", "0.0001"]),
        ("storage", ["null", None]),
        ("storage.url", [None, '"s3://x"']),
    ]
    assert differences([one, one]) == differences([]) == []


def test_a_configuration_of_another_shape_does_not_break_the_row() -> None:
    odd = record(4, config={"env": "?", "model": None, "training": []})
    assert row(odd, {})["game"] == ""
    assert row(odd, {"step": 5.0, "training/total_steps": float("nan")})["total_steps"] is None
