"""The metrics of a step that are computed from its groups."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from ...envs.evaluation import is_success, mean_info, outcome_shares
from ...schemas.rollout import Finish, Group, Trajectory
from ..training.packing import count_distinct

_ENDS = get_args(Finish)
_LAG_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, None))


def group_numbers(
    groups: Sequence[Group],
    version: int,
    max_response_tokens: int,
    success_reward: float,
    oldest: int = 0,
) -> dict[str, float]:
    """Describe the groups that a step trains; `version` is the policy's before the step.

    Tokens of versions before `oldest` are not trained. An episode is solved if its return is above
    `success_reward`, unless its game reports success.
    """
    played = [rows for group in groups for rows in group.episodes]
    episodes = [_as_one(rows) for rows in played]
    rows = [item for rows in played for item in rows]
    rewards = np.array([item.reward for item in episodes])
    prompts = np.array([int(np.argmax(item.mask)) for item in rows])
    responses = np.array([len(item.mask) for item in rows]) - prompts
    generated = np.array([sum(item.num_generated for item in rows) for rows in played])
    turns = np.array([sum(len(item.turn_ends) for item in rows) for rows in played])
    cut = np.array([item.ended_by == "length" for item in rows])
    ended = np.array([bool(item.finish_reasons) for item in rows])
    versions = np.concatenate([item.versions[item.mask == 1] for item in rows])
    lags = version - versions[versions >= oldest]
    group_lags = np.array([version - group.min_version for group in groups])
    equal = [group.has_equal_rewards for group in groups]
    return {
        "training_step_reward": float(rewards.mean()),
        **_spread("critic/score", rewards),
        **_spread("response_length", responses),
        "response_length/clip_ratio": float(
            (cut | ((responses >= max_response_tokens) & ~ended)).mean()
        ),
        **_spread("prompt_length", prompts),
        **_spread("num_turns", turns),
        "rollout/generated_tokens": float(generated.sum()),
        "rollout/episodes": float(len(episodes)),
        "rollout/equal_reward_share": float(np.mean(equal)),
        "rollout/continued_tokens": float(sum(group.tokens_continued for group in groups)),
        **_oversample_numbers(generated, [n for group in groups for n in group.tokens_cut]),
        "rollout/tries_mean": float(np.mean([item.num_tries for item in episodes])),
        "timing_s/generate_mean": float(np.mean([item.generate_s for item in episodes])),
        "timing_s/environment_mean": float(np.mean([item.environment_s for item in episodes])),
        "staleness/lag_mean": float(lags.mean()),
        "staleness/lag_max": float(lags.max()),
        "staleness/group_lag_max": float(group_lags.max()),
        **_histogram(lags),
        **({"staleness/masked_tokens": float(len(versions) - len(lags))} if oldest else {}),
        **_finishes(episodes),
        **{f"game/{key}": mean for key, mean in mean_info(item.info for item in episodes).items()},
        "game/success_rate": float(
            np.mean([is_success(item.reward, item.info, success_reward) for item in episodes])
        ),
        **_role_numbers(episodes),
        **_agent_numbers(played),
        **_masked_share(played, float(generated.sum())),
    }


def _as_one(rows: Sequence[Trajectory]) -> Trajectory:
    """Return an episode's main row with the sum of all rows' rewards."""
    if len(rows) == 1:
        return rows[0]
    rewards = np.concatenate([item.rewards for item in rows])
    return rows[0].model_copy(update={"rewards": rewards})


def _agent_numbers(played: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Describe the trees of calls of agents' episodes, if there are any.

    The generator's numbers of an episode are in `info` of its main row, under `agent`.
    """
    rows = [item for episode in played for item in episode if item.kind]
    if not rows:
        return {}
    episode_numbers = [_numeric_fields(episode[0].info.get("agent")) for episode in played]
    names = sorted({name for numbers in episode_numbers for name in numbers})
    kinds = Counter(item.kind for item in rows)
    ids = [item.token_ids for item in rows]
    return {
        **{
            f"agent/{name}": float(np.mean([numbers.get(name, 0.0) for numbers in episode_numbers]))
            for name in names
        },
        **{
            f"agent/{name}": share
            for name, share in outcome_shares([episode[0].info for episode in played]).items()
        },
        "agent/rows_per_episode": len(rows) / len(played),
        **{f"agent/row_share/{kind}": count / len(rows) for kind, count in sorted(kinds.items())},
        "agent/shared_token_share": 1 - count_distinct(ids) / sum(map(len, ids)),
    }


def _masked_share(played: Sequence[Sequence[Trajectory]], num_generated: float) -> dict[str, float]:
    """Return the share of tokens that structured output masked, for a mean generated token.

    Empty if no program requested structured output.
    """
    episode_numbers = [_numeric_fields(episode[0].info.get("agent")) for episode in played]
    if not any("masked_tokens" in numbers for numbers in episode_numbers):
        return {}
    masked = sum(numbers.get("masked_tokens", 0.0) for numbers in episode_numbers)
    return {"rollout/masked_share": masked / max(1.0, num_generated)}


def _numeric_fields(numbers: Any) -> dict[str, float]:
    """Return the numeric fields of a mapping from outside."""
    if not isinstance(numbers, dict):
        return {}
    named = cast("dict[str, Any]", numbers)
    return {name: float(n) for name, n in named.items() if isinstance(n, bool | int | float)}


def _oversample_numbers(lengths: NDArray[np.integer[Any]], cut: Sequence[int]) -> dict[str, float]:
    """Compare the lengths in generated tokens of kept and of cut episodes.

    Lengths of cut episodes are lower bounds. `estimated_length` estimates the mean without cuts if
    the probability to end is the same at every token: the maximum-likelihood mean of exponential
    lengths under censoring, total tokens / number of ended episodes (Epstein & Sobel 1953).
    """
    if not cut:
        return {}
    tokens = float(lengths.sum() + sum(cut))
    return {
        "rollout/oversample/kept_length": float(lengths.mean()),
        "rollout/oversample/cut_length": float(np.mean(cut)),
        "rollout/oversample/estimated_length": tokens / len(lengths),
        "rollout/oversample/cut_token_share": sum(cut) / tokens,
    }


def demonstration_numbers(groups: Sequence[Group]) -> dict[str, float]:
    """Describe the conversations that a step of an SFT job trains."""
    rows = [item for group in groups for item in group.sampled]
    prompts = np.array([int(np.argmax(item.mask)) for item in rows])
    lengths = np.array([len(item.mask) for item in rows])
    return {
        **_spread("response_length", lengths - prompts),
        **_spread("prompt_length", prompts),
        **_spread("num_turns", np.array([len(item.turn_ends) for item in rows])),
        "rollout/generated_tokens": float(sum(item.num_generated for item in rows)),
        "rollout/episodes": float(len(rows)),
    }


def _spread(name: str, values: NDArray[np.generic]) -> dict[str, float]:
    floats = values.astype(np.float64)
    return {
        f"{name}/mean": float(floats.mean()),
        f"{name}/max": float(floats.max()),
        f"{name}/min": float(floats.min()),
    }


def _histogram(lags: NDArray[np.integer[Any]]) -> dict[str, float]:
    """Return the share of trained tokens by lag."""
    shares: dict[str, float] = {}
    for low, high in _LAG_BUCKETS:
        inside = lags >= low if high is None else (lags >= low) & (lags <= high)
        label = f"{low}+" if high is None else str(low) if low == high else f"{low}-{high}"
        shares[f"staleness/lag_share/{label}"] = float(inside.mean())
    return shares


def _finishes(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of episodes by what ended them, and of truncated turns."""
    counts = Counter(item.ended_by for item in episodes)
    reasons = [reason for item in episodes for reason in item.finish_reasons]
    return {
        **{f"rollout/finish_{name}": counts[name] / len(episodes) for name in _ENDS},
        **({"rollout/cut_turn_share": reasons.count("length") / len(reasons)} if reasons else {}),
    }


def _role_numbers(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Describe each role of a multi-role game."""
    roles: dict[str, list[float]] = {}
    for item in episodes:
        if item.role:
            roles.setdefault(item.role, []).append(item.reward)
    rewards = {
        f"role/{role}/reward": float(np.mean(of_role)) for role, of_role in sorted(roles.items())
    }
    return rewards | _opponent_numbers(episodes)


def _opponent_numbers(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the returns against each earlier version; a return above 0 is a win."""
    against: dict[str, list[float]] = {}
    for item in episodes:
        for version in set(item.opponents.values()):
            against.setdefault(f"v{version}", []).append(item.reward)
    numbers: dict[str, float] = {}
    for version, rewards in sorted(against.items()):
        numbers[f"opponent/{version}/reward"] = float(np.mean(rewards))
        numbers[f"opponent/{version}/win_rate"] = float(np.mean(np.array(rewards) > 0))
        numbers[f"opponent/{version}/episodes"] = float(len(rewards))
    return numbers


def prompt_and_others(mask_T: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the number of tokens before the first generated one, and of the others."""
    prompt = int(mask_T.argmax()) if mask_T.any() else len(mask_T)
    return prompt, len(mask_T) - prompt
