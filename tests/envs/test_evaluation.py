"""Scores, their uncertainty and comparisons, against tables computed by hand."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.envs.evaluation import (
    Scored,
    compare,
    evaluation_tasks,
    is_success,
    kind_of,
    mean_info,
    mean_with_interval,
    pass_at_k,
    share_with_interval,
    summarize,
    task_seed,
    validation_metrics,
)
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import DescribeReply
from tinkermq.schemas.metric import EpisodeScore
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.codec import pack, unpack
from tinkermq.schemas.wire.errors import ConfigError


def episodes(rewards: list[float], kind: str = "", first: int = 0) -> list[Scored]:
    return [
        Scored(first + task, 0, reward, reward > 0.5, kind) for task, reward in enumerate(rewards)
    ]


def test_the_game_may_say_itself_what_a_success_is() -> None:
    assert is_success(1.0, {}, 0.5)
    assert not is_success(0.5, {}, 0.5)
    assert is_success(0.0, {"success": True}, 0.5)
    assert not is_success(1.0, {"success": False}, 0.5)
    assert is_success(1.0, {"success": "no flag"}, 0.5)


def test_numbers_of_numpy_count_as_they_travel() -> None:
    numbers = {"success": np.bool_(False), "moves": np.int64(3), "score": np.float32(0.5)}
    info = unpack(pack({**numbers, "board": np.zeros(3)}))
    assert not is_success(1.0, info, 0.5)
    assert mean_info([info, {"moves": 5}]) == {"success": 0.0, "moves": 4.0, "score": 0.5}


def test_a_type_is_what_the_game_says_or_the_datas_source() -> None:
    assert kind_of({"type": "look"}, "alfworld") == "look"
    assert kind_of({"task_type": "heat"}, "") == "heat"
    assert kind_of({"type": 3}, "alfworld") == "alfworld"


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    interval = mean_with_interval([0.0, 1.0, 1.0, 0.0])
    half = 1.959964 * math.sqrt(1 / 3) / 2
    assert interval.mean == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.5 - half, 0.5 + half))
    assert math.isnan(mean_with_interval([1.0]).low)
    assert math.isnan(mean_with_interval([]).mean)


@pytest.mark.parametrize(
    ("solved", "tasks", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (1, 1, 0.2065, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_of_an_accuracy_is_wilsons(
    solved: int, tasks: int, low: float, high: float
) -> None:
    """The last are the published example of Newcombe (1998), doi.org/10.1002/sim.2380171802."""
    interval = share_with_interval([1.0] * solved + [0.0] * (tasks - solved))
    assert interval.mean == solved / tasks
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)
    assert math.isnan(share_with_interval([]).mean)


@given(st.integers(2, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_success(n: int, data: st.DataObject) -> None:
    solved = data.draw(st.integers(0, n))
    outcomes = [True] * solved + [False] * (n - solved)
    for k, value in pass_at_k([solved], n).items():
        draws = list(combinations(outcomes, k))
        assert value == pytest.approx(sum(map(any, draws)) / len(draws))


def test_episodes_of_one_task_are_not_counted_as_independent() -> None:
    one_each = summarize([Scored(task, 0, float(task % 2), task % 2 == 1) for task in range(8)])
    four_each = summarize(
        [Scored(task, s, float(task % 2), task % 2 == 1) for task in range(8) for s in range(4)],
        samples=4,
    )
    assert one_each["mean_reward_ci95"] == four_each["mean_reward_ci95"]
    assert (four_each["tasks"], four_each["episodes"]) == (8, 32)
    assert four_each["pass@4"] == four_each["accuracy"] == 0.5


def test_scores_are_told_apart_by_type_where_there_are_several() -> None:
    summary = summarize(episodes([1, 1], "easy") + episodes([0, 1], "hard", first=2))
    assert summary["mean_reward"] == 0.75
    assert summary["by_type"]["easy"]["accuracy"] == 1.0
    assert summary["by_type"]["hard"]["accuracy"] == 0.5
    assert "by_type" not in summarize(episodes([1, 0], "easy"))


def test_a_pass_at_k_counts_only_tasks_with_all_their_episodes() -> None:
    whole = [Scored(0, 0, 1, True), Scored(0, 1, 0, False)]
    assert summarize([*whole, Scored(1, 0, 0, False)], samples=2)["pass@2"] == 1.0


def test_a_comparison_is_paired_by_task() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(size=200)  # tasks differ far more than versions do
    a, b = episodes(base.tolist()), episodes((base + 0.1).tolist())
    result = compare(a, b)
    assert result.num_tasks == 200
    assert result.reward.mean == pytest.approx(0.1)
    assert result.reward.low == pytest.approx(0.1)
    assert (result.better, result.worse) == (200, 0)


def test_a_comparison_leaves_out_what_only_one_side_played() -> None:
    result = compare(episodes([0, 0, 0]), episodes([1, 0], first=1))
    assert (result.num_tasks, result.better, result.worse) == (2, 1, 0)


def test_the_interval_of_a_difference_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(100):
        a = episodes(rng.normal(0.0, 1, 40).tolist())
        b = episodes(rng.normal(0.3, 1, 40).tolist())
        interval = compare(a, b).reward
        covered += interval.low <= 0.3 <= interval.high
    assert 85 <= covered <= 100


def test_a_comparison_says_the_same_each_time() -> None:
    a, b = episodes([0, 1, 1, 0, 1]), episodes([1, 1, 0, 0, 1])
    assert compare(a, b) == compare(a, b)


def test_the_seed_of_a_task_depends_on_the_jobs_seed_and_the_task_alone() -> None:
    assert task_seed(0, 1) == task_seed(0, 1)
    assert len({task_seed(seed, task) for seed in range(3) for task in range(3)}) == 9


def test_names_that_become_metrics_are_bounded() -> None:
    told = mean_info([{f"key {number}": 1.0 for number in range(5000)}, {"x" * 10_000: 1.0}])
    assert len(told) == 1000
    assert kind_of({"type": "y" * 10_000}, "") == "y" * 200
    assert kind_of({}, "z" * 10_000) == "z" * 200


def tasks(num_train: int | None = None, **evaluation: object) -> list[Task]:
    config = parse_config(
        {"model": {"path": "m"}, "env": {"game": "g"}, "seed": 3, "evaluation": evaluation}
    )
    described = DescribeReply(game="g", num_train=num_train, num_val=4, host="h")
    return evaluation_tasks(config, described, 7)


def test_a_version_is_validated_on_rows_or_on_states_that_follow_from_the_jobs_seed() -> None:
    for num_train in (None, 9):
        played = tasks(num_train, samples=2)
        assert [(one.task, one.sample) for one in played] == [(n, n) for n in range(4)]
        assert [one.seed for one in played] == [task_seed(3, n) for n in range(4)]
        assert {(one.version, one.group_size) for one in played} == {(7, 2)}
    assert len(tasks(9, data="train")) == 9
    rows = tasks(9, tasks=[2, 0, 2])
    assert [(one.sample, one.seed) for one in rows] == [(2, task_seed(3, 2)), (0, task_seed(3, 0))]
    seeds = tasks(tasks=[500, 41])
    assert [(one.task, one.sample, one.seed) for one in seeds] == [(500, None, 500), (41, None, 41)]


def test_rows_that_are_not_there_are_refused_by_number() -> None:
    with pytest.raises(ConfigError, match=r"row 4 of evaluation.tasks does not exist: there are 4"):
        tasks(9, tasks=[3, 4])
    with pytest.raises(ConfigError, match="needs rows, and the game generates its states"):
        tasks(data="train")


def score(reward: float, *, kind: str = "", **more: float) -> EpisodeScore:
    success = reward > 0.5
    return EpisodeScore(
        reward=reward, success=success, num_tokens=4, num_turns=2, kind=kind, figures=more
    )


def test_missing_episodes_are_counted_apart_and_pass_at_k_is_over_whole_tasks() -> None:
    played = [
        [score(1.0, moves=2), score(0.0, moves=4)],
        [score(0.0), score(0.0)],
        [None, score(1)],
    ]
    values = validation_metrics(played, 2)
    assert (values["val/num_episodes"], values["val/failed_episodes"]) == (5, 1)
    assert (values["val/mean_score"], values["val/success_rate"]) == (0.4, 0.4)
    assert (values["val/response_length"], values["val/num_turns"]) == (4, 2)
    assert values["val_game/moves"] == 3
    assert (values["val/pass@1"], values["val/pass@2"]) == (0.25, 0.5)
    assert validation_metrics([[None], [None]], 1) == {"val/failed_episodes": 2}
    by_kind = validation_metrics([[score(1.0, kind="a")], [score(0.0, kind="b")]], 1)
    assert (by_kind["val_type/a/mean_score"], by_kind["val_type/b/mean_score"]) == (1, 0)
