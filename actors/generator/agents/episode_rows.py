"""What becomes of an ended episode of a program: its rows, its rewards, and what is told of it."""

from collections import Counter
from collections.abc import Collection
from typing import Any, Literal, cast

from ....envs.game import StepResult
from ....envs.serving.remote import Started
from ....schemas.agent import CallPlaces
from ....schemas.config.job import JobConfig
from ....schemas.rollout import Trajectory
from ..episodes.agent_loop import EpisodePlan
from .answering import CallAnswers
from .call_places import EpisodeCredit, PostedRewards
from .call_tree import CallTree, ModelCall
from .rows import CallRow, TreeRows, rows_of

_MAX_TOLD = 1000
"""Calls of an episode that people are shown."""


def rows_of_episode(
    calls: CallAnswers,
    plan: EpisodePlan,
    started: Started,
    result: StepResult,
    config: JobConfig,
    stop_token_ids: Collection[int],
) -> list[Trajectory]:
    """Return the rows of an episode, the main one first; its reward stands at the end of that."""
    tree, agent = calls.tree, config.agent
    left_out = _left_out(result.info.get("untrained_calls"))
    posted = PostedRewards.of(result.info, tree)
    found = rows_of(tree, config.rollout.max_tokens, agent.train, left_out)
    credit = EpisodeCredit(tree, found, posted)
    info = {
        **result.info,
        "agent": {**_figures(calls, found), **_branch_figures(posted, credit)},
        **({"without_effect": sorted(calls.without_effect)} if calls.without_effect else {}),
        "calls": [_told(call, found, posted) for call in tree.calls[:_MAX_TOLD]],
    }
    return [
        _trajectory(
            row,
            credit.places(row, result.reward, is_main=not place),
            plan,
            started,
            calls,
            stop_token_ids,
            result,
            info if not place else {},
        )
        for place, row in enumerate(found.rows)
    ]


def _left_out(told: Any) -> set[int]:
    numbers = cast("list[Any]", told) if isinstance(told, list) else []
    return {number for number in numbers if isinstance(number, int)}


def _trajectory(
    row: CallRow,
    places: CallPlaces,
    plan: EpisodePlan,
    started: Started,
    calls: CallAnswers,
    stop_token_ids: Collection[int],
    result: StepResult,
    info: dict[str, Any],
) -> Trajectory:
    tree = calls.tree
    last = tree.calls[row.calls[-1]]
    rewards = places.rewards.copy()
    rewards[-1] += places.outcome
    reasons = [tree.calls[number].generated.finish_reason for number in row.calls]
    finish: Literal["done", "turns", "length"] = calls.limit_hit or "done"
    return Trajectory(
        token_ids=row.token_ids,
        mask=row.mask,
        logprobs=row.logprobs,
        versions=row.versions,
        turn_ends=row.turn_ends,
        rewards=rewards,
        finish=finish,
        finish_reasons=["length" if reason == "length" else "stop" for reason in reasons],
        episode=plan.number,
        kind=row.kind,
        calls=places,
        greedy=plan.greedy,
        seed=plan.start.seed,
        messages=[message.for_template() for message in last.path_messages],
        info=info,
        host=started.host,
        data_source=started.data_source,
        generate_s=calls.generate_s if info else 0.0,
    )


def _figures(calls: CallAnswers, found: TreeRows) -> dict[str, float]:
    """Return numbers of an episode, for the metrics."""
    tree = calls.tree
    prompts = sum(call.num_tokens - len(call.generated.token_ids) for call in tree.calls)
    given = sum(len(call.given_ids) for call in tree.calls)
    branches = Counter(call.branch for call in tree.calls if call.branch)
    return {
        "calls": float(len(tree.calls)),
        "rows": float(len(found.rows)),
        "reused_share": (prompts - given) / max(1, prompts),
        "untrained_calls": float(len(found.untrained)),
        "undelivered": float(sum(not call.delivered for call in tree.calls)),
        "cut_tokens": float(found.num_cut),
        "replayed_tokens": float(calls.num_replayed),
        **_masked(tree, found),
        **{f"branch_{name}": float(count) for name, count in branches.items()},
    }


def _masked(tree: CallTree, found: TreeRows) -> dict[str, float]:
    """Return how much formats took out of the choice of trained tokens, if some were demanded.

    Each token counts by the share of the probability that was taken from it.
    """
    trained = [tree.calls[number].generated for row in found.rows for number in row.calls]
    if all(one.masked is None for one in trained):
        return {}
    return {"masked_tokens": sum(float(x.masked.sum()) for x in trained if x.masked is not None)}


def _branch_figures(posted: PostedRewards, credit: EpisodeCredit) -> dict[str, float]:
    """Return what parts of the episode were rewarded with, where they were."""
    branches, calls = posted.branches, posted.calls
    return {
        **({"reward_of_calls": sum(calls.values()) / len(calls)} if calls else {}),
        **({"reward_of_branches": sum(branches.values()) / len(branches)} if branches else {}),
        **({"lost_rewards": float(lost)} if (lost := credit.num_lost) else {}),
    }


def _told(call: ModelCall, found: TreeRows, posted: PostedRewards) -> dict[str, Any]:
    """Return what people are shown of a call (`envs/agents/call_lines.py` reads it)."""
    rows = [place for place, row in enumerate(found.rows) if call.number in row.calls]
    return {
        "call": call.number,
        "parent": None if call.parent is None else call.parent.number,
        "follows": None if call.follows is None else call.follows.number,
        "branch": call.branch,
        "row": rows[0] if rows else None,
        "untrained": "" if rows else found.why_not.get(call.number, "cut"),
        "given_tokens": len(call.given_ids),
        "tokens": len(call.generated.token_ids),
        "finish": call.generated.finish_reason,
        "reward": posted.calls.get(call.number),
        "branch_reward": posted.branches.get(call.number),
        "name": posted.names.get(call.number, ""),
        "text": call.reply.text[:200],
        "tools": [one.name for one in call.reply.calls],
    }
