"""The evidence on learning: exact lags, runs that repeat, a page that says what the data say."""

import asyncio
import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.envs.games.sums import is_held_out
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import BatchRecord, Task

from benchmarks.evidence import gomoku_curve, language_model, sanity
from benchmarks.evidence.cells import SEEDS, Cell, Results
from benchmarks.evidence.comparisons import Difference
from benchmarks.evidence.lagged import Curve, LaggedRun, copied_weights
from benchmarks.evidence.pooled import Played, mixed_shares
from benchmarks.evidence.tables import DOCS, PAGES, filled
from benchmarks.tailed_game import LONGEST_S, SHORTEST_S, TailedGuessGame, draw_delay_s
from benchmarks.tasks import NUM_ROWS, addition_job, in_training_order, warm_model

STEPS = 4
OFFERED = ("trl", "datasets")


def quick_job() -> dict[str, Any]:
    """Return a job of some steps for a hardly trained model."""
    job = addition_job(warm_model("addition", quick=True), STEPS)
    job["env"]["num_val"] = 8
    job["env"]["val_data"] = job["env"]["train_data"]
    return job


async def run(lag: int) -> Curve:
    """Train it."""
    return await LaggedRun(quick_job(), lag=lag, test_every=2).run()


def lags(numbers: Mapping[str, float]) -> list[str]:
    """Return the lags of a step's tokens."""
    return [key.rpartition("/")[2] for key in numbers if key.startswith("staleness/num_tokens/")]


@pytest.mark.long
async def test_the_lag_is_exact_and_a_run_repeats_to_the_bit() -> None:
    curve = await run(2)
    assert [lags(one) for one in curve.numbers] == [["lag_0"], ["lag_1"], ["lag_2"], ["lag_2"]]
    assert list(curve.validation) == [0, 2, 4]
    assert curve.samples == STEPS * 256
    again = await run(2)
    assert (again.rewards, again.numbers) == (curve.rewards, curve.numbers)
    assert [lags(one) for one in (await run(0)).numbers] == [["lag_0"]] * STEPS


@pytest.mark.long
def test_runs_in_processes_are_those_of_one_and_go_on_with_what_is_missing(tmp_path: Path) -> None:
    results = Results("quick", tmp_path)
    cells = [Cell("addition", "tis", lag, 0) for lag in (0, 1, 2)]
    results.add(cells[1], Curve(validation={0: 0.5}))
    jobs = [(cell, quick_job()) for cell in results.missing(cells)]
    assert language_model.run_in_processes(results, jobs, processes=2, test_every=2) == 0
    found = {one.lag: one for one in results}
    assert (len(list(results)), found[1].validation) == (3, {0: 0.5})
    here = asyncio.run(language_model.measure(quick_job(), 2, test_every=2))
    assert found[2].validation == {step: round(at, 5) for step, at in here.validation.items()}
    assert found[2].told["abs_log_ratio"] > found[0].told["abs_log_ratio"]


@pytest.mark.long
def test_a_run_that_fails_leaves_the_results_of_others(tmp_path: Path) -> None:
    results = Results("quick", tmp_path)
    sound, broken = quick_job(), quick_job()
    broken["model"]["path"] = str(tmp_path / "nothing")
    jobs = [(Cell("addition", "tis", 0, seed), job) for seed, job in enumerate((broken, sound))]
    assert language_model.run_in_processes(results, jobs, processes=2) == 1
    assert [one.seed for one in results] == [1]


async def test_the_distance_of_log_probs_is_that_of_the_full_lag_in_a_bucket_of_several() -> None:
    told = (await language_model.measure(quick_job(), 3, test_every=2)).told
    (last,) = (await run(3)).numbers[3:]
    assert lags(last) == ["lag_3_4"]
    assert told["abs_log_ratio"] == last["staleness/abs_log_ratio/lag_3_4"] > 0
    assert told["max_ratio"] == last["staleness/max_ratio/lag_3_4"] > 1


def test_an_early_end_leaves_whole_seeds_of_the_language_model() -> None:
    cells = language_model.cells()
    assert len({cell.key for cell in cells}) == len(cells) == 40
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.seed for cell in cells} == set(SEEDS)


async def test_the_untrained_model_answers_each_row_once() -> None:
    job = quick_job()
    job["training"]["batch_size"], job["rollout"]["group_size"] = 512, 2
    groups = await LaggedRun(job, lag=0, test_every=2).sample()
    assert sorted(group.task.sample or 0 for group in groups) == list(range(NUM_ROWS))
    assert {len(group.sampled) for group in groups} == {2}


def test_the_sanity_test_trains_and_validates_sums_that_are_solved_at_times() -> None:
    rows = [json.loads(line) for line in sanity.PROMPTS.read_text().splitlines()]
    assert len(rows) == sanity.NUM_PROMPTS
    assert all(3 <= row["right"] <= 13 and not is_held_out(*row["sum"]) for row in rows)
    data = sanity.cells()[0].overrides["env"]
    trained, validated = (
        [json.loads(line)["prompt"] for line in Path(data[name][0]).read_text().splitlines()]
        for name in ("train_data", "val_data")
    )
    assert validated == trained * sanity.NUM_PLAYED
    assert len(trained) == len(rows)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_results_say(page: str) -> None:
    assert filled(page) == (DOCS / page).read_text(), "python -m benchmarks.evidence.tables"


def test_the_page_of_gomoku_says_what_its_results_say() -> None:
    page = gomoku_curve.PAGE.read_text()
    assert gomoku_curve.filled(page) == page, "python -m benchmarks.evidence.gomoku_curve --plot"
    assert gomoku_curve.PICTURE.stat().st_size < 100_000


def test_differences_are_of_pairs_and_tests_need_evidence() -> None:
    small = [0.010, 0.012, 0.008, 0.011, 0.009]
    near = Difference.of([(0.8 + more, 0.8) for more in small])
    assert near.mean == pytest.approx(0.01)
    assert near.half == pytest.approx(2.776 * 0.0015811 / 5**0.5, rel=1e-3)
    assert near.is_equivalent
    assert not near.is_worse
    far = Difference.of([(0.5, 0.8 + more) for more in small])
    assert far.is_worse
    assert not far.is_equivalent
    noisy = Difference.of([(0.8 + more, 0.8) for more in (0.1, -0.1, 0.05, -0.05, 0.0)])
    assert not noisy.is_equivalent
    assert not noisy.is_worse


async def test_weights_from_elsewhere_are_validated_as_a_runs_own() -> None:
    here = LaggedRun(quick_job(), lag=0, test_every=2)
    untrained = copied_weights(load_causal_lm(here.config.model.path, dtype=torch.float32))
    assert await here.examine({0: untrained}) == {0: (await here.run()).validation[0]}


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, OFFERED)), reason="TRL is of the `bench` extra"
)
async def test_trl_trains_the_same_samples(tmp_path: Path) -> None:
    from benchmarks.evidence.peer_run import settings_of, train_with_trl

    curve = await train_with_trl(quick_job(), test_every=2)
    own = await run(0)
    assert list(curve.validation) == list(own.validation)
    assert curve.validation[0] == own.validation[0]
    assert (curve.samples, len(curve.rewards)) == (own.samples, STEPS)
    config = LaggedRun(quick_job(), lag=0, test_every=2).config
    rows = settings_of(config, tmp_path)["rows"]
    assert rows == in_training_order("addition", STEPS * config.training.batch_size)


def test_tokens_behind_a_swap_are_counted_within_their_turn() -> None:
    swapped = episode([3, 3, -1, 4, 4])
    within = episode([3, 4, -1, 4, 5])
    task = Task(task=0, seed=0, group_size=2)
    group = Group(task=task, source="here", trajectories=[swapped, within])
    record = BatchRecord(step=6, seqs=[1], tasks=[0], seed=0, digest="", learner="", time=0.0)
    shares = mixed_shares(Played([group], [(record, [group])]))
    assert shares == {"mixed_episodes": 1.0, "old_cache": 2 / 8}


def episode(versions: list[int]) -> Trajectory:
    """Return an episode of two turns of two tokens."""
    return Trajectory(
        token_ids=np.arange(5, dtype=np.int32),
        mask=np.array([1, 1, 0, 1, 1], dtype=np.uint8),
        logprobs=np.zeros(5, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        turn_ends=np.array([1, 4], dtype=np.int32),
        rewards=np.zeros(2, dtype=np.float32),
    )


def test_the_tailed_game_waits_in_training_alone() -> None:
    game, begun = TailedGuessGame(), time.perf_counter()
    game.reset(number=3, waits=False)
    for _ in range(100):
        game.step("1")
    assert time.perf_counter() - begun < 100 * SHORTEST_S
    delays = [draw_delay_s() for _ in range(5000)]
    assert SHORTEST_S <= min(delays) < max(delays) == LONGEST_S
    assert 0.005 < sum(one > 1 for one in delays) / len(delays) < 0.03
