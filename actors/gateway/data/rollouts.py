"""The rollout log a page at a time, and which step trained what, without reading all of either."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....broker.client.connection import Broker, NoResponders
from ....broker.jetstream.stored import get_batch
from ....broker.jetstream.streams import stream_info
from ....broker.rollouts import LogEntry, RolloutLog
from ....schemas.batch import BatchRecord
from ....schemas.rollout import Group, Trajectory, return_of
from ....schemas.wire.errors import MessageError, NotFoundError
from ....schemas.wire.subjects import JobScope
from .episodes import show_message

PAGE = 24
_BATCH_WINDOW = 512
_SEARCHED_ENTRIES, _SEARCHED_BYTES = 768, 64 << 20
"""What one page reads of the log at most when it looks for something."""
_PREVIEW_CHARS = 160


@dataclass(frozen=True)
class Wanted:
    """What somebody looks for in the log: episodes with all of it."""

    text: str = ""
    """Words that must all stand in the messages, in whatever order and case."""
    reward_from: float | None = None
    reward_to: float | None = None
    version: int | None = None
    """A policy version that generated some of its tokens."""
    tokens_from: int | None = None
    """Generated tokens at least."""
    sample: int | None = None
    """Row of the data, or seed of a generated state."""
    errors: bool = False
    """Only tasks given up and episodes with failed tries."""

    def has(self, group: Group) -> bool:
        """Whether the page shows a group."""
        if self.sample is not None and group.task.sample != self.sample:
            return False
        if self.errors and group.error is None and not any(e.failures for e in group.trajectories):
            return False
        return self == Wanted(sample=self.sample, errors=self.errors) or any(self.marks(group))

    def marks(self, group: Group) -> list[bool]:
        """Whether each episode of a group is one of those looked for."""
        words = self.text.lower().split()
        return [self._is_it(one, words) for one in group.trajectories]

    def _is_it(self, one: Trajectory, words: Sequence[str]) -> bool:
        low, high = self.reward_from, self.reward_to
        in_range = (low is None or one.reward >= low) and (high is None or one.reward <= high)
        is_of = self.version is None or one.min_version <= self.version <= one.max_version
        if not in_range or not is_of or one.num_generated < (self.tokens_from or 0):
            return False
        text = text_of(one).lower() if words else ""
        return all(word in text for word in words)


EVERYTHING = Wanted()


@dataclass(frozen=True)
class GroupPage:
    """Some groups of a job."""

    groups: list[dict[str, Any]]
    """Newest first, or best first; see `group_row`."""
    older: int | None
    """Where the next page begins (`before`); None at the end of the log."""
    num_entries: int
    """Entries that the log holds."""


async def read_page(
    broker: Broker,
    scope: JobScope,
    *,
    before: int | None = None,
    step: int | None = None,
    sort: str = "log",
    wanted: Wanted = EVERYTHING,
) -> GroupPage:
    """Return a page of the log's newest groups, or the groups that one step trained.

    `before` is the sequence behind the page's first entry. What is looked for is sought page after
    page, within a bound: `older` leads on from there. Raises NotFoundError for a step that was not
    trained.
    """
    log = RolloutLog(broker, scope)
    try:
        first, last = await log.first_seq(), await log.last_seq()
    except NotFoundError:
        return GroupPage([], None, 0)  # the job's streams were removed
    older: int | None = None
    if step is not None:
        record = await trained_in(broker, scope, step)
        step_of = dict.fromkeys(record.seqs, record.step)
        entries = await _entries(log, record.seqs)
        found = await asyncio.to_thread(_those, entries, wanted)
        rows = [group_row(one, step_of[one.seq], wanted) for one in found]
    else:
        end = min(last, before - 1) if before is not None else last
        step_of = await _recent_steps(broker, scope)
        found, left = await _search(log, first, end, wanted)
        rows = [group_row(one, step_of.get(one.seq), wanted) for one in found]
        older = left if left > first else None
    if sort == "reward":
        rows.sort(key=lambda row: row["reward"] if row["reward"] is not None else float("-inf"))
        rows.reverse()
    return GroupPage(rows, older, max(0, last - first + 1))


async def _search(
    log: RolloutLog, first: int, end: int, wanted: Wanted
) -> tuple[list[LogEntry], int]:
    """Return a page of what is wanted, from `end` back, and the sequence read last."""
    found: list[LogEntry] = []
    num_entries = num_bytes = 0
    left = end + 1
    while left > first and len(found) < PAGE:
        start = max(first, left - PAGE)
        entries = await _entries(log, range(left - 1, start - 1, -1))
        found += await asyncio.to_thread(_those, entries, wanted)
        left = start
        num_entries += len(entries)
        num_bytes += sum(len(one.payload) for one in entries)
        if num_entries >= _SEARCHED_ENTRIES or num_bytes >= _SEARCHED_BYTES:
            break
    return found, left


async def _entries(log: RolloutLog, seqs: Iterable[int]) -> list[LogEntry]:
    entries = await asyncio.gather(*(log.get(seq) for seq in seqs))
    return [one for one in entries if one is not None]


def _those(entries: Iterable[LogEntry], wanted: Wanted) -> list[LogEntry]:
    return [one for one in entries if _is(one, wanted)]


def _is(entry: LogEntry, wanted: Wanted) -> bool:
    if entry.group is None:
        return wanted in (EVERYTHING, Wanted(errors=True))
    return wanted.has(entry.group)


def text_of(one: Trajectory) -> str:
    """Return the text of an episode's messages, one after the other."""
    return "\n".join(text for message in one.messages for text in _texts(message))


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    shown = show_message(message)
    yield shown["reasoning"]
    yield from (part["text"] for part in shown["parts"] if part["kind"] == "text")
    yield from (f"{call['name']}({call['arguments']})" for call in shown["tool_calls"])


def _preview(group: Group) -> dict[str, str]:
    """Return how the prompt of a group ends, and how its first episode's last answer begins."""
    if not group.trajectories:
        return {"prompt": "", "answer": ""}
    messages = group.trajectories[0].messages
    roles = [str(one.get("role")) for one in messages]
    begun = roles.index("assistant") if "assistant" in roles else len(roles)
    prompt = " ".join(" ".join(_texts(messages[begun - 1])).split()) if begun else ""
    own = [one for one, role in zip(messages, roles, strict=True) if role == "assistant"]
    answer = " ".join(" ".join(_texts(own[-1])).split()) if own else ""
    return {"prompt": prompt[-_PREVIEW_CHARS:], "answer": answer[:_PREVIEW_CHARS]}


async def read_group(broker: Broker, scope: JobScope, seq: int) -> tuple[Group, int | None]:
    """Return the group at a sequence of the log, and the step that trained it.

    Raises NotFoundError when it is not there (any more), MessageError when it cannot be read.
    """
    entry = await RolloutLog(broker, scope).get(seq)
    if entry is None:
        raise NotFoundError(
            f"the rollout log has no entry {seq} (any more)",
            hint="it is trimmed behind each checkpoint unless training.keep_rollouts is true",
        )
    if entry.group is None:
        raise entry.error or MessageError(f"entry {seq} of the rollout log cannot be read")
    return entry.group, (await _recent_steps(broker, scope)).get(seq)


async def around(
    broker: Broker, scope: JobScope, seq: int, episode: int, num_episodes: int
) -> dict[str, tuple[int, int] | None]:
    """Return the episodes before and after one: in its group, else in the entry beside that."""
    log = RolloutLog(broker, scope)
    first, last = await log.first_seq(), await log.last_seq()
    before = (seq, episode - 1) if episode else (seq - 1, 0) if seq > first else None
    more = episode + 1 < num_episodes
    after = (seq, episode + 1) if more else (seq + 1, 0) if seq < last else None
    return {"before": before, "after": after}


async def trained_in(broker: Broker, scope: JobScope, step: int) -> BatchRecord:
    """Return the batch record of a step; raises NotFoundError.

    Steps follow one another in the log, so the record lies at the sequence of its step or, in a
    run that was taken up again, near it.
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


def group_row(entry: LogEntry, step: int | None, wanted: Wanted = EVERYTHING) -> dict[str, Any]:
    """Return what the list shows of one entry of the log; `found`, which episodes are wanted."""
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
    return {
        "seq": entry.seq,
        "task": group.task.task,
        "sample": group.task.sample,
        "step": step,
        "source": group.source,
        "reward": _mean([return_of(rows) for rows in group.episodes]),
        "tokens": sum(one.num_generated for one in group.trajectories),
        "versions": _versions(group),
        "seconds": max(0.0, group.finished - group.started),
        "finished": group.finished,
        "failures": sum(len(one.failures) for one in group.trajectories),
        "error": group.error.model_dump() if group.error is not None else None,
        **_preview(group),
        "episodes": [
            {
                "episode": number,
                "found": found,
                "reward": one.reward,
                "turns": len(one.rewards),
                "tokens": one.num_generated,
                "finish": one.ended_by,
                "greedy": one.greedy,
                "tries": one.num_tries,
            }
            for number, (one, found) in enumerate(
                zip(group.trajectories, wanted.marks(group), strict=True)
            )
        ],
    }


def _versions(group: Group) -> list[int]:
    if not group.trajectories:
        return []
    return [
        min(one.min_version for one in group.trajectories),
        max(one.max_version for one in group.trajectories),
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
