"""The rollout log for display: pages of groups, episodes token by token, and advantages.

The step that trained a group is found without reading the whole log or all batches.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from ....broker.client.connection import Broker
from ....broker.client.faults import NoResponders
from ....broker.jetstream.direct_get import get_batch
from ....broker.jetstream.streams import stream_info
from ....broker.kept_rollouts import RunRollouts
from ....broker.rollouts import LogEntry
from ....schemas.job import JobRecord
from ....schemas.rollout import Group, Trajectory, return_of
from ....schemas.task import BatchRecord
from ....schemas.wire.errors import MessageError, NotFoundError
from ....schemas.wire.subjects import JobScope
from ...storage.run_folders import checkpoint_folders
from ..operations import Scheduler
from ..sessions import Visitor
from ..web import choice_in, flag_in, number_in, real_in, text_in, visitor_of
from .episodes import (
    STEPS_PER_PAGE,
    show_episode,
    show_steps,
    show_tokens,
    steps_of,
    text_of,
    texts_of,
)
from .jobs import PAGE, STATES, Query
from .token_text import TokenTexts, token_texts

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


def _preview(group: Group) -> dict[str, str]:
    """Return the end of a group's prompt, and the start of its first episode's last answer."""
    if not group.trajectories:
        return {"prompt": "", "answer": ""}
    messages = group.trajectories[0].messages
    roles = [str(message.get("role")) for message in messages]
    begun = roles.index("assistant") if "assistant" in roles else len(roles)
    prompt = " ".join(" ".join(texts_of(messages[begun - 1])).split()) if begun else ""
    own = [message for message, role in zip(messages, roles, strict=True) if role == "assistant"]
    answer = " ".join(" ".join(texts_of(own[-1])).split()) if own else ""
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
            "source": "",
            "reward": None,
            "tokens": 0,
            "versions": [],
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
        "reward": sum(rewards) / len(rewards) if rewards else None,
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
    visitor: Visitor, record: JobRecord, seq: int, number: int, at: int | None = None
) -> dict[str, Any]:
    """Return an episode of an entry of the log with its tokens and the order of its steps.

    With `at`: instead, the page of its steps that has this one, counted from 1, with their tokens.
    """
    group, step = await read_group(visitor.broker, record, seq)
    algorithm: dict[str, Any] = record.config.get("algorithm") or {}
    estimator = algorithm.get("advantage", "grpo")

    def show() -> dict[str, Any]:  # thousands of tokens, and images
        shown = show_episode(group, number, estimator=estimator, step=step)
        steps, texts = steps_of(group, number), _texts_of(record)
        if at is None:
            order = {"steps": [item._asdict() for item in steps]}
            return {"seq": seq, **shown, **order, **show_tokens(group.trajectories[number], texts)}
        first = (min(at, len(steps)) - 1) // STEPS_PER_PAGE * STEPS_PER_PAGE
        page = {"first": first, "num_steps": len(steps), "decoded": texts.known}
        return {"seq": seq, **shown, **page, "steps": show_steps(group, steps, first, texts)}

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
