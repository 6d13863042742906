"""Advantages of a group's episodes, for people to look at: computed from its rewards alone.

They are those of the learner (`actors/learner/algorithms/advantages.py`) for estimators that need
nothing but the rewards of one group; for the others the difference to the group's mean is shown,
and called that.
"""

import math
from collections.abc import Sequence

_EPSILON = 1e-6
EXACT = frozenset({"grpo", "dr_grpo", "rloo", "remax"})


def group_advantages(
    estimator: str, rewards: Sequence[float], baseline: float | None = None
) -> tuple[str, list[float]]:
    """Return the name of what is shown, and its value for each episode.

    `baseline` is the reward of the greedy episode, for remax.
    """
    if not rewards:
        return "advantage", []
    mean = sum(rewards) / len(rewards)
    if len(set(rewards)) == 1 and len(rewards) > 1:
        mean = rewards[0]
    gaps = [reward - mean for reward in rewards]
    if estimator == "remax" and baseline is not None:
        return "advantage (remax)", [reward - baseline for reward in rewards]
    if len(rewards) == 1 and estimator in {"grpo", "dr_grpo", "rloo"}:
        return f"advantage ({estimator})", [rewards[0] / (1 + _EPSILON * (estimator == "grpo"))]
    if estimator == "grpo":
        std = math.sqrt(sum(gap * gap for gap in gaps) / (len(gaps) - 1))
        return "advantage (grpo)", [gap / (std + _EPSILON) for gap in gaps]
    if estimator == "dr_grpo":
        return "advantage (dr_grpo)", gaps
    if estimator == "rloo":
        scale = len(gaps) / (len(gaps) - 1)
        return "advantage (rloo)", [gap * scale for gap in gaps]
    return "reward − group mean", gaps
