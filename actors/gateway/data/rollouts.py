"""The rollout log a page at a time, and which step trained what, without reading all of either."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....broker.client.connection import Broker, NoResponders
from ....broker.jetstream.stored import get_batch
from ....broker.jetstream.streams import stream_info
from ....broker.rollouts import LogEntry, RolloutLog
from ....schemas.batch import BatchRecord
from ....schemas.rollout import Group, return_of
from ....schemas.wire.errors import MessageError, NotFoundError
from ....schemas.wire.subjects import JobScope

PAGE = 24
_BATCH_WINDOW = 512


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
    errors: bool = False,
) -> GroupPage:
    """Return a page of the log's newest groups, or the groups that one step trained.

    `before` is the sequence behind the page's first entry. With `errors` only tasks given up and
    episodes with failed tries. Raises NotFoundError for a step that was not trained.
    """
    log = RolloutLog(broker, scope)
    try:
        first, last = await log.first_seq(), await log.last_seq()
    except NotFoundError:
        return GroupPage([], None, 0)  # the job's streams were removed
    older: int | None = None
    if step is not None:
        record = await trained_in(broker, scope, step)
        seqs = list(record.seqs)
        step_of = dict.fromkeys(seqs, record.step)
    else:
        end = min(last, before - 1) if before is not None else last
        start = max(first, end - PAGE + 1)
        seqs = list(range(end, start - 1, -1))
        older = start if start > first else None
        step_of = await _recent_steps(broker, scope)
    entries = await asyncio.gather(*(log.get(seq) for seq in seqs))
    rows = [group_row(entry, step_of.get(entry.seq)) for entry in entries if entry is not None]
    if errors:
        rows = [row for row in rows if row["error"] or row["failures"]]
    if sort == "reward":
        rows.sort(key=lambda row: row["reward"] if row["reward"] is not None else float("-inf"))
        rows.reverse()
    return GroupPage(rows, older, max(0, last - first + 1))


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


def group_row(entry: LogEntry, step: int | None) -> dict[str, Any]:
    """Return what the list shows of one entry of the log."""
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
        "episodes": [
            {
                "episode": number,
                "reward": one.reward,
                "turns": len(one.rewards),
                "tokens": one.num_generated,
                "finish": one.ended_by,
                "greedy": one.greedy,
                "tries": one.num_tries,
            }
            for number, one in enumerate(group.trajectories)
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
