"""The numbers of a validation, from its episodes. Pure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...envs.evaluation import is_success, kind_of, mean_info, outcome_shares, pass_at_k
from ...schemas.config.job import EvaluationConfig
from ...schemas.rollout import Trajectory
from ...schemas.task import Blame
from ..rollout.agent_loop import EpisodeFailed

_INFRASTRUCTURE = ("engine", "broker", "sandbox")
"""Who fails without telling anything of the model."""


class Played(NamedTuple):
    """One episode of an evaluation; without a trajectory when every try failed."""

    task: int
    sample: int
    trajectory: Trajectory | None


def validation_numbers(
    results: Sequence[Trajectory | None], config: EvaluationConfig
) -> dict[str, float]:
    """Summarise validation episodes, `samples` in a row for each task.

    Episodes that are missing failed: they are counted apart and never as a reward of 0; pass@k is
    over the tasks whose episodes all ran. Those of programs are missing for a failure of the
    infrastructure alone; `val_agent/outcome_*` tells how the others ended.
    """
    done = [item for item in results if item is not None]
    values = {"val/failed_episodes": float(len(results) - len(done))}
    if not done:
        return values
    rewards = np.array([item.reward for item in done])
    values |= {
        "val/mean_score": float(rewards.mean()),
        "val/std_score": float(rewards.std()),
        "val/max_score": float(rewards.max()),
        "val/min_score": float(rewards.min()),
        "val/success_rate": float(np.mean([_success(item, config) for item in done])),
        "val/num_episodes": float(len(done)),
    }
    played = [item for item in done if item.num_generated]  # a failed one says nothing but that
    if played:
        values |= {
            "val/response_length": float(np.mean([item.num_generated for item in played])),
            "val/num_turns": float(np.mean([len(item.turn_ends) for item in played])),
        }
    values |= {f"val_game/{key}": mean for key, mean in mean_info(i.info for i in played).items()}
    of_programs = [item.info for item in done if item.kind or not item.num_generated]
    values |= {f"val_agent/{name}": n for name, n in outcome_shares(of_programs).items()}
    values |= _by_type(done, config)
    n = config.samples
    tasks = [results[start : start + n] for start in range(0, len(results), n)]
    counts = [
        sum(_success(item, config) for item in task if item is not None)
        for task in tasks
        if all(item is not None for item in task)
    ]
    return values | {f"val/pass@{k}": value for k, value in pass_at_k(counts, n).items()}


def is_infrastructure(failed: EpisodeFailed) -> bool:
    """Whether an episode failed by what tells nothing of the model: it is not counted."""
    return failed.blame.boundary in _INFRASTRUCTURE or failed.cause.boundary in _INFRASTRUCTURE


def whole_episode(rows: Sequence[Trajectory]) -> Trajectory:
    """Return an episode of several rows as one: the rows one behind the other, told as the main."""
    lengths = np.array([len(item.mask) for item in rows])
    starts = np.repeat(np.cumsum(lengths) - lengths, [len(item.turn_ends) for item in rows])
    joined = {
        name: np.concatenate([getattr(item, name) for item in rows])
        for name in ("token_ids", "mask", "logprobs", "versions", "turn_ends", "rewards")
    }
    joined["turn_ends"] = (joined["turn_ends"] + starts).astype(np.int32)
    return rows[0].model_copy(
        update={**joined, "finish_reasons": [why for item in rows for why in item.finish_reasons]}
    )


def worth_nothing(blame: Blame) -> Trajectory:
    """Return what counts of a program's episode that failed: no token, and a reward of 0."""
    zero = np.zeros(1, np.int32)
    return Trajectory(
        token_ids=zero,
        mask=zero.astype(np.uint8),
        logprobs=zero.astype(np.float32),
        versions=zero - 1,
        turn_ends=zero,
        rewards=zero.astype(np.float32),
        info={"outcome": blame.code, "success": False},
    )


def _by_type(done: Sequence[Trajectory], config: EvaluationConfig) -> dict[str, float]:
    """Return the scores of each type of task, where there are several."""
    types: dict[str, list[Trajectory]] = {}
    for item in done:
        types.setdefault(_kind(item) or "other", []).append(item)
    if len(types) < 2:
        return {}
    values: dict[str, float] = {}
    for kind, items in sorted(types.items()):
        name = f"val_type/{kind}"
        values[f"{name}/mean_score"] = float(np.mean([item.reward for item in items]))
        values[f"{name}/success_rate"] = float(np.mean([_success(item, config) for item in items]))
        values[f"{name}/num_episodes"] = float(len(items))
    return values


def episode_columns(results: Sequence[Played], config: EvaluationConfig) -> dict[str, list[Any]]:
    """Return what counts of each episode that ran, column by column, for an event."""
    ran = [(one.task, one.sample, one.trajectory) for one in results if one.trajectory is not None]
    return {
        "tasks": [task for task, _, _ in ran],
        "samples": [sample for _, sample, _ in ran],
        "rewards": [item.reward for _, _, item in ran],
        "successes": [_success(item, config) for _, _, item in ran],
        "types": [_kind(item) for _, _, item in ran],
    }


def _kind(item: Trajectory) -> str:
    """Return the type of an episode's task; in a game with roles the role, unless the game says."""
    return kind_of(item.info, item.data_source or item.role)


def _success(item: Trajectory, config: EvaluationConfig) -> bool:
    return is_success(item.reward, item.info, config.success_reward)
