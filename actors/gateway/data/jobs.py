"""Jobs for pages and the REST interface: the table, configurations, logs and checkpoints.

Checkpoints are in the run's folder, on this machine or on a disk shared with the pool, or in the
run's store, which is read with the gateway's own credentials. A download packs only folders
`checkpoints/step_*` of the run, and only regular files in them, without links.
"""

import asyncio
import json
import re
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast, get_args

from cachetools import TLRUCache

from ....broker.client.connection import Broker
from ....broker.feed import best_of, parse_all, read_scores, recent_values, run_row
from ....broker.jetstream.direct_get import StoredMessage, get_batch
from ....broker.jetstream.streams import stream_info
from ....schemas.config.sections import given_section
from ....schemas.job import FINAL_STATES, JobRecord, JobState
from ....schemas.local.folder import Folder, FolderEntry
from ....schemas.metric import Event, LogLines, readable
from ....schemas.wire.errors import MessageError, NotFoundError, StorageError, TinkermqError
from ....schemas.wire.subjects import JobScope
from ...storage.checkpoints import stored_checkpoints
from ...storage.run_folders import checkpoint_folders, checkpoint_in
from ...storage.stores import Stores

PAGE = 50
ARCHIVED = "archived"
"""State in a query that selects archived jobs."""
FIGURES_AGE_S = 2.0
MAX_FIGURES = 4096
_READING_AT_ONCE = 64
PATIENCE_S = 0.25
"""Maximum wait of a page for the figures of its jobs."""
GROUPS: dict[str, frozenset[str]] = {
    "active": frozenset({"STARTING", "RUNNING", "PAUSED", "LOST"}),
    "queued": frozenset({"QUEUED"}),
    "completed": frozenset({"COMPLETED"}),
    "failed": frozenset({"FAILED"}),
    "cancelled": frozenset({"CANCELLED"}),
}
"""The page's filters, and the states of each."""
STATES = tuple(dict.fromkeys((*GROUPS, ARCHIVED, *(state.lower() for state in get_args(JobState)))))
"""The values of the query."""


@dataclass(frozen=True)
class Query:
    """Filter and order of a list of jobs."""

    state: str = ""
    """A state, a group of `GROUPS`, or `archived`; empty for all that are not archived."""
    search: str = ""
    """Words that name, id, kind, owner, game, model, reason, tags, group or notes must contain;
    `tag:x` and `group:x` must match a tag or the group exactly."""
    offset: int = 0
    limit: int = PAGE
    sort: str = ""
    """One of `SORTS`, with the prefix `-` for descending order; empty: newest first."""
    folded: bool = False
    """List jobs that serve or evaluate a run together with the run, not separately."""


SORTS: dict[str, Callable[[JobRecord], Any]] = {
    "name": lambda record: record.name.lower(),
    "owner": lambda record: record.user,
    "state": lambda record: record.state,
    "game": lambda record: game_of(record).lower(),
    "slots": lambda record: sum(actor.slots for actor in record.actors),
    "age": lambda record: -(record.started or record.created),
}
"""Sort keys that are in a job's record."""
FIGURES: dict[str, str] = {"step": "step", "reward": "reward", "validation": "validation"}
"""Sort keys that are figures, and their names in a row."""


@dataclass(frozen=True)
class JobPage:
    """A page of the table."""

    records: list[JobRecord]
    total: int
    """Jobs that match."""
    counts: dict[str, int]
    """Jobs by group of states, without the filter."""
    helpers: dict[str, list[JobRecord]] = field(default_factory=dict[str, list[JobRecord]])
    """By job, the jobs that serve or evaluate it and are listed with it."""


def select(records: Sequence[JobRecord], query: Query) -> JobPage:
    """Return a page of the jobs that match a query."""
    archived = [record for record in records if record.archived is not None]
    records = [record for record in records if record.archived is None]
    by_state = Counter(record.state for record in records)
    counts = {name: sum(by_state[state] for state in states) for name, states in GROUPS.items()}
    states = GROUPS.get(query.state, frozenset({query.state.upper()}))
    words = query.search.lower().split()
    matches = [
        record
        for record in (archived if query.state == ARCHIVED else records)
        if (query.state in ("", ARCHIVED) or record.state in states) and _matches(record, words)
    ]
    name, descends = query.sort.removeprefix("-"), query.sort.startswith("-")
    if name in SORTS:
        matches.sort(key=SORTS[name], reverse=descends)
    elif query.sort and name not in FIGURES:
        raise MessageError(
            f"jobs cannot be sorted by {name[:40]!r}",
            hint=f"by {', '.join((*SORTS, *FIGURES))}, with a - before it for the greatest first",
        )
    matches, helpers = fold(matches) if query.folded else (matches, {})
    shown = matches[query.offset : query.offset + query.limit]
    return JobPage(shown, len(matches), {"all": len(records), **counts}, helpers)


def fold(records: Sequence[JobRecord]) -> tuple[list[JobRecord], dict[str, list[JobRecord]]]:
    """Return the jobs without those that serve or evaluate another, and these by that job."""
    runs = {name: item for item in records if not _helps(item) for name in (item.job, item.name)}
    left: list[JobRecord] = []
    helpers: dict[str, list[JobRecord]] = {}
    for record in records:
        run = runs.get(_helps(record))
        if run is None or run.user != record.user:
            left.append(record)
        else:
            helpers.setdefault(run.job, []).append(record)
    return left, helpers


def _helps(record: JobRecord) -> str:
    """Return the id or name of the run that a job serves or evaluates; empty: none."""
    if record.kind not in ("infer", "eval"):
        return ""
    return record.follow or (record.serves or record.fork_of or "").rpartition("@")[0]


async def select_rows(
    figures: "Figures", broker: Broker, records: Sequence[JobRecord], query: Query
) -> tuple[JobPage, list[dict[str, Any]]]:
    """Return a page of the jobs that match a query, and their rows.

    In an order by a figure, jobs without it come last. Raises MessageError for an unknown order.
    """
    key = FIGURES.get(query.sort.removeprefix("-"))
    if key is None:
        page = select(records, query)
        return page, with_helpers(await figures.rows(broker, page.records), page)
    page = select(records, replace(query, offset=0, limit=len(records)))
    rows = await figures.rows(broker, page.records)
    sign = -1 if query.sort.startswith("-") else 1
    rows.sort(key=lambda row: (row[key] is None, sign * (row[key] or 0.0)))
    return page, with_helpers(rows[query.offset : query.offset + query.limit], page)


def with_helpers(rows: list[dict[str, Any]], page: JobPage) -> list[dict[str, Any]]:
    """Return rows with the jobs that serve or evaluate each."""
    fields = {job: [_helper(item) for item in those] for job, those in page.helpers.items()}
    return [{**item, "helpers": fields.get(item["job"], [])} for item in rows]


def _helper(record: JobRecord) -> dict[str, Any]:
    what = "serves" if record.kind == "infer" else "evaluates"
    step = (record.serves or record.fork_of or "").rpartition("@")[2] if not record.follow else ""
    return {
        "job": record.job,
        "name": record.name,
        "kind": record.kind,
        "state": record.state,
        "what": f"{what} @{step}" if step else f"{what} its newest version",
    }


def _matches(record: JobRecord, words: Sequence[str]) -> bool:
    if not words:
        return True
    parts = (record.name, record.job, record.kind, record.user, record.state, record.reason)
    parts = (*parts, game_of(record), model_of(record), *record.tags, record.group, record.notes)
    text = " ".join(parts).lower()
    exact = {f"group:{record.group.lower()}", *(f"tag:{tag.lower()}" for tag in record.tags)}
    return all(word in exact or word in text for word in words)


def game_of(record: JobRecord) -> str:
    """Return the game of a job."""
    return str(given_section(record.config, "env").get("game", ""))


def model_of(record: JobRecord) -> str:
    """Return the model of a job."""
    return str(given_section(record.config, "model").get("path", ""))


_RunEnd = tuple[str, str, int, float | None]
"""User, job, attempt, and the time of its end."""


def _expiry(key: _RunEnd, _: dict[str, float], now: float) -> float:
    return now + FIGURES_AGE_S if key[-1] is None else float("inf")


class Figures:
    """The newest figures of jobs; those of ended jobs are read once."""

    def __init__(self) -> None:
        self._cached: TLRUCache[_RunEnd, dict[str, float], float] = TLRUCache(
            MAX_FIGURES, _expiry, time.monotonic
        )
        self._reading: set[asyncio.Future[dict[str, float]]] = set()
        self._free = asyncio.Semaphore(_READING_AT_ONCE)

    async def rows(self, broker: Broker, records: Sequence[JobRecord]) -> list[dict[str, Any]]:
        """Return the rows of jobs; slow figures are in the rows of the next call."""
        if not records:
            return []
        reading = [asyncio.ensure_future(self.values(broker, record)) for record in records]
        self._reading.update(reading)
        for task in reading:
            task.add_done_callback(self._reading.discard)
        await asyncio.wait(reading, timeout=PATIENCE_S)
        return [
            row(record, task.result() if task.done() else {})
            for record, task in zip(records, reading, strict=True)
        ]

    async def values(self, broker: Broker, record: JobRecord) -> dict[str, float]:
        """Return the newest value of each metric of a job; empty if its feed was removed."""
        finished = record.finished if record.state in FINAL_STATES else None
        key = (record.user, record.job, record.attempt, finished)
        cached = self._cached.get(key)
        if cached is not None:
            return cached
        if record.started is None and record.state == "QUEUED":
            return {}
        try:
            async with self._free:
                values = await recent_values(broker, record.scope)
        except (TinkermqError, TimeoutError):
            values = {}
        self._cached[key] = values
        return values


def row(record: JobRecord, values: dict[str, float]) -> dict[str, Any]:
    """Return a job for the table and the REST interface, without its configuration."""
    training = given_section(record.config, "training")
    return {
        **run_row(record, values),
        "name": record.name,
        "user": record.user,
        "priority": record.priority,
        "game": game_of(record),
        "model": model_of(record),
        "total_steps": _whole(values.get("training/total_steps", training.get("num_steps"))),
        "tokens_per_s": values.get("perf/throughput") if record.state == "RUNNING" else None,
        "slots_wanted": sum(item.slots for item in record.actors),
        "notes": record.notes,
        "fork_of": record.fork_of,
        "archived": record.archived,
        "removal": record.removal,
        "stopping": record.stop != "no" and record.state not in FINAL_STATES,
        "created": record.created,
        "duration_s": (record.finished or time.time()) - record.started if record.started else None,
        "started": record.started,
        "finished": record.finished,
    }


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value == value else None


# -- differences between configurations ------------------------------------------------------------

MAX_RUNS = 20
"""Maximum number of runs that one page compares."""
_OF_THE_RUN = frozenset({"name", "tags", "group", "notes"})
"""Keys that always differ."""


class ConfigDifference(NamedTuple):
    """One key of the configuration."""

    key: str
    """Dotted."""
    values: list[str | None]
    """Values by run, as JSON; None if the run has no such key."""


def differences(configs: Sequence[Mapping[str, Any]]) -> list[ConfigDifference]:
    """Return the keys in which configurations differ, by name."""
    flat = [_flat(config) for config in configs]
    keys = sorted(set[str]().union(*flat) - _OF_THE_RUN)
    matches = (ConfigDifference(key, [item.get(key) for item in flat]) for key in keys)
    return [item for item in matches if len(set(item.values)) > 1]


def seed_groups(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each configuration what it has besides its seed, as far as others differ in it.

    It is empty for one that no other equals but for the seed.
    """
    flat = [_flat(config) for config in configs]
    seeds = [item.pop("seed", "0") for item in flat]
    several = [item.key for item in differences(flat)]
    names = [", ".join(f"{key}={item.get(key, '')}" for key in several) for item in flat]
    counts = {name: {s for n, s in zip(names, seeds, strict=True) if n == name} for name in names}
    return [
        f"{name or 'all'} ({len(counts[name])} seeds)" if len(counts[name]) > 1 else ""
        for name in names
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return dotted keys and their values as JSON; an empty section is a value."""
    fields: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, default=repr)
    return fields


# -- ends of logs and events -----------------------------------------------------------------------


MAX_LINES = 1000
_WINDOW = 900
_MAX_LOOKS = 8
_LEVEL = re.compile(r'"level": ?"(\w+)"|\b(ERROR|WARNING|Traceback)\b')


async def tail_of_log(
    broker: Broker, scope: JobScope, *, actor: str = "", limit: int = MAX_LINES
) -> list[dict[str, Any]]:
    """Return the last lines that the actors of a job, or one of them, wrote; oldest first."""
    subject = scope.log(actor or "*")
    lines: list[dict[str, Any]] = []
    for batch in parse_all(await _tail(broker, scope.stream_log, subject, limit), LogLines):
        lines += shown_lines(batch)
    return lines[-limit:]


async def tail_of_events(
    broker: Broker, record: JobRecord, *, limit: int = 200, quiet: bool = True
) -> list[Event]:
    """Return the last events of a job, newest first; without bottleneck lines if `quiet`."""
    scope = record.scope
    messages = await _tail(broker, scope.stream_feed, scope.event, limit * 2)
    stored = parse_all(messages, Event)
    events = [*stored, *(event for event in record.untold if event not in stored)]
    shown = [event for event in events if not quiet or event.kind != "bottleneck"]
    return shown[-limit:][::-1]


def shown_lines(batch: LogLines) -> list[dict[str, Any]]:
    """Return the lines of a message as the page shows them."""
    return [
        {
            "actor": batch.actor,
            "attempt": batch.attempt,
            "text": readable(line),
            "level": _level(line),
            "time": batch.time,
        }
        for line in batch.lines
    ]


def _level(line: str) -> str:
    match = _LEVEL.search(line)
    word = (match[1] or match[2]).lower() if match else "info"
    return {"traceback": "error", "critical": "error"}.get(word, word)


async def _tail(broker: Broker, stream: str, subject: str, limit: int) -> list[StoredMessage]:
    """Return the last messages on a subject, searching more and more of the stream's end."""
    try:
        state = (await stream_info(broker, stream))["state"]
    except NotFoundError:
        return []
    first, last = max(int(state["first_seq"]), 1), int(state["last_seq"])
    messages: list[StoredMessage] = []
    end, window = last, _WINDOW
    for _ in range(_MAX_LOOKS):
        start = max(first, end - window + 1)
        if end < first or len(messages) >= limit:
            break
        messages = [*await _between(broker, stream, subject, start, end), *messages]
        end, window = start - 1, window * 4
    return messages[-limit:]


async def _between(
    broker: Broker, stream: str, subject: str, start: int, end: int
) -> list[StoredMessage]:
    collected: list[StoredMessage] = []
    while start <= end:
        messages, more = await get_batch(broker, stream, start, subject)
        collected += [message for message in messages if message.seq <= end]
        if not messages or not more:
            break
        start = messages[-1].seq + 1
    return collected


# -- checkpoints, listed and packed for download ---------------------------------------------------

_CHUNK = 1 << 20


async def scored_checkpoints(broker: Broker, record: JobRecord) -> list[dict[str, Any]]:
    """Return the checkpoints with their validation, and mark the best one.

    Raises StorageError.
    """
    reply = await asyncio.to_thread(list_checkpoints, record, Stores(broker))
    try:
        scores = await read_scores(broker, record.scope)
    except TinkermqError:
        scores = {}  # the bucket does not exist, or this user may not read it
    best = best_of(scores, [item["step"] for item in reply])
    return [
        {
            **item,
            "score": score and score.mean,
            "failed_episodes": score and score.num_missing,
            "best": item["step"] == best,
        }
        for item in reply
        for score in [scores.get(item["step"])]
    ]


def list_checkpoints(record: JobRecord, stores: Stores) -> list[dict[str, Any]]:
    """Return step, size and time of each checkpoint, newest first; raises StorageError."""
    result = _in_store(record, stores)
    there = {item["step"] for item in result}
    for step, folder in checkpoint_folders(record.run_dir).items():
        files = _files(record.run_dir, step)
        if not files or step in there:
            continue
        result.append(
            {
                "step": step,
                "bytes": sum(file.num_bytes for file in files),
                "files": [file.path for file in files],
                "saved": max(file.changed for file in files),
                "path": str(folder),
            }
        )
    return sorted(result, key=lambda checkpoint: checkpoint["step"], reverse=True)


def _in_store(record: JobRecord, stores: Stores) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "bytes": sum(file.num_bytes for file in stored.files),
            "files": [file.name for file in stored.files],
            "saved": max(file.saved for file in stored.files),
            "path": stored.url,
        }
        for step, stored in stored_checkpoints(record, stores, tries=1).items()
    ]


def check_here(record: JobRecord, step: int, stores: Stores) -> None:
    """Raise NotFoundError for a checkpoint that is not in the run's folder on this machine."""
    if step in checkpoint_folders(record.run_dir):
        return
    stored = stored_checkpoints(record, stores, tries=1).get(step)
    if stored is not None:
        raise NotFoundError(
            f"the checkpoint of step {step} of run {record.name} is in its store: {stored.url}",
            hint="copy that from there, with any tool of the store; from the broker with "
            "`nats object get`",
        )
    raise NotFoundError(
        f"run {record.name} has no checkpoint of step {step} on this machine",
        hint="checkpoints are in the run's folder on the pool; older ones are removed "
        "(training.keep_last, training.keep_every)",
    )


def pack(run_dir: str, step: int, name: str) -> Iterator[bytes]:
    """Yield an uncompressed tar archive of a checkpoint, a chunk at a time.

    Raises OSError if a file was removed or changed meanwhile.
    """
    with Folder(run_dir) as run, run.folder(checkpoint_in(step)) as folder:
        for entry in folder.files():
            with folder.open(entry.path) as source:
                info = tarfile.TarInfo(f"{name}/{entry.path}")
                info.size, info.mtime, info.mode = entry.num_bytes, int(entry.changed), 0o644
                yield info.tobuf(tarfile.PAX_FORMAT)
                left = entry.num_bytes
                while left:
                    chunk = source.read(min(_CHUNK, left)) or bytes(min(_CHUNK, left))
                    left -= len(chunk)  # pads a file that became shorter meanwhile
                    yield chunk
            yield bytes(-entry.num_bytes % tarfile.BLOCKSIZE)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _files(run_dir: str, step: int) -> list[FolderEntry]:
    """Return the regular files of a checkpoint, by name; empty if it cannot be read."""
    try:
        with Folder(run_dir) as run, run.folder(checkpoint_in(step)) as folder:
            return list(folder.files())
    except (OSError, StorageError):
        return []
