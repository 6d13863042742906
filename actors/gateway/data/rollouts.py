"""The rollout log a page at a time, and which step trained what, without reading all of either."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    job: JobRecord,
    *,
    before: int | None = None,
    step: int | None = None,
    sort: str = "log",
    wanted: Wanted = EVERYTHING,
) -> GroupPage:
    """Return a page of the run's newest groups, or the groups that one step trained.

    Behind the log's oldest come those of the run's folder. `before` is the sequence behind the
    page's first entry. What is looked for is sought page after page, within a bound: `older` leads
    on from there. Raises NotFoundError for a step that was not trained.
    """
    there = await RunRollouts.open(broker, job.scope, job.run_dir)
    older: int | None = None
    if step is not None:
        seqs = await _trained_in(broker, job.scope, there, step)
        found = await asyncio.to_thread(_those, await _entries(there, seqs), wanted)
        rows = [group_row(one, step, wanted) for one in found]
    else:
        step_of = there.steps | await _recent_steps(broker, job.scope)
        found, older = await _search(there, before, wanted)
        rows = [group_row(one, step_of.get(one.seq), wanted) for one in found]
    if sort == "reward":
        rows.sort(key=lambda row: row["reward"] if row["reward"] is not None else float("-inf"))
        rows.reverse()
    return GroupPage(rows, older, len(there))


async def _search(
    there: RunRollouts, before: int | None, wanted: Wanted
) -> tuple[list[LogEntry], int | None]:
    """Return a page of what is wanted, from `before` back, and where older ones begin."""
    found: list[LogEntry] = []
    num_entries = num_bytes = 0
    while seqs := there.before(before, PAGE):
        entries = await _entries(there, seqs)
        found += await asyncio.to_thread(_those, entries, wanted)
        before = seqs[-1]
        num_entries += len(entries)
        num_bytes += sum(len(one.payload) for one in entries)
        enough = num_entries >= _SEARCHED_ENTRIES or num_bytes >= _SEARCHED_BYTES
        if enough or len(found) >= PAGE:
            break
    return found, before if there.before(before, 1) else None


async def _entries(there: RunRollouts, seqs: Iterable[int]) -> list[LogEntry]:
    entries = await asyncio.gather(*map(there.get, seqs))
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


async def read_group(broker: Broker, job: JobRecord, seq: int) -> tuple[Group, int | None]:
    """Return the group at a sequence of the log, and the step that trained it.

    Raises NotFoundError when it is not there (any more), MessageError when it cannot be read.
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


async def around(
    broker: Broker, job: JobRecord, seq: int, episode: int, num_episodes: int
) -> dict[str, tuple[int, int] | None]:
    """Return the episodes before and after one: in its group, else in the entry beside that."""
    there = await RunRollouts.open(broker, job.scope, job.run_dir)
    older, newer = next(iter(there.before(seq, 1)), None), there.after(seq)
    before = (seq, episode - 1) if episode else None if older is None else (older, 0)
    more = episode + 1 < num_episodes
    after = (seq, episode + 1) if more else None if newer is None else (newer, 0)
    return {"before": before, "after": after}


async def _trained_in(
    broker: Broker, scope: JobScope, there: RunRollouts, step: int
) -> Sequence[int]:
    """Return the entries that a step trained; of a run without a batch log those in its folder."""
    try:
        return (await trained_in(broker, scope, step)).seqs
    except NotFoundError:
        kept = [seq for seq, trained in there.steps.items() if trained == step]
        if not kept:
            raise
        return kept


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
