"""The rollout log for display: pages of groups, episodes token by token, and advantages.

The step that trained a group is found without reading the whole log or all batches.
"""

import asyncio
import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import numpy as np
from starlette.requests import Request

from ....broker.client.connection import Broker
from ....broker.client.faults import NoResponders
from ....broker.jetstream.direct_get import get_batch
from ....broker.jetstream.streams import stream_info
from ....broker.kept_rollouts import RunRollouts
from ....broker.rollouts import LogEntry
from ....envs.agents.call_selection import call_lines
from ....schemas.job import JobRecord
from ....schemas.rollout import Group, Trajectory, return_of
from ....schemas.task import BatchRecord
from ....schemas.wire.errors import MessageError, NotFoundError
from ....schemas.wire.images import data_url, restore_images
from ....schemas.wire.subjects import JobScope
from ...storage.run_folders import checkpoint_folders
from ..operations import Scheduler
from ..sessions import Visitor
from ..web import choice_in, flag_in, number_in, real_in, text_in, visitor_of
from .jobs import PAGE, STATES, Query
from .token_text import TokenTexts, token_texts

# -- one episode -----------------------------------------------------------------------------------

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
    """Return the messages; the assistant's last ones have their turns."""
    whole = restore_images(trajectory.messages, images)
    messages: list[dict[str, Any]] = [show_message(message) for message in whole]
    own = [message for message in messages if message["role"] == "assistant"][-len(turns) :]
    for message, turn in zip(own, turns[len(turns) - len(own) :], strict=True):
        message["turn"] = turn
    return messages


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
    ids = trajectory.token_ids[:MAX_TOKENS].tolist()
    mask = trajectory.mask[: len(ids)].tolist()
    logprobs = trajectory.logprobs[: len(ids)].tolist()
    versions = trajectory.versions[: len(ids)].tolist()
    ends = dict(zip(trajectory.turn_ends.tolist(), trajectory.rewards.tolist(), strict=True))
    message = texts.of(ids)
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
            zip(ids, message, mask, logprobs, versions, strict=True)
        )
    ]
    return {
        "tokens": tokens,
        "left_out": len(trajectory.token_ids) - len(ids),
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


GROUPS_PER_PAGE = 24
_BATCH_WINDOW = 512
_SEARCHED_ENTRIES, _SEARCHED_BYTES = 768, 64 << 20
"""Maximum entries and bytes of the log that a search reads for one page."""
_PREVIEW_CHARS = 160


@dataclass(frozen=True)
class RolloutFilter:
    """A search of the log; episodes must match all conditions."""

    text: str = ""
    """Words that the messages must contain, in any order and case."""
    reward_from: float | None = None
    reward_to: float | None = None
    version: int | None = None
    """A policy version that generated some of its tokens."""
    tokens_from: int | None = None
    """Least number of generated tokens."""
    sample: int | None = None
    """Row of the data, or seed of a generated state."""
    errors: bool = False
    """Only failed tasks and episodes with failed tries."""

    def has(self, group: Group) -> bool:
        """Return whether a group matches."""
        if self.sample is not None and group.task.sample != self.sample:
            return False
        if self.errors and group.error is None and not any(e.failures for e in group.trajectories):
            return False
        return self == RolloutFilter(sample=self.sample, errors=self.errors) or any(
            self.marks(group)
        )

    def marks(self, group: Group) -> list[bool]:
        """Return whether each episode of a group matches."""
        words = self.text.lower().split()
        return [self._matches_episode(trajectory, words) for trajectory in group.trajectories]

    def _matches_episode(self, trajectory: Trajectory, words: Sequence[str]) -> bool:
        low, high = self.reward_from, self.reward_to
        in_range = (low is None or trajectory.reward >= low) and (
            high is None or trajectory.reward <= high
        )
        is_of = (
            self.version is None or trajectory.min_version <= self.version <= trajectory.max_version
        )
        if not in_range or not is_of or trajectory.num_generated < (self.tokens_from or 0):
            return False
        text = text_of(trajectory).lower() if words else ""
        return all(word in text for word in words)


EVERYTHING = RolloutFilter()


@dataclass(frozen=True)
class GroupPage:
    """Some groups of a job."""

    groups: list[dict[str, Any]]
    """Rows, newest or best first; see `group_row`."""
    older: int | None
    """Value of `before` for the next page; None at the end of the log."""
    num_entries: int
    """Number of entries of the log."""


async def read_page(
    broker: Broker,
    job: JobRecord,
    *,
    before: int | None = None,
    step: int | None = None,
    sort: str = "log",
    search: RolloutFilter = EVERYTHING,
) -> GroupPage:
    """Return a page of the run's newest groups, or the groups that one step trained.

    The groups of the run's folder follow the log's oldest ones. `before` is the sequence after the
    page's first entry. A search reads a bounded part of the log: `older` continues from there.
    Raises NotFoundError for a step that was not trained.
    """
    there = await RunRollouts.open(broker, job.scope, job.run_dir)
    older: int | None = None
    if step is not None:
        seqs = await _trained_in(broker, job.scope, there, step)
        reply = await asyncio.to_thread(_matching, await _entries(there, seqs), search)
        rows = [group_row(item, step, search) for item in reply]
    else:
        step_of = there.steps | await _recent_steps(broker, job.scope)
        reply, older = await _search(there, before, search)
        rows = [group_row(item, step_of.get(item.seq), search) for item in reply]
    if sort == "reward":
        rows.sort(key=lambda row: row["reward"] if row["reward"] is not None else float("-inf"))
        rows.reverse()
    return GroupPage(rows, older, len(there))


async def _search(
    there: RunRollouts, before: int | None, search: RolloutFilter
) -> tuple[list[LogEntry], int | None]:
    """Return a page of matches, from `before` back, and the start of the next page."""
    collected: list[LogEntry] = []
    num_entries = num_bytes = 0
    while seqs := there.before(before, GROUPS_PER_PAGE):
        entries = await _entries(there, seqs)
        collected += await asyncio.to_thread(_matching, entries, search)
        before = seqs[-1]
        num_entries += len(entries)
        num_bytes += sum(len(entry.payload) for entry in entries)
        enough = num_entries >= _SEARCHED_ENTRIES or num_bytes >= _SEARCHED_BYTES
        if enough or len(collected) >= GROUPS_PER_PAGE:
            break
    return collected, before if there.before(before, 1) else None


async def _entries(there: RunRollouts, seqs: Iterable[int]) -> list[LogEntry]:
    entries = await asyncio.gather(*map(there.get, seqs))
    return [entry for entry in entries if entry is not None]


def _matching(entries: Iterable[LogEntry], search: RolloutFilter) -> list[LogEntry]:
    of_damaged = search in (EVERYTHING, RolloutFilter(errors=True))
    return [
        entry
        for entry in entries
        if (of_damaged if entry.group is None else search.has(entry.group))
    ]


def text_of(trajectory: Trajectory) -> str:
    """Return the texts of an episode's messages, joined by line ends."""
    return "\n".join(text for message in trajectory.messages for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    shown = show_message(message)
    yield shown["reasoning"]
    yield from (part["text"] for part in shown["parts"] if part["kind"] == "text")
    yield from (f"{call['name']}({call['arguments']})" for call in shown["tool_calls"])


def _preview(group: Group) -> dict[str, str]:
    """Return the end of a group's prompt, and the start of its first episode's last answer."""
    if not group.trajectories:
        return {"prompt": "", "answer": ""}
    messages = group.trajectories[0].messages
    roles = [str(message.get("role")) for message in messages]
    begun = roles.index("assistant") if "assistant" in roles else len(roles)
    prompt = " ".join(" ".join(_texts(messages[begun - 1])).split()) if begun else ""
    own = [message for message, role in zip(messages, roles, strict=True) if role == "assistant"]
    answer = " ".join(" ".join(_texts(own[-1])).split()) if own else ""
    return {"prompt": prompt[-_PREVIEW_CHARS:], "answer": answer[:_PREVIEW_CHARS]}


async def read_group(broker: Broker, job: JobRecord, seq: int) -> tuple[Group, int | None]:
    """Return the group at a sequence of the log, and the step that trained it.

    Raises NotFoundError if the entry does not exist, MessageError if it cannot be read.
    """
    there = await RunRollouts.open(broker, job.scope, job.run_dir)
    entry = await there.get(seq)
    if entry is None:
        raise NotFoundError(
            f"the rollout log has no entry {seq} (any more)",
            hint="it is trimmed behind each checkpoint unless training.keep_rollouts is true, and "
            "some of it is kept in the run's folder (training.kept_rollout_bytes)",
        )
    if entry.group is None:
        raise entry.error or MessageError(f"entry {seq} of the rollout log cannot be read")
    return entry.group, (there.steps | await _recent_steps(broker, job.scope)).get(seq)


async def neighbours_of(
    broker: Broker, job: JobRecord, seq: int, episode: int, num_episodes: int
) -> dict[str, tuple[int, int] | None]:
    """Return the episodes before and after one, in its group or the neighbouring entries."""
    there = await RunRollouts.open(broker, job.scope, job.run_dir)
    older, newer = next(iter(there.before(seq, 1)), None), there.after(seq)
    before = (seq, episode - 1) if episode else None if older is None else (older, 0)
    more = episode + 1 < num_episodes
    after = (seq, episode + 1) if more else None if newer is None else (newer, 0)
    return {"before": before, "after": after}


async def _trained_in(
    broker: Broker, scope: JobScope, there: RunRollouts, step: int
) -> Sequence[int]:
    """Return the entries that a step trained; without a batch log, from the run's folder."""
    try:
        return (await trained_in(broker, scope, step)).seqs
    except NotFoundError:
        remaining = [seq for seq, trained in there.steps.items() if trained == step]
        if not remaining:
            raise
        return remaining


async def trained_in(broker: Broker, scope: JobScope, step: int) -> BatchRecord:
    """Return the batch record of a step; raises NotFoundError.

    Steps follow one another in the log, so the record is at the sequence of its step or, in a
    resumed run, near it.
    """
    for start in (max(1, step), max(1, step - _BATCH_WINDOW)):
        for record in await _batch_records(broker, scope, start):
            if record.step == step:
                return record
    raise NotFoundError(
        f"step {step} is not in the batch log", hint="it may not be trained yet; steps begin at 1"
    )


async def _recent_steps(broker: Broker, scope: JobScope) -> dict[int, int]:
    """Return the step that trained each of the log's newest entries."""
    try:
        last = int((await stream_info(broker, scope.stream_batch))["state"]["last_seq"])
    except NotFoundError:
        return {}
    records = await _batch_records(broker, scope, max(1, last - _BATCH_WINDOW))
    return {seq: record.step for record in records for seq in record.seqs}


async def _batch_records(broker: Broker, scope: JobScope, start: int) -> list[BatchRecord]:
    try:
        messages, _ = await get_batch(broker, scope.stream_batch, start, scope.batch)
    except NoResponders:
        return []
    return [BatchRecord.from_bytes(message.payload) for message in messages]


def group_row(
    entry: LogEntry, step: int | None, search: RolloutFilter = EVERYTHING
) -> dict[str, Any]:
    """Return the row of one entry of the log; `found` marks matching episodes."""
    group = entry.group
    if group is None:
        return {
            "seq": entry.seq,
            "task": entry.number,
            "step": step,
            "reward": None,
            "failures": 0,
            "error": {"boundary": "broker", "message": str(entry.error)},
            "episodes": [],
            "prompt": "",
            "answer": "",
        }
    rewards = [return_of(rows) for rows in group.episodes]
    return {
        "seq": entry.seq,
        "task": group.task.task,
        "sample": group.task.sample,
        "step": step,
        "source": group.source,
        "reward": fmean(rewards) if rewards else None,
        "tokens": sum(trajectory.num_generated for trajectory in group.trajectories),
        "versions": _versions(group),
        "seconds": max(0.0, group.finished - group.started),
        "finished": group.finished,
        "failures": sum(len(trajectory.failures) for trajectory in group.trajectories),
        "error": group.error.model_dump() if group.error is not None else None,
        **_preview(group),
        "episodes": [
            {
                "episode": number,
                "found": is_match,
                "reward": episode.reward,
                "turns": len(episode.rewards),
                "tokens": episode.num_generated,
                "finish": episode.ended_by,
                "greedy": episode.greedy,
                "tries": episode.num_tries,
            }
            for number, (episode, is_match) in enumerate(
                zip(group.trajectories, search.marks(group), strict=True)
            )
        ],
    }


def _versions(group: Group) -> list[int]:
    if not group.trajectories:
        return []
    return [
        min(trajectory.min_version for trajectory in group.trajectories),
        max(trajectory.max_version for trajectory in group.trajectories),
    ]


# -- parameters of requests, the same for pages and the REST interface -----------------------------

MAX_LIMIT = 1000


async def job_of(request: Request) -> tuple[Visitor, JobRecord]:
    """Return the visitor, and the job in the path; raises LogInError, NotFoundError."""
    visitor = await visitor_of(request)
    return visitor, await Scheduler(visitor).get(request.path_params["job"])


def query_of(request: Request) -> Query:
    """Return a request's filter of jobs; raises MessageError for unknown values."""
    limit = number_in(request, "limit", PAGE, least=1) or PAGE
    return Query(
        state=choice_in(request, "state", STATES, ""),
        search=text_in(request, "search"),
        offset=number_in(request, "offset", 0) or 0,
        limit=min(limit, MAX_LIMIT),
        sort=request.query_params.get("sort", ""),
    )


def actor_in(request: Request) -> str:
    """Return the actor named in the query; raises MessageError for an impossible name."""
    actor = text_in(request, "actor")
    if actor and not all(char.isalnum() or char in "-_" for char in actor):
        raise MessageError(f"actor={actor!r} is not the name of an actor")
    return actor


async def page_of_rollouts(request: Request, visitor: Visitor, record: JobRecord) -> GroupPage:
    """Return the page of the rollout log that a request names."""
    return await read_page(
        visitor.broker,
        record,
        before=number_in(request, "before", least=1),
        step=number_in(request, "step", least=1),
        sort=choice_in(request, "sort", ("log", "reward"), "log"),
        search=RolloutFilter(
            text=text_in(request, "q"),
            reward_from=real_in(request, "reward_from"),
            reward_to=real_in(request, "reward_to"),
            version=number_in(request, "version"),
            tokens_from=number_in(request, "tokens_from"),
            sample=number_in(request, "sample"),
            errors=flag_in(request, "errors"),
        ),
    )


async def read_episode(
    visitor: Visitor, record: JobRecord, seq: int, number: int
) -> dict[str, Any]:
    """Return an episode of an entry of the log, with its tokens."""
    group, step = await read_group(visitor.broker, record, seq)
    algorithm: dict[str, Any] = record.config.get("algorithm") or {}
    estimator = algorithm.get("advantage", "grpo")

    def show() -> dict[str, Any]:  # thousands of tokens, and images
        shown = show_episode(group, number, estimator=estimator, step=step)
        return {"seq": seq, **shown, **show_tokens(group.trajectories[number], _texts_of(record))}

    shown = await visitor.share.in_thread(show)
    beside = await neighbours_of(visitor.broker, record, seq, number, len(group.trajectories))
    return {**shown, **beside}


def episode_in(request: Request) -> tuple[int, int]:
    """Return entry and episode that a path names."""
    return int(request.path_params["seq"]), int(request.path_params["episode"])


def beside_in(request: Request) -> tuple[int, int] | None:
    """Return the episode to show beside another one, `SEQ/EPISODE`; None: none.

    Raises MessageError for anything else.
    """
    text = request.query_params.get("beside", "")
    if not text:
        return None
    seq, _, number = text.partition("/")
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in (seq, number)):
        raise MessageError(f"beside={text[:40]!r} is not an episode", hint="write SEQ/EPISODE")
    return int(seq), int(number)


def _texts_of(record: JobRecord) -> TokenTexts:
    folders = checkpoint_folders(record.run_dir)
    model: dict[str, Any] = record.config.get("model") or {}
    latest = folders[max(folders)] if folders else None
    return token_texts(str(model.get("path", "")), latest)


def queue_of(records: list[JobRecord]) -> list[JobRecord]:
    """Return the queued jobs by their place in the queue; those without a place come last."""
    waiting = [record for record in records if record.state == "QUEUED"]
    return sorted(waiting, key=lambda job: (job.place == 0, job.place))
