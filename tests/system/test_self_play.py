"""Games with roles through the whole stack: they learn, play the past, and train several policies.

Thresholds are loose: they tell learning from not learning, not one seed from another.
"""

from pathlib import Path

import pytest
from tinkermq.actors.policy.tiny_models import save_tiny_model

from tests.support.configs import example, small_job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="session"),
]

SHORT = {
    "group_size": 4,
    "max_turns": 3,
    "max_prompt_tokens": 48,
    "max_turn_tokens": 3,
    "max_response_tokens": 64,
}


@pytest.mark.learns
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "measure", "highest_before", "rise"),
    [
        ("tictactoe", "val_game/win_rate", 0.25, 0.08),
        ("negotiation", "val/mean_score", 0.1, 0.03),
    ],
)
async def test_a_game_is_learnt_by_self_play(
    stack: Stack, name: str, measure: str, highest_before: float, rise: float, seed: int
) -> None:
    game = example(name)["env"]["game"]
    job = await stack.submit(example(name, f"seed={seed}", f"model.path={warm_model(game)}"))
    await job.until("COMPLETED", deadline_s=500)
    results = await job.validations()
    before, after = results[0][measure], results[max(results)][measure]
    assert before <= highest_before
    assert after >= before + rise


@pytest.mark.learns
@pytest.mark.parametrize("name", ["gomoku_small", "gomoku_small_self_play"])
async def test_gomoku_on_a_small_board_is_learnt_from_opponents_and_by_self_play(
    stack: Stack, name: str
) -> None:
    model = f"model.path={warm_model('gomoku')}"
    config = example(name, model, "training.num_steps=60", "training.test_freq=60")
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=500)
    results = await job.validations()
    before, after = results[0], results[60]
    assert before["val_game/invalid_moves"] < before["val_game/steps"] / 8
    assert after["val/success_rate"] >= before["val/success_rate"] + 0.08


async def test_policies_by_role_and_earlier_versions_of_them_play_in_one_job(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", width=32, layers=1, seed=7)
    config = small_job(
        model,
        env={"game": "tests.support.games:DuetGame", "num_val": 2, "kwargs": {"per_letter": 0.5}},
        rollout=SHORT,
        policies={"low": str(other)},
        self_play={"past_share": 0.6, "pool_every": 2, "pool_size": 2},
        training={"num_steps": 8, "batch_size": 2, "max_staleness": 0},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=300)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    assert (job.run_dir / "latest" / "policies" / "low" / "config.json").is_file()
    entries = await job.entries()
    episodes = [item for entry in entries if entry.group for item in entry.group.sampled]
    against = [item for item in episodes if item.opponents]
    assert 0 < len(against) < len(episodes)
    for item in against:
        assert {*item.opponents, item.role} == {"high", "low"}
        assert set(item.opponents.values()) <= {0, 2, 4, 6}
    told = [metric.values for metric in await job.metrics()]
    names = {name for values in told for name in values}
    assert {"opponent/v0/win_rate", "role/high/reward", "role/low/reward"} <= names
    for label in ("", "policy/low/"):  # each role was played by its own policy's weights
        mismatch = [values.get(f"{label}staleness/abs_log_ratio/lag_0") for values in told]
        assert max(value for value in mismatch if value is not None) < 1e-3
    assert (await job.validations())[8]["val/failed_episodes"] == 0


async def test_a_step_of_gomoku_is_trained_against_itself(stack: Stack, model: Path) -> None:
    config = small_job(
        model,
        env={
            "game": "gomoku",
            "num_val": 2,
            "kwargs": {"board_size": 5, "win_length": 4, "opponent": "self", "max_total_steps": 3},
        },
        rollout={
            "group_size": 2,
            "max_turns": 3,
            "max_prompt_tokens": 480,
            "max_turn_tokens": 8,
            "max_response_tokens": 600,
        },
        learner={"max_row_tokens": 1200, "microbatch_tokens": 4800},
        training={"num_steps": 2, "batch_size": 1},
        evaluation={"reset_kwargs": {"opponent": ["random", "alphabeta:1"]}},
    )
    job = await stack.submit(config)
    await job.until("COMPLETED", deadline_s=300)
    results = (await job.validations())[2]
    assert results["val_game/timeout_rate"] == 1.0  # a random model names no cell
    assert {"val_game/win_rate/random", "val_game/win_rate/alphabeta:1"} & results.keys()
    assert (await job.metrics())[-1].values["game/invalid_moves"] > 0
