"""What becomes of an ended episode of a program: its rows, its rewards, and what is told of it."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np

from ....envs.game import StepResult
from ....envs.serving.remote import Started
from ....schemas.config.job import JobConfig
from ....schemas.rollout import Trajectory
from ..episodes.agent_loop import EpisodePlan
from .answering import CallAnswers
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
    left_out = {int(number) for number in result.info.get("untrained_calls", ())}
    _reward_calls(tree, result.info.get("call_rewards", {}))
    found = rows_of(tree, config.rollout.max_tokens, agent.train, left_out)
    info = {
        **result.info,
        "agent": _figures(calls, found),
        **({"without_effect": sorted(calls.without_effect)} if calls.without_effect else {}),
        "calls": [_told(call, found, left_out) for call in tree.calls[:_MAX_TOLD]],
    }
    return [
        _trajectory(
            row, tree, plan, started, calls, stop_token_ids, result, info if not place else {}
        )
        for place, row in enumerate(found.rows)
    ]


def _reward_calls(tree: CallTree, rewards: Mapping[Any, Any]) -> None:
    for number, worth in rewards.items():
        if int(number) < len(tree.calls):
            tree.calls[int(number)].reward = float(worth)


def _trajectory(
    row: CallRow,
    tree: CallTree,
    plan: EpisodePlan,
    started: Started,
    calls: CallAnswers,
    stop_token_ids: Collection[int],
    result: StepResult,
    info: dict[str, Any],
) -> Trajectory:
    last = tree.calls[row.calls[-1]]
    rewards = np.array(row.rewards, np.float32)
    if info:  # the main row
        rewards[-1] += result.reward
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
        **{f"branch_{name}": float(count) for name, count in branches.items()},
    }


def _told(call: ModelCall, found: TreeRows, left_out: Collection[int]) -> dict[str, Any]:
    """Return what people are shown of a call (`envs/agents/call_lines.py` reads it)."""
    rows = [place for place, row in enumerate(found.rows) if call.number in row.calls]
    return {
        "call": call.number,
        "parent": None if call.parent is None else call.parent.number,
        "follows": None if call.follows is None else call.follows.number,
        "branch": call.branch,
        "row": rows[0] if rows else None,
        "untrained": "" if rows else _why_untrained(call, found, left_out),
        "given_tokens": len(call.given_ids),
        "tokens": len(call.generated.token_ids),
        "finish": call.generated.finish_reason,
        "reward": call.reward,
        "text": call.reply.text[:200],
        "tools": [one.name for one in call.reply.calls],
    }


def _why_untrained(call: ModelCall, found: TreeRows, left_out: Collection[int]) -> str:
    if call.number not in found.untrained:
        return "cut"
    if call.number in left_out:
        return "left out"
    return "apart" if call.delivered else "undelivered"
