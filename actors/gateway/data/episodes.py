"""One episode for display: its steps in order, messages, tokens, rewards and advantages.

A step is one turn of the policy with what came before it. The steps of all rows of an agent's
episode, and of all players of a game, are in the order of time. A page shows some of them.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ....envs.agents.call_selection import call_lines
from ....schemas.rollout import Group, Trajectory, return_of
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.images import data_url, restore_images
from .token_text import TokenTexts

# Advantages for display, from the rewards of one group: the learner's
# (`actors/training/advantages.py`) if its estimator needs nothing else, otherwise the difference to
# the group's mean, with this name.

_EPSILON = 1e-6
EXACT = frozenset({"grpo", "dr_grpo", "rloo", "remax"})


def group_advantages(
    estimator: str, rewards: Sequence[float], baseline: float | None = None
) -> tuple[str, list[float]]:
    """Return the name of the advantage, and its value for each episode.

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
"""Log-probs that separate the six colours of tokens, from almost certain to surprising."""


def show_episode(group: Group, number: int, *, estimator: str, step: int | None) -> dict[str, Any]:
    """Return the display of one episode of a group; NotFoundError if it does not exist."""
    if not 0 <= number < len(group.trajectories):
        raise NotFoundError(
            f"task {group.task.task} has no episode {number}",
            hint=f"it has 0 to {len(group.trajectories) - 1}"
            if group.trajectories
            else "the task failed; see its error",
        )
    trajectory = group.trajectories[number]
    name, advantages = _advantages(group, estimator)
    made = trajectory.logprobs[trajectory.mask == 1]
    turns, rows = _turns(trajectory), _rows(group, trajectory)
    return {
        "task": group.task.task,
        "sample": group.task.sample,
        "seed": trajectory.seed,
        "episode": number,
        "role": trajectory.role,
        "opponents": trajectory.opponents,
        "step": step,
        "source": group.source,
        "host": trajectory.host,
        "reward": trajectory.reward,
        "advantage_name": name,
        "advantage": advantages.get(number),
        "greedy": trajectory.greedy,
        "finish": trajectory.ended_by,
        "versions": [trajectory.min_version, trajectory.max_version],
        "tries": trajectory.num_tries,
        "failures": [failure.model_dump() for failure in trajectory.failures],
        "generate_s": trajectory.generate_s,
        "environment_s": trajectory.environment_s,
        "num_tokens": len(trajectory.token_ids),
        "num_generated": trajectory.num_generated,
        "logprob_mean": float(made.mean()) if len(made) else None,
        "logprob_min": float(made.min()) if len(made) else None,
        "kind": trajectory.kind,
        "calls": [vars(line) for line in call_lines(group.trajectories[rows[0]].info)],
        "row": rows.index(number),
        "rows": rows,
        "info": {name: value for name, value in trajectory.info.items() if name != "calls"},
        "messages": _messages(trajectory, turns, group.images),
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


def _rows(group: Group, trajectory: Trajectory) -> list[int]:
    """Return the indices of all rows of an episode, its main row first."""
    is_whole = trajectory.episode < 0
    return [
        index
        for index, item in enumerate(group.trajectories)
        if item is trajectory
        or (not is_whole and (item.episode, item.role) == (trajectory.episode, trajectory.role))
    ]


def _advantages(group: Group, estimator: str) -> tuple[str, dict[int, float]]:
    """Return the name of the advantage, and its value by episode, compared within each role."""
    greedy = next((item.reward for item in group.trajectories if item.greedy), None)
    name, by_episode = "", dict[int, float]()
    places = {id(item): index for index, item in enumerate(group.trajectories)}
    for role in dict.fromkeys(item.role for item in group.sampled):
        peers = [rows for rows in group.episodes if rows[0].role == role]
        rewards = [return_of(rows) for rows in peers]
        name, values = group_advantages(estimator, rewards, greedy)
        for rows, value in zip(peers, values, strict=True):
            by_episode.update((places[id(row)], value) for row in rows)
    return name, by_episode


def _messages(
    trajectory: Trajectory, turns: list[dict[str, Any]], images: list[bytes]
) -> list[dict[str, Any]]:
    """Return the messages; the policy's have their turns."""
    whole = restore_images(trajectory.messages, images)
    messages: list[dict[str, Any]] = [show_message(message) for message in whole]
    for place, turn in zip(_answers(trajectory), turns, strict=True):
        if place >= 0:
            messages[place]["turn"] = turn
    return messages


def _answers(trajectory: Trajectory) -> list[int]:
    """Return the index of each turn's message; -1 where it was not recorded.

    Between an agent's turns there may be calls of the model that another row trains, or none.
    """
    own = [i for i, message in enumerate(trajectory.messages) if message.get("role") == "assistant"]
    calls, num_turns = trajectory.calls, len(trajectory.turn_ends)
    depths = list(range(num_turns)) if calls is None else calls.depths.tolist()
    places = [len(own) - 1 - (depths[-1] - depth) for depth in depths]
    return [own[place] if 0 <= place < len(own) else -1 for place in places]


def _turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return reward, version, length and mean log-prob of each turn."""
    turns: list[dict[str, Any]] = []
    reasons = trajectory.finish_reasons or [None] * len(trajectory.turn_ends)
    start = 0
    for number, (end, reward) in enumerate(
        zip(trajectory.turn_ends.tolist(), trajectory.rewards.tolist(), strict=True)
    ):
        inside = trajectory.mask[start : end + 1] == 1
        versions = trajectory.versions[start : end + 1][inside]
        logprobs = trajectory.logprobs[start : end + 1][inside]
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


def show_tokens(trajectory: Trajectory, texts: TokenTexts) -> dict[str, Any]:
    """Return the tokens of an episode with log-prob, version and mask, at most `MAX_TOKENS`."""
    shown = slice(0, min(len(trajectory.token_ids), MAX_TOKENS))
    return {
        "tokens": _tokens(trajectory, shown, texts.of(trajectory.token_ids[shown].tolist())),
        "left_out": len(trajectory.token_ids) - shown.stop,
        "decoded": texts.known,
    }


def _tokens(trajectory: Trajectory, part: slice, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tokens at some places, with their texts."""
    ends = dict(zip(trajectory.turn_ends.tolist(), trajectory.rewards.tolist(), strict=True))
    columns = (trajectory.token_ids, trajectory.mask, trajectory.logprobs, trajectory.versions)
    places = range(part.start, part.stop)
    rows = zip(places, texts, *(column[part].tolist() for column in columns), strict=True)
    return [
        {
            "id": token,
            "text": text,
            "made": bool(made),
            "logprob": logprob if made else None,
            "level": _level(logprob) if made else None,
            "version": version if made else None,
            "reward": ends.get(place),
        }
        for place, text, token, made, logprob, version in rows
    ]


def _level(logprob: float) -> int:
    return int(np.searchsorted(-np.array(LEVELS), -logprob))


# -- steps: the turns of all rows and players of an episode, in the order of time ------------------

STEPS_PER_PAGE = 50
MIN_STEP_TOKENS = 512
"""Tokens of a step that a page shows at least; a page shows about `MAX_TOKENS`."""


class EpisodeStep(NamedTuple):
    """One turn."""

    row: int
    """Index of its trajectory in the group."""
    turn: int
    """Its number in that trajectory, from 0."""
    call: int | None
    """Number of the model's call in an agent's episode."""
    time: float
    """When it ended, in seconds since the epoch; 0: unknown."""


def steps_of(group: Group, number: int) -> list[EpisodeStep]:
    """Return the steps of an episode: of all its rows, or of all that learnt in its game.

    They are ordered by calls, else by time; where times are unknown, the players alternate.
    """
    steps = [
        EpisodeStep(row, turn, None if calls is None else int(calls.numbers[turn]), time)
        for row in rows_of(group, number)
        for trajectory in [group.trajectories[row]]
        for calls in [trajectory.calls]
        for turn, time in enumerate(trajectory.turn_times or [0.0] * len(trajectory.turn_ends))
    ]
    if all(step.call is not None for step in steps):
        return sorted(steps, key=lambda step: (step.call, step.row))
    if all(step.time for step in steps):
        return sorted(steps, key=lambda step: (step.time, step.turn, step.row))
    return sorted(steps, key=lambda step: (step.turn, step.row))


def rows_of(group: Group, number: int) -> list[int]:
    """Return the trajectories that belong to an episode's steps, in the group's order."""
    trajectory = group.trajectories[number]
    return _table(group, number) if trajectory.role else sorted(_rows(group, trajectory))


def _table(group: Group, number: int) -> list[int]:
    """Return the players of a game: they are adjacent, and each role comes once.

    A role without a turn has no trajectory. Where the first role of a game lacks one, its other
    players are taken for those of the game before, unless that has them.
    """
    games: list[list[int]] = []
    for index, item in enumerate(group.trajectories):
        if not games or item.role in {group.trajectories[other].role for other in games[-1]}:
            games.append([])
        games[-1].append(index)
    return next(game for game in games if number in game)


def show_steps(
    group: Group, steps: Sequence[EpisodeStep], first: int, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Return `STEPS_PER_PAGE` steps from the index `first` on.

    Each has its new messages, the policy's among them, its new tokens and what it was worth. What a
    row has in common with one that began before is left out.
    """
    rows = {row: _Row(group, row) for row in dict.fromkeys(step.row for step in steps)}
    for index, row in enumerate(rows.values()):
        row.begin_behind(list(rows.values())[:index])
    last = min(first + STEPS_PER_PAGE, len(steps))
    most = max(MAX_TOKENS // max(1, last - first), MIN_STEP_TOKENS)
    drawn = [rows[step.row].take(step, group.started, most) for step in steps[:last]][first:]
    owners = [group.trajectories[step.row] for step in steps[first:last]]
    ids = [owner.token_ids[part].tolist() for owner, (_, part) in zip(owners, drawn, strict=True)]
    words = iter(texts.of([token for some in ids for token in some]))
    shown: list[dict[str, Any]] = []
    for owner, some, (item, part) in zip(owners, ids, drawn, strict=True):
        tokens = _tokens(owner, part, [next(words) for _ in some])
        shown.append({"number": first + len(shown) + 1, **item, "tokens": tokens})
    return shown


class _Row:
    """A trajectory whose steps are taken one after the other."""

    def __init__(self, group: Group, number: int) -> None:
        self.of = group.trajectories[number]
        self._messages = restore_images(self.of.messages, group.images)
        self._answers = _answers(self.of)
        self._turns = _turns(self.of)
        self._message = self._token = 0
        self._behind: int | None = None
        self.number = number

    def begin_behind(self, earlier: "Sequence[_Row]") -> None:
        """Skip the beginning that an agent's row has in common with one that began before."""
        for other in earlier if self.of.episode >= 0 else ():
            message = _num_equal(self._messages, other._messages)
            ids, others = self.of.token_ids, other.of.token_ids
            num = min(len(ids), len(others), int(self.of.turn_ends[0]))
            unequal = np.flatnonzero(ids[:num] != others[:num])
            token = int(unequal[0]) if len(unequal) else num
            if (message, token) > (self._message, self._token):
                self._message, self._token = message, token
                goes_on = message > max(0, other._answers[0])
                self._behind = other.number if goes_on else None

    def take(self, step: EpisodeStep, started: float, most: int) -> tuple[dict[str, Any], slice]:
        """Return a step, which follows those taken before, and the places of its tokens."""
        turn, answer = self._turns[step.turn], self._answers[step.turn]
        is_last = step.turn == len(self._turns) - 1
        end = len(self._messages) if is_last else answer + 1
        messages = [show_message(item) for item in self._messages[self._message : end]]
        if answer >= self._message:
            messages[answer - self._message]["turn"] = turn
        token = len(self.of.token_ids) if is_last else int(self.of.turn_ends[step.turn]) + 1
        part = slice(max(self._token, token - most), token)
        behind, left_out = self._behind, part.start - self._token
        self._message, self._token, self._behind = max(end, self._message), token, None
        shown = {
            **{"row": step.row, "turn": turn, "call": step.call, "behind": behind},
            "who": self.of.role or self.of.kind,
            "after_s": max(0.0, step.time - started) if step.time and started else None,
            **{"messages": messages, "left_out": left_out},
        }
        return shown, part


def _num_equal(messages: Sequence[Any], others: Sequence[Any]) -> int:
    num = 0
    for message, other in zip(messages, others, strict=False):
        if message != other:
            break
        num += 1
    return num


# -- messages --------------------------------------------------------------------------------------


def text_of(trajectory: Trajectory) -> str:
    """Return the texts of an episode's messages, joined by line ends."""
    return "\n".join(text for message in trajectory.messages for text in texts_of(message))


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message: reasoning, parts and tool calls."""
    shown = show_message(message)
    yield shown["reasoning"]
    yield from (part["text"] for part in shown["parts"] if part["kind"] == "text")
    yield from (f"{call['name']}({call['arguments']})" for call in shown["tool_calls"])


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
    """Return a part of a message: `text`, or `image` (a data URL, or its location)."""
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

    Only PNG, JPEG, GIF and WebP, recognized by their first bytes: no format with scripts, and no
    URL that the browser would fetch.
    """
    if isinstance(value, str):
        result = _DATA_URL.fullmatch(value) if len(value) < 2 * MAX_IMAGE_BYTES else None
        try:
            value = base64.b64decode(result[2] if result else value, validate=result is None)
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
