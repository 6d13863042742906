"""One episode as a page shows it: its messages, its turns, and its tokens one by one."""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from ....envs.agents.call_lines import call_lines
from ....schemas.rollout import Group, Trajectory, return_of
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.images import data_url, restore_images
from .token_text import TokenTexts

# Advantages of a group's episodes, for people to look at: computed from its rewards alone.
#
# They are those of the learner (`actors/training/advantages.py`) for estimators that
# need nothing but the rewards of one group; for the others the difference to the group's mean is
# shown, and called that.

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


MAX_TOKENS = 8192
MAX_IMAGE_BYTES = 8 << 20
_DATA_URL = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/=\s]+)")
LEVELS = (-0.05, -0.3, -1.0, -2.0, -4.0)
"""Bounds between the six colours of a token by its log-prob: almost certain to surprising."""


def show_episode(group: Group, number: int, *, estimator: str, step: int | None) -> dict[str, Any]:
    """Return all that is shown of one episode of a group.

    Raises NotFoundError when the group has no such episode.
    """
    if not 0 <= number < len(group.trajectories):
        raise NotFoundError(
            f"task {group.task.task} has no episode {number}",
            hint=f"it has 0 to {len(group.trajectories) - 1}"
            if group.trajectories
            else "the task was given up; its error says why",
        )
    one = group.trajectories[number]
    name, advantages = _advantages(group, estimator)
    made = one.logprobs[one.mask == 1]
    turns = _turns(one)
    return {
        "task": group.task.task,
        "sample": group.task.sample,
        "seed": one.seed,
        "episode": number,
        "role": one.role,
        "opponents": one.opponents,
        "step": step,
        "source": group.source,
        "host": one.host,
        "reward": one.reward,
        "advantage_name": name,
        "advantage": advantages.get(number),
        "greedy": one.greedy,
        "finish": one.ended_by,
        "versions": [one.min_version, one.max_version],
        "tries": one.num_tries,
        "failures": [failure.model_dump() for failure in one.failures],
        "generate_s": one.generate_s,
        "environment_s": one.environment_s,
        "num_tokens": len(one.token_ids),
        "num_generated": one.num_generated,
        "logprob_mean": float(made.mean()) if len(made) else None,
        "logprob_min": float(made.min()) if len(made) else None,
        "kind": one.kind,
        "calls": [vars(line) for line in call_lines(_main_row(group, one).info)],
        "row": _rows(group, one).index(number),
        "rows": _rows(group, one),
        "info": {name: value for name, value in one.info.items() if name != "calls"},
        "messages": _messages(one, turns, group.images),
        "turns": turns,
        "siblings": [
            {
                "episode": index,
                "role": item.role,
                "kind": item.kind,
                "row_of": item.episode,
                "reward": item.reward,
                "advantage": advantages.get(index),
                "greedy": item.greedy,
            }
            for index, item in enumerate(group.trajectories)
        ],
    }


def _rows(group: Group, one: Trajectory) -> list[int]:
    """Return the places of all rows of an episode, its main one first."""
    is_whole = one.episode < 0
    return [
        index
        for index, item in enumerate(group.trajectories)
        if item is one or (not is_whole and (item.episode, item.role) == (one.episode, one.role))
    ]


def _main_row(group: Group, one: Trajectory) -> Trajectory:
    return group.trajectories[_rows(group, one)[0]]


def _advantages(group: Group, estimator: str) -> tuple[str, dict[int, float]]:
    """Return the name of what is shown, and its value by episode: compared within each role."""
    greedy = next((item.reward for item in group.trajectories if item.greedy), None)
    name, found = "", dict[int, float]()
    places = {id(item): index for index, item in enumerate(group.trajectories)}
    for role in dict.fromkeys(item.role for item in group.sampled):
        peers = [rows for rows in group.episodes if rows[0].role == role]
        rewards = [return_of(rows) for rows in peers]
        name, values = group_advantages(estimator, rewards, greedy)
        for rows, value in zip(peers, values, strict=True):
            found.update((places[id(row)], value) for row in rows)
    return name, found


def _messages(
    one: Trajectory, turns: list[dict[str, Any]], images: list[bytes]
) -> list[dict[str, Any]]:
    """Return the messages; the policy's own, the last ones of the assistant, with their turns."""
    whole = restore_images(one.messages, images)
    messages: list[dict[str, Any]] = [show_message(message) for message in whole]
    own = [message for message in messages if message["role"] == "assistant"][-len(turns) :]
    for message, turn in zip(own, turns[len(turns) - len(own) :], strict=True):
        message["turn"] = turn
    return messages


def _turns(one: Trajectory) -> list[dict[str, Any]]:
    """Return reward, version, length and mean log-prob of each turn."""
    turns: list[dict[str, Any]] = []
    reasons = one.finish_reasons or [None] * len(one.turn_ends)
    start = 0
    for number, (end, reward) in enumerate(
        zip(one.turn_ends.tolist(), one.rewards.tolist(), strict=True)
    ):
        inside = one.mask[start : end + 1] == 1
        versions = one.versions[start : end + 1][inside]
        logprobs = one.logprobs[start : end + 1][inside]
        turns.append(
            {
                "turn": number,
                "reward": reward,
                "tokens": int(inside.sum()),
                "versions": sorted({int(version) for version in versions}),
                "logprob": float(logprobs.mean()) if len(logprobs) else None,
                "finish_reason": reasons[number],
            }
        )
        start = end + 1
    return turns


def show_tokens(one: Trajectory, texts: TokenTexts) -> dict[str, Any]:
    """Return the tokens of an episode with log-prob, version and mask; very long ones are cut."""
    ids = one.token_ids[:MAX_TOKENS].tolist()
    mask = one.mask[: len(ids)].tolist()
    logprobs = one.logprobs[: len(ids)].tolist()
    versions = one.versions[: len(ids)].tolist()
    ends = dict(zip(one.turn_ends.tolist(), one.rewards.tolist(), strict=True))
    said = texts.of(ids)
    tokens = [
        {
            "id": token,
            "text": text,
            "made": bool(made),
            "logprob": logprob if made else None,
            "level": _level(logprob) if made else None,
            "version": version if made else None,
            "reward": ends.get(place),
        }
        for place, (token, text, made, logprob, version) in enumerate(
            zip(ids, said, mask, logprobs, versions, strict=True)
        )
    ]
    return {
        "tokens": tokens,
        "left_out": len(one.token_ids) - len(ids),
        "decoded": texts.known,
    }


def _level(logprob: float) -> int:
    return int(np.searchsorted(-np.array(LEVELS), -logprob))


def show_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message as role, parts (text and images) and tool calls."""
    content = message.get("content")
    parts: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role", "?"))[:32],
        "name": str(message.get("name", "") or message.get("tool_call_id", "") or ""),
        "parts": [show_part(part) for part in parts if part is not None],
        "tool_calls": [_call(call) for call in cast("list[Any]", calls)]
        if isinstance(calls, list)
        else [],
        "turn": None,
        "reasoning": str(message.get("reasoning_content", "") or ""),
    }


def show_part(part: Any) -> dict[str, str]:
    """Return a part of a message: `text`, or `image` (a data URL, or the place it lies at)."""
    if not isinstance(part, dict):
        return {"kind": "text", "text": str(part)}
    fields = cast("dict[str, Any]", part)
    kind = str(fields.get("type", "text"))
    if "image" in kind:
        value = fields.get("image", fields.get("image_url", fields.get("data")))
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            value = inner.get("url", inner.get("bytes", inner.get("data")))
        url = image_url(value)
        if url:
            return {"kind": "image", "url": url}
        where = value if isinstance(value, str) and len(value) < 300 else type(value).__name__
        return {"kind": "text", "text": f"[image: {where}]"}
    if "text" in fields:
        return {"kind": "text", "text": str(fields["text"])}
    return {"kind": "text", "text": json.dumps(fields, default=str, ensure_ascii=False)}


def image_url(value: Any) -> str:
    """Return a data URL of an image given as bytes, base64 or data URL; empty for anything else.

    Only PNG, JPEG, GIF and WebP, told by their first bytes: nothing that could hold a script, and
    nothing that the browser would fetch from elsewhere.
    """
    if isinstance(value, str):
        found = _DATA_URL.fullmatch(value) if len(value) < 2 * MAX_IMAGE_BYTES else None
        try:
            value = base64.b64decode(found[2] if found else value, validate=found is None)
        except (binascii.Error, ValueError):
            return ""
    if not isinstance(value, bytes) or len(value) > MAX_IMAGE_BYTES:
        return ""
    return data_url(value)


def _call(call: Any) -> dict[str, str]:
    fields = cast("dict[str, Any]", call) if isinstance(call, dict) else {"name": str(call)}
    inner = fields.get("function")
    function = cast("dict[str, Any]", inner) if isinstance(inner, dict) else fields
    arguments: Any = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=str, ensure_ascii=False)
    return {"name": str(function.get("name", "?")), "arguments": cast("str", arguments)}
