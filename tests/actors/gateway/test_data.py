"""What pages are made of: curves, tables of jobs, checkpoints, episodes."""

import base64
import io
import json
import math
import random
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.curves import MAX_NAMES, MAX_POINTS, Curves
from tinkermq.actors.gateway.data.episodes import (
    EXACT,
    group_advantages,
    image_url,
    show_episode,
    show_message,
    show_part,
    show_steps,
    show_tokens,
    steps_of,
)
from tinkermq.actors.gateway.data.jobs import (
    Query,
    check_here,
    differences,
    list_checkpoints,
    pack,
    row,
    seed_groups,
    select,
)
from tinkermq.actors.gateway.data.metrics import (
    CHARTS,
    add_point,
    chart_points,
    finite_values,
    job_curves,
)
from tinkermq.actors.gateway.data.overview import allowed_actions
from tinkermq.actors.gateway.data.token_text import TokenTexts, token_texts
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.storage.checkpoints import CheckpointMirror
from tinkermq.actors.storage.files import write_digests
from tinkermq.actors.storage.stores import Stores
from tinkermq.actors.training import advantages as learner
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.agent import CallPlaces
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.errors import MessageError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record
from tests.support.groups import make_group, make_trajectory


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


# -- Curves of any length become at most a thousand points, and no extreme is lost -----------------


REWARD = "training_step_reward"


def metric(step: int, **values: float) -> Metric:
    return Metric(step=step, values={REWARD: float(step), **values}, time=0.0)


def test_a_short_run_is_shown_step_by_step() -> None:
    curves = job_curves()
    add_point(curves, [metric(1), metric(2), metric(4)])
    points = curves.points()
    assert points["width"] == 1
    assert points["x"] == [1, 2, 4]
    assert points["series"] == {REWARD: {"y": [1.0, 2.0, 4.0]}}


def test_a_step_that_is_told_again_counts_as_it_was_told_last() -> None:
    curves = job_curves()
    add_point(curves, [metric(3), Metric(step=3, values={REWARD: 7.0}, time=1.0)])
    assert curves.points()["series"][REWARD]["y"] == [7.0]


def test_values_that_are_no_numbers_are_left_out() -> None:
    curves = job_curves()
    told = Metric(step=1, values={REWARD: math.nan, "actor/entropy": 2.0}, time=0)
    add_point(curves, [told])
    assert chart_points(curves)["series"] == {"actor/entropy": {"y": [2.0]}}
    assert finite_values(told) == {"actor/entropy": 2.0}


def test_every_metric_is_there_by_its_name_or_a_pattern_and_by_its_steps() -> None:
    curves = job_curves()
    names = {"critic/score/mean": 1.0, "critic/score/max": 2.0, "game/arm": 3.0}
    add_point(curves, [metric(step, **names) for step in range(1, 11)])
    every = chart_points(curves)
    assert every["names"] == sorted([REWARD, *names])
    assert set(every["series"]) == set(every["names"])
    some = chart_points(curves, ["critic/*", "no/such"], first=4, last=6)
    assert some["x"] == [4, 5, 6]
    assert some["names"] == every["names"]
    assert set(some["series"]) == {"critic/score/mean", "critic/score/max"}


def test_curves_may_be_drawn_over_time_and_tokens() -> None:
    curves = job_curves()
    tokens = "perf/total_num_tokens"
    told = [Metric(step=n, values={REWARD: 1.0, tokens: 10.0 * n}, time=1.7e9 + n) for n in (1, 2)]
    add_point(curves, [Metric(step=0, values={"val/mean_score": 0.0}, time=1.7e9 - 5), *told])
    points = chart_points(curves, [REWARD])
    assert points["time"] == [0.0, 6.0, 7.0]
    assert points["tokens"] == [0.0, 10.0, 30.0]
    assert list(points["series"]) == [REWARD]


def test_tokens_of_a_long_run_add_up_over_its_points() -> None:
    curves, steps = job_curves(), 4000
    told = {"perf/total_num_tokens": 8.0}
    add_point(curves, [Metric(step=n, values=told, time=float(n)) for n in range(steps)])
    points = chart_points(curves, ["perf/*"])
    assert points["width"] > 1
    assert points["tokens"][-1] == 8.0 * steps


def test_nothing_is_drawn_of_a_run_without_metrics() -> None:
    assert job_curves().points() == {"width": 1, "x": [], "series": {}}


@pytest.mark.parametrize("steps", [999, 1000, 1001, 5000, 100_000])
def test_a_long_run_has_at_most_a_thousand_points_and_keeps_its_extremes(steps: int) -> None:
    curves, spike = job_curves(), steps // 3
    values = [random.Random(step).random() for step in range(steps)]
    values[spike] = 99.0
    batch = [Metric(step=step, values={REWARD: values[step]}, time=0.0) for step in range(steps)]
    for start in range(0, steps, 1000):
        add_point(curves, batch[start : start + 1000])
    points = curves.points()
    assert len(points["x"]) <= MAX_POINTS
    assert points["x"][-1] <= steps - 1 < points["x"][-1] + points["width"]
    series = points["series"][REWARD]
    assert max(series.get("high", series["y"])) == 99.0
    if points["width"] > 1:
        first = values[: points["width"]]
        assert series["y"][0] == pytest.approx(sum(first) / len(first), rel=1e-3)
        assert series["low"][0] == pytest.approx(min(first), rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-5, 5)), max_size=80))
def test_low_mean_and_high_are_in_order_however_the_steps_come(
    told: list[tuple[int, float]],
) -> None:
    curves = Curves(max_points=8)
    for step, value in told:
        curves.add([step], [{REWARD: value}])
    points = curves.points()
    assert len(points["x"]) <= 8
    one = points["series"].get(REWARD, {})
    for low, mean, high in zip(
        one.get("low", []), one.get("y", []), one.get("high", []), strict=False
    ):
        assert low - 1e-3 <= mean <= high + 1e-3


def test_no_chart_shows_a_name_twice() -> None:
    names = [line.name for chart in CHARTS for line in chart.lines]
    assert len(set(names)) == len(names)


def test_names_are_taken_as_they_come_and_their_number_is_bounded() -> None:
    curves = Curves()
    curves.add([0, 1], [{"loss:sum": 2.0}, {"loss:sum": 4.0, "late": 1.0}])
    curves.add([1], [{f"name-{number}": 0.0 for number in range(2 * MAX_NAMES)}])
    series = curves.points()["series"]
    assert series["loss:sum"] == {"y": [2.0, 4.0]}
    assert series["late"] == {"y": [None, 1.0]}
    assert len(series) == MAX_NAMES


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(-5, 5)), max_size=40), st.integers(0, 40))
def test_what_is_written_down_goes_on_as_if_it_had_not_been(
    told: list[tuple[int, float]], at: int
) -> None:
    whole, half = Curves(max_points=8), Curves(max_points=8)
    for number, (step, value) in enumerate(told):
        if number == at:
            kept = json.loads(json.dumps(half.to_map()))
            half = Curves(max_points=8)
            half.restore(kept)
        for one in (whole, half):
            one.add([step], [{"a": value, "b": -value} if step % 3 else {"a": value}])
    assert half.points() == whole.points()
    assert half.to_map() == whole.to_map()


# -- Checkpoints are listed and packed; nothing beside them is -------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Any:
    folder = tmp_path
    for step in (3, 12):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        (folder / "learner").mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
        (folder / "learner" / "state.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "run" / "checkpoints" / "latest").symlink_to(folder)
    (tmp_path / "run" / "checkpoints" / "step_000099").symlink_to(tmp_path)
    return record(1, run_dir=str(tmp_path / "run"))


@pytest.fixture
async def stores(broker: Broker) -> Stores:
    return Stores(broker)


async def test_checkpoints_are_listed_newest_first_links_left_out(run: Any, stores: Stores) -> None:
    found = list_checkpoints(run, stores)
    assert [one["step"] for one in found] == [12, 3]
    assert found[0]["files"] == ["model.safetensors", "learner/state.json"]
    assert found[0]["bytes"] == 256 * 5000 + 2


async def test_a_checkpoint_is_packed_as_an_ordinary_tar_archive(run: Any, stores: Stores) -> None:
    check_here(run, 12, stores)
    packed = b"".join(pack(run.run_dir, 12, "run-12"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = archive.getnames()
        weights = archive.extractfile("run-12/model.safetensors")
        assert weights is not None
        assert weights.read() == bytes(range(256)) * 5000
    assert names == ["run-12/model.safetensors", "run-12/learner/state.json"]


@pytest.mark.parametrize("step", [7, 99])
async def test_a_checkpoint_that_is_not_there_is_named(run: Any, step: int, stores: Stores) -> None:
    with pytest.raises(NotFoundError, match=f"step {step}"):
        check_here(run, step, stores)


async def test_linked_folders_of_others_are_no_checkpoints_of_a_run(
    run: Any, tmp_path: Path, stores: Stores
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "checkpoints").symlink_to(Path(run.run_dir) / "checkpoints")
    linked = record(2, run_dir=str(mine))
    assert list_checkpoints(linked, stores) == []
    with pytest.raises(NotFoundError, match="step 12"):
        check_here(linked, 12, stores)
    with pytest.raises(NotADirectoryError):
        list(pack(str(mine), 12, "run-12"))


async def test_a_run_with_a_store_lists_what_is_there(tmp_path: Path, stores: Stores) -> None:
    url = f"file://{tmp_path}/store"
    run = record(1, config={"storage": {"url": url}})
    mirror = CheckpointMirror.of_run(url, run.scope, keep_last=1, keep_every=0)
    made = tmp_path / "made"
    (made / "learner").mkdir(parents=True)
    (made / "learner" / "state.json").write_text("{}")
    write_digests(made)
    mirror.upload(8, made)
    (one,) = list_checkpoints(run, stores)
    assert (one["step"], one["files"]) == (8, ["SHA256SUMS", "learner/state.json"])
    assert one["path"].startswith(f"{mirror.store.url}/step_000008-")
    with pytest.raises(NotFoundError, match=f"of step 8 .* is in its store: {url}"):
        check_here(run, 8, stores)
    with pytest.raises(NotFoundError, match="step 7"):
        check_here(run, 7, stores)


async def test_a_run_without_folder_has_no_checkpoints(stores: Stores) -> None:
    assert list_checkpoints(record(1), stores) == []
    assert list_checkpoints(record(1, run_dir="/nonexistent"), stores) == []


# -- A job's page offers what the job can do -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "stop", "offered"),
    [
        ("train", "RUNNING", "no", {"checkpoint", "pause", "stop", "stop_now"}),
        ("sft", "RUNNING", "no", {"checkpoint", "pause", "stop", "stop_now"}),
        ("train", "RUNNING", "drain", {"stop_now"}),
        ("train", "PAUSED", "no", {"checkpoint", "resume", "stop", "stop_now"}),
        ("infer", "RUNNING", "no", {"stop", "stop_now"}),
        ("train", "COMPLETED", "no", {"resume", "archive", "delete"}),
    ],
)
def test_a_job_offers_what_its_state_and_kind_allow(
    kind: str, state: str, stop: str, offered: set[str]
) -> None:
    changes = {"kind": kind, "state": state, "stop": stop, "configured": True}
    can = allowed_actions(new_record(JobScope("local", "a")).model_copy(update=changes))
    assert {name for name, may in can.items() if may} - {"scale", "prioritize"} == offered


def test_an_archived_job_can_be_brought_back_or_deleted_and_nothing_else() -> None:
    ended = new_record(JobScope("local", "a"), state="COMPLETED", archived=1.0)
    assert {name for name, may in allowed_actions(ended).items() if may} == {"unarchive", "delete"}


# -- An episode is shown as it was: messages, images, turns, tokens, advantages --------------------


PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def two_turns(**fields: Any) -> Any:
    return make_trajectory(
        [1, 2, 3],
        [([10, 11], [4]), ([12], [])],
        [0.5, 1.0],
        logprobs=[-0.01, -3.0, -9.0],
        versions=[4, 4, 5],
        messages=[
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": "two"},
        ],
        **fields,
    )


def test_turns_have_their_reward_version_and_length_and_stand_at_their_messages() -> None:
    group = make_group([two_turns(), make_trajectory([1], [([9], [])], [0.0])])
    shown = show_episode(group, 0, estimator="grpo", step=7)
    assert [turn["reward"] for turn in shown["turns"]] == [0.5, 1.0]
    assert [turn["tokens"] for turn in shown["turns"]] == [2, 1]
    assert [turn["versions"] for turn in shown["turns"]] == [[4], [5]]
    turns = [message["turn"] and message["turn"]["turn"] for message in shown["messages"]]
    assert turns == [None, 0, None, 1]
    assert shown["step"] == 7
    assert shown["reward"] == 1.5


def test_turns_that_were_cut_are_told_where_the_episode_was_recorded_with_reasons() -> None:
    told = two_turns(finish_reasons=["stop", "length"])
    shown = show_episode(make_group([told, two_turns()]), 0, estimator="grpo", step=7)
    assert [turn["finish_reason"] for turn in shown["turns"]] == ["stop", "length"]
    assert shown["finish"] == "length"
    untold = show_episode(make_group([told, two_turns()]), 1, estimator="grpo", step=7)
    assert [turn["finish_reason"] for turn in untold["turns"]] == [None, None]
    assert untold["finish"] == "done"


def test_tokens_show_mask_version_reward_and_a_colour_by_log_prob() -> None:
    shown = show_tokens(two_turns(), TokenTexts())
    tokens = shown["tokens"]
    assert [token["made"] for token in tokens] == [False] * 3 + [True, True, False, True]
    assert [token["level"] for token in tokens if token["made"]] == [0, 4, 5]
    assert [token["reward"] for token in tokens] == [None] * 4 + [0.5, None, 1.0]
    assert tokens[0]["text"] == "⟨1⟩"
    assert not shown["decoded"]


def one_turn(**fields: Any) -> Any:
    ids = [([index + 10], [5]) for index in range(fields.pop("turns", 1))]
    asks = [{"role": "user", "content": "ask"}]
    for index in range(len(ids)):
        asks += [{"role": "assistant", "content": f"{index}"}, {"role": "user", "content": "on"}]
    return make_trajectory([1, 2], ids, [0.0] * len(ids), **{"messages": asks, **fields})


def places(*numbers: int, first: int = 0) -> CallPlaces:
    ints, num = partial(np.array, dtype=np.int32), len(numbers)
    depths, none = ints(range(first, first + num)), ints([-1] * num)
    zeros = np.zeros(num, np.float32)
    return CallPlaces(
        numbers=ints(numbers), nexts=none, depths=depths, observed=ints([0] * num), rewards=zeros,
        branches=none, roles=[""] * num,
    )  # fmt: skip


def test_steps_of_rows_and_players_are_in_the_order_of_time() -> None:
    rows = [
        one_turn(turns=2, episode=0, calls=places(0, 3)),
        one_turn(turns=2, episode=0, calls=places(1, 2), kind="sub-agent"),
    ]
    group = make_group(rows)
    for number in (0, 1):
        assert [step[:3] for step in steps_of(group, number)] == [
            (0, 0, 0), (1, 0, 1), (1, 1, 2), (0, 1, 3)
        ]  # fmt: skip
    times = {"white": [1.0, 4.0], "black": [2.0, 3.0]}
    players = [one_turn(turns=2, role=role, turn_times=at) for role, at in times.items()]
    games = make_group([*players, *(one_turn(turns=2, role=role) for role in times)])
    assert [step[:2] for step in steps_of(games, 1)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert [step[:2] for step in steps_of(games, 2)] == [(2, 0), (3, 0), (2, 1), (3, 1)]


def test_a_step_shows_what_is_new_and_a_row_not_what_it_shares() -> None:
    main = one_turn(turns=3, episode=0, calls=places(0, 1, 2))
    fork = one_turn(turns=3, episode=0, kind="edited")
    fork = fork.model_copy(
        update={
            **{"turn_ends": fork.turn_ends[2:], "rewards": fork.rewards[2:]},
            "calls": places(3, first=2),
            "messages": [*fork.messages[:5], {"role": "assistant", "content": "another"}],
        }
    )
    group = make_group([main, fork])
    shown = show_steps(group, steps_of(group, 0), 0, TokenTexts())
    said = [[part["text"] for one in step["messages"] for part in one["parts"]] for step in shown]
    assert said == [["ask", "0"], ["on", "1"], ["on", "2", "on"], ["another"]]
    assert [step["behind"] for step in shown] == [None, None, None, 0]
    assert [[token["id"] for token in step["tokens"]] for step in shown[:3]] == [
        [1, 2, 10], [5, 11], [5, 12, 5]
    ]  # fmt: skip
    assert shown[3]["messages"][0]["turn"]["reward"] == 0.0


def test_a_page_of_a_long_episode_has_some_steps_and_bounded_tokens() -> None:
    long = make_trajectory(range(3000), [([7, 8], [9])] * 120, [0.0] * 120)
    group = make_group([long])
    steps = steps_of(group, 0)
    first = show_steps(group, steps, 0, TokenTexts())
    assert (len(first), len(first[0]["tokens"]), first[0]["left_out"]) == (50, 512, 2490)
    last = show_steps(group, steps, 100, TokenTexts())
    assert [step["number"] for step in last] == list(range(101, 121))
    assert [token["id"] for token in last[0]["tokens"]] == [9, 7, 8]


def test_runs_that_differ_in_their_seeds_only_are_of_one_group() -> None:
    configs = [{"seed": seed, "learner": {"lr": lr}} for lr in (1, 2) for seed in (1, 2)]
    assert seed_groups([*configs, {"seed": 1, "learner": {"lr": 3}}]) == [
        *["learner.lr=1 (2 seeds)"] * 2, *["learner.lr=2 (2 seeds)"] * 2, ""
    ]  # fmt: skip
    assert seed_groups(configs[:2]) == ["all (2 seeds)"] * 2
    assert seed_groups(configs[:1] * 2) == ["", ""]


def test_a_missing_episode_is_named() -> None:
    with pytest.raises(NotFoundError, match="has no episode 1"):
        show_episode(make_group([two_turns()]), 1, estimator="grpo", step=None)


@pytest.mark.parametrize("value", [PNG, base64.b64encode(PNG).decode()])
def test_an_image_becomes_a_data_url(value: Any) -> None:
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert image_url(value) == url
    assert show_part({"type": "image", "image": value}) == {"kind": "image", "url": url}
    assert image_url(url) == url
    assert show_part({"type": "image_url", "image_url": {"url": url}})["kind"] == "image"


@pytest.mark.parametrize(
    "value",
    [
        "https://example.com/a.png",
        "javascript:alert(1)",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,PGI+",
        b"<svg onload=alert(1)>",
        b"RIFF1234AVI ",
        None,
        17,
    ],
)
def test_what_is_no_plain_image_is_never_given_to_the_browser(value: Any) -> None:
    assert image_url(value) == ""
    assert show_part({"type": "image", "image": value})["kind"] == "text"


def test_tool_calls_and_parts_are_shown_whatever_their_shape() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    shown = show_message({"role": "assistant", "content": None, "tool_calls": [call, "odd"]})
    assert shown["tool_calls"][0] == {"name": "add", "arguments": '{"a": 1}'}
    assert shown["tool_calls"][1]["name"] == "odd"
    assert shown["parts"] == []
    parts = show_message({"content": [{"type": "text", "text": "a"}, {"x": 1}, 3]})["parts"]
    assert [part["text"] for part in parts] == ["a", '{"x": 1}', "3"]


@pytest.mark.parametrize("estimator", sorted(EXACT))
@pytest.mark.parametrize("rewards", [[0.0, 1.0, 1.0, 3.0], [0.1, 0.1, 0.1], [2.0]])
def test_advantages_are_those_of_the_learner(estimator: str, rewards: list[float]) -> None:
    count = len(rewards)
    inputs = learner.AdvantageInputs(
        rewards_S=torch.tensor(rewards, dtype=torch.float64),
        group_S=torch.zeros(count, dtype=torch.int64),
        seq_N=torch.arange(count),
        baseline_S=torch.full((count,), 0.5, dtype=torch.float64),
    )
    name, shown = group_advantages(estimator, rewards, 0.5)
    assert estimator in name
    np.testing.assert_allclose(shown, getattr(learner, estimator)(inputs).numpy(), atol=1e-5)


def test_an_estimator_that_needs_more_shows_the_gap_to_the_mean_and_says_so() -> None:
    name, shown = group_advantages("reinforce_pp", [0.0, 1.0])
    assert name == "reward − group mean"
    assert shown == [-0.5, 0.5]


def test_texts_come_from_the_models_tokenizer_characters_at_their_last_byte(tmp_path: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    texts = token_texts("/nonexistent", tmp_path)
    ids = tokenizer.encode("aé<b")
    assert texts.known
    assert "".join(texts.of(ids)) == "aé<b"
    assert len(texts.of(ids)) == len(ids)
    assert not token_texts("/nonexistent").known
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = token_texts(str(tmp_path))
    assert broken.of([7]) == ["⟨7⟩"]
    assert not broken.known


def test_a_tokenizer_that_never_ends_is_ended_and_shown_as_ids(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    hostile = {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "x"}
    whole["decoder"] = {
        "type": "Sequence",
        "decoders": [whole["decoder"], {"type": "Fuse"}, hostile],
    }
    whole["added_tokens"].append(
        {**whole["added_tokens"][0], "id": len(tokenizer), "content": "a" * 26 + "b"}
    )
    file.write_text(json.dumps(whole))
    texts = token_texts("", tmp_path, limit_s=0.5)
    ids = [len(tokenizer)] * 4000
    assert texts.of(ids) == [f"⟨{len(tokenizer)}⟩"] * 4000
    assert not texts.known
