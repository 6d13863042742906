"""Commands that list and change runs: `tinkermq ps`, `stop`, `resume`, `fork`, `label`, `delete` ….

Imports that only one command needs are in its function: `ps` is used often and must start fast.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ...broker.feed import list_values, run_row
from ...broker.presence import list_presences
from ...schemas.job import FINAL_STATES, JobRecord, held_slots, slot_seconds
from ...schemas.metric import LOST_STEPS, Presence
from ...schemas.wire.errors import BrokerError, ConfigError, TinkermqError, did_you_mean
from ..follow import RunProgress
from ..pool import Pool
from .output import (
    duration,
    print_json,
    print_note,
    print_plain,
    print_result,
    print_table,
    print_text,
)
from .session import COMMON, Common, with_pool

_EXPLAINED = frozenset({"QUEUED", "LOST", "FAILED"})
_QUOTA_S = 2.0
_ROLES: dict[str, Literal["generator", "environment", "server"]] = {
    "servers": "server",
    "server": "server",
    "generators": "generator",
    "generator": "generator",
    "environments": "environment",
    "environment": "environment",
    "hosts": "environment",
}


def ps(
    *,
    all: Annotated[bool, Parameter(alias="-a")] = False,
    everyone: bool = False,
    archived: bool = False,
    tag: list[str] | None = None,
    group: str | None = None,
    common: Common = COMMON,
) -> int:
    """List runs: state, step, reward, validation, tokens/s, slots, age and restarts.

    If the user has a quota, the last line shows how much of it is in use.

    Parameters
    ----------
    all
        Include runs that have ended, also archived ones.
    everyone
        Runs of all users, for admins.
    archived
        Only archived runs.
    tag
        Only runs with this tag; with several, runs that have all of them.
    group
        Only runs of this group.
    """

    async def work(pool: Pool) -> tuple[list[dict[str, Any]], str]:
        listed = pool.list_all_users_jobs if everyone else pool.list_jobs
        records = await listed(all=all or archived)
        records = [
            record
            for record in records
            if (record.archived is not None or not archived)
            and set(tag or ()) <= set(record.tags)
            and group in (None, record.group)
        ]
        status_line = asyncio.create_task(_describe_pool(pool)) if not common.json else None
        rows = await asyncio.gather(*(_row(pool, record) for record in records))
        return list(rows), "" if status_line is None else await status_line

    rows, status_line = with_pool(common.nats_url, work)
    if common.json:
        print_json(rows)
        return 0
    if not rows:
        print_note("no runs" if all else "no runs; `tinkermq ps --all` also shows ended ones")
    else:
        _print_rows(rows, everyone=everyone)
    if status_line:
        print_note(status_line)
    return 0


def _print_rows(rows: Sequence[dict[str, Any]], *, everyone: bool) -> None:
    columns = ["run", "state", "step", "reward", "validation", "tokens/s", "slots", "age"]
    columns += ["restarts"]
    cells = [_cells(row) for row in rows]
    if everyone:
        columns = ["user", *columns]
        cells = [[row["user"], *line] for row, line in zip(rows, cells, strict=True)]
    print_table(columns, cells)
    for row in rows:
        if reason := _describe_reason(row):
            print_plain(f"{row['run']}: {reason}")


async def _describe_pool(pool: Pool) -> str:
    """Describe problems that block the pool, and the used part of the user's quota."""
    return "\n".join(filter(None, (await describe_trouble(pool), await _describe_quota(pool))))


async def describe_trouble(pool: Pool) -> str:
    """Describe problems that block the pool, as its scheduler reports them."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            trouble = await pool.trouble()
    except (BrokerError, TimeoutError):
        return ""  # no scheduler answers, which the line about the quota reports
    return f"the scheduler waits for {trouble}" if trouble else ""


async def _describe_quota(pool: Pool) -> str:
    """Describe the used part of the user's quota; runs are listed without a scheduler, too."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            quota = await pool.quota()
    except (BrokerError, TimeoutError):
        return await _describe_silent_scheduler(pool)
    labels = {"max_slots": "slots", "max_live_jobs": "live runs", "max_jobs": "runs in all"}
    bounds = {name: getattr(quota, name) for name in labels}
    parts = [
        f"{quota.held.get(name, 0)} of {bound} {labels[name]}"
        for name, bound in bounds.items()
        if bound is not None
    ]
    return f"{', '.join(parts)} of your quota in use" if parts else ""


async def _describe_silent_scheduler(pool: Pool) -> str:
    """Describe whether a scheduler that does not answer has a heartbeat."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            presences = [entry.value for entry in await list_presences(pool.broker, "pool")]
    except (TinkermqError, TimeoutError):
        return f"the broker does not answer within {_QUOTA_S:g} s: your quota is unknown"
    schedulers = [presence.actor for presence in presences if presence.role == "scheduler"]
    if not schedulers:
        return "no scheduler answers: your quota is unknown, and nothing is placed"
    return (
        f"{', '.join(schedulers)} is alive and has not answered within {_QUOTA_S:g} s: your quota "
        "is unknown"
    )


async def _row(pool: Pool, record: JobRecord) -> dict[str, Any]:
    """Return the row of a run, with figures from its newest metrics if the user owns it."""
    values: dict[str, float] = {}
    actors: list[Presence] = []
    if record.user == pool.broker.user:
        values = await list_values(pool.broker, record)
        if record.state not in FINAL_STATES:
            actors = [actor.value for actor in await list_presences(pool.broker, record.scope.key)]
    learner = next((actor for actor in actors if actor.role == "learner"), None)
    live = record.state not in FINAL_STATES
    return {
        "run": record.name,
        "user": record.user,
        **run_row(record, values),
        "total_steps": values.get("training/total_steps", RunProgress(record).total_steps),
        "serves": record.serves,
        "tokens_per_s": _throughput(record, values, actors) if live else None,
        "trouble": _describe_failure(record, actors) or _describe_rewound(actors) if live else "",
        "waits_for": learner.waits_for if learner is not None else "",
        "missing": _describe_missing(actors),
        "run_dir": record.run_dir,
    }


def _describe_missing(actors: Sequence[Presence]) -> str:
    """Describe an actor's wait for something outside the pool, and its duration."""
    waits = [(actor.missing_since, actor) for actor in actors if actor.missing_since is not None]
    if not waits:
        return ""
    since, first = min(waits, key=lambda wait: wait[0])
    return f"{first.actor} waits for {first.waits_for}, for {duration(time.time() - since)}"


def _describe_rewound(actors: Sequence[Presence]) -> str:
    """Describe a run whose broker's store was set back; empty: it was not."""
    lost = next((item.numbers[LOST_STEPS] for item in actors if LOST_STEPS in item.numbers), None)
    if lost is None:
        return ""
    return (
        f"the broker's store was set back and lost {lost:.0f} steps, which are trained anew (event "
        "`store_rewound`)"
    )


def _describe_failure(record: JobRecord, actors: Sequence[Presence]) -> str:
    """Describe an actor that keeps failing and has made no progress since."""
    working = {actor.actor for actor in actors if actor.progress}
    troubles = (
        actor.trouble for actor in record.actors if actor.trouble and actor.name not in working
    )
    return next(troubles, "")


def _throughput(
    record: JobRecord, values: Mapping[str, float], actors: Sequence[Presence]
) -> float | None:
    """Return tokens/s of the learner, or of the servers of an inference run."""
    if record.kind != "infer":
        return values.get("perf/throughput")
    return sum(actor.numbers.get("tokens_per_s", 0.0) for actor in actors if actor.role == "server")


def _cells(row: dict[str, Any]) -> list[str]:
    total = f"/{row['total_steps']:.0f}" if row["total_steps"] else ""
    failed = f" ({row['validation_failed']:.0f} failed)" if row["validation_failed"] else ""
    return [
        row["run"],
        row["state"],
        f"{row['step']}{total}" if row["trains"] else row["kind"],
        _number(row["reward"], ".3f"),
        _number(row["validation"], ".3f") + failed,
        _number(row["tokens_per_s"], ",.0f"),
        str(row["slots"]),
        duration(row["age_s"]),
        str(row["restarts"]),
    ]


def _describe_reason(row: dict[str, Any]) -> str:
    """Return why a run does not run or makes no progress; of a failed one, the first line."""
    if row["missing"] or row["trouble"]:
        return str(row["missing"] or row["trouble"])
    reason = row["reason"] if row["state"] in _EXPLAINED else ""
    first, *others = reason.split("\n")
    if row["state"] != "FAILED" or not others:
        return reason
    return f"{first} (`tinkermq watch {row['run']}` shows all of it)"


def _number(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def stop(run: str, /, *, now: bool = False, complete: bool = False, common: Common = COMMON) -> int:
    """Stop a run; one that trains writes a checkpoint first. It ends as CANCELLED.

    Parameters
    ----------
    run
        Name or job id.
    now
        Do not wait for a checkpoint, or for requests in flight.
    complete
        End it as COMPLETED instead.
    """
    record = _changed(common, run, lambda pool, job: pool.stop(job, now=now, complete=complete))
    if record.state in FINAL_STATES:
        text = f"{record.name} is {record.state} already"
    else:
        drains = "after a checkpoint" if record.trains else "after its open requests"
        text = f"{record.name} stops {'at once' if now else drains}"
    return _print_change(record, text, as_json=common.json)


def checkpoint(run: str, /, *, common: Common = COMMON) -> int:
    """Write a checkpoint of a run after the current step; print its folder on the pool.

    Parameters
    ----------
    run
        Name or job id.
    """

    from ...broker.calls import write_checkpoint

    async def work(pool: Pool) -> str:
        return await write_checkpoint(pool.broker, await pool.find(run))

    folder = with_pool(common.nats_url, work)
    return print_result({"folder": folder}, folder, as_json=common.json)


def pause(run: str, /, *, common: Common = COMMON) -> int:
    """Pause a run. Its actors keep their slots until `tinkermq resume`.

    Parameters
    ----------
    run
        Name or job id.
    """
    record = _changed(common, run, lambda pool, job: pool.pause(job))
    return _print_change(record, f"{record.name} is {record.state}", as_json=common.json)


def resume(run: str, /, *overrides: str, common: Common = COMMON) -> int:
    """Resume a run after a pause or from its last checkpoint. Harmless while it runs.

    Parameters
    ----------
    run
        Name or job id.
    overrides
        Changed configuration keys of a run that has ended: `training.num_steps=80`.
    """
    from ...schemas.config.load_config import read_overrides

    changes = read_overrides(overrides)
    record = with_pool(common.nats_url, lambda pool: pool.resume_run(run, changes))
    text = f"{record.name} is {record.state}"
    training: dict[str, Any] = record.config.get("training") or {}
    steps = training.get("num_steps")
    if steps is not None and record.version >= steps:
        text += f"; it has made its {steps} steps: more need training.num_steps=N"
    return _print_change(record, text, as_json=common.json)


def fork(
    source: str,
    /,
    *overrides: str,
    common: Common = COMMON,
) -> int:
    """Start a new run from a checkpoint of another one.

    Parameters
    ----------
    source
        `RUN@STEP`, or `RUN@last`.
    overrides
        Changed configuration keys: `learner.lr=1e-5`.
    """
    from ...schemas.config.load_config import read_overrides

    changes = read_overrides(overrides)
    record = with_pool(common.nats_url, lambda pool: pool.fork_run(source, changes))
    if common.json:
        print_json(record.model_dump())
    else:
        from .live import print_submitted

        print_submitted(record)
    return 0


def scale(run: str, target: str, /, *, common: Common = COMMON) -> int:
    """Change the number of generators, environment hosts or servers of a run.

    Parameters
    ----------
    run
        Name or job id.
    target
        `generators=N`, `environments=N`, or `servers=N` of an inference run.
    """
    role, count = _parse_target(target)
    record = _changed(common, run, lambda pool, job: pool.scale(job, role, count))
    return _print_change(record, f"{record.name} shall have {count} {role}(s)", as_json=common.json)


def _parse_target(target: str) -> tuple[Literal["generator", "environment", "server"], int]:
    word, separator, count = target.partition("=")
    if not separator or not count.isdigit():
        raise ConfigError(f"{target!r} is not a role and a number", hint="write it as generators=2")
    if word not in _ROLES:
        raise ConfigError(f"{word!r} cannot be scaled", hint=did_you_mean(word, _ROLES))
    return _ROLES[word], int(count)


def _changed(
    common: Common, run: str, change: Callable[[Pool, str], Awaitable[JobRecord]]
) -> JobRecord:
    """Return the record of a run after a change of its job."""

    async def work(pool: Pool) -> JobRecord:
        return await change(pool, (await pool.find(run)).job)

    return with_pool(common.nats_url, work)


def _print_change(record: JobRecord, text: str, *, as_json: bool) -> int:
    return print_result(record.model_dump(), text, as_json=as_json)


# `tinkermq priority` and `tinkermq cost`.

_HOUR_S = 3600.0


def priority(run: str, value: int, /, *, common: Common = COMMON) -> int:
    """Change the priority of a queued run. Higher ones are placed first.

    Parameters
    ----------
    run
        Name or job id.
    value
        From -10 to 10; default 0.
    """
    record = _changed(common, run, lambda pool, job: pool.priority(job, value))
    text = f"{record.name} has priority {record.priority}"
    return _print_change(record, text, as_json=common.json)


def cost(run: str | None = None, /, *, common: Common = COMMON) -> int:
    """Show the slot-hours of runs by the role of their actors.

    Parameters
    ----------
    run
        Name or job id; without one, all runs.
    """

    async def work(pool: Pool) -> list[JobRecord]:
        return await pool.list_jobs(all=True) if run is None else [await pool.find(run)]

    now = time.time()
    rows = [_cost_row(record, now) for record in with_pool(common.nats_url, work)]
    if common.json:
        print_json(rows)
    elif not rows:
        print_note("no runs")
    else:
        roles = sorted({role for row in rows for role in row["slot_hours"]})
        cells = [_cost_cells(row, roles) for row in rows]
        print_table(("run", "state", *roles, "slot-hours", "slots now"), cells)
    return 0


def _cost_row(record: JobRecord, now: float) -> dict[str, Any]:
    hours = {role: used / _HOUR_S for role, used in slot_seconds(record, now).items()}
    return {
        "run": record.name,
        "job": record.job,
        "state": record.state,
        "slot_hours": hours,
        "total": sum(hours.values()),
        "slots": sum(held_slots(record).values()),
    }


def _cost_cells(row: dict[str, Any], roles: list[str]) -> list[str]:
    used = (f"{row['slot_hours'].get(role, 0):.2f}" for role in roles)
    return [row["run"], row["state"], *used, f"{row['total']:.2f}", str(row["slots"])]


# `tinkermq label`.


def label(
    run: str,
    /,
    *,
    tag: list[str] | None = None,
    untag: list[str] | None = None,
    group: str | None = None,
    notes: str | None = None,
    common: Common = COMMON,
) -> int:
    """Change the tags, group and notes of a run, and print them.

    The configuration keys `tags`, `group` and `notes` set them at submission.

    Parameters
    ----------
    run
        Name or job id.
    tag
        Tag to add; may be given several times.
    untag
        Tag to remove; may be given several times.
    group
        New group; "" removes the run from its group.
    notes
        New notes; "" removes them.
    """

    async def work(pool: Pool) -> JobRecord:
        record = await pool.find(run)
        if not (tag or untag or group is not None or notes is not None):
            return record
        tags = changed_tags(record.tags, tag or (), untag or ()) if tag or untag else None
        return await pool.label(record.job, tags=tags, group=group, notes=notes)

    record = with_pool(common.nats_url, work)
    if common.json:
        print_json(_labels(record))
        return 0
    print_text(
        f"{record.name}  tags {', '.join(record.tags) or 'none'}; group {record.group or 'none'}"
    )
    if record.notes:
        print_plain(record.notes)
    return 0


def changed_tags(tags: Sequence[str], more: Sequence[str], fewer: Sequence[str]) -> list[str]:
    """Return tags with `more` appended, without `fewer` and without duplicates."""
    return [tag for tag in dict.fromkeys((*tags, *more)) if tag not in fewer]


def _labels(record: JobRecord) -> dict[str, Any]:
    return {
        "job": record.job,
        "name": record.name,
        "tags": record.tags,
        "group": record.group,
        "notes": record.notes,
    }


# `tinkermq archive` and `tinkermq delete`.


def delete(
    runs: list[str],
    /,
    *,
    yes: Annotated[bool, Parameter(alias="-y")] = False,
    common: Common = COMMON,
) -> int:
    """Delete runs that have ended, with all their data. This cannot be undone.

    Deletes records, streams, weights, evaluations, secrets, and run folders with checkpoints.

    Parameters
    ----------
    runs
        Names or job ids.
    yes
        Do not ask.
    """
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            f"{', '.join(runs)}: all their data would be deleted for good, and there is no "
            "terminal to ask on",
            hint="repeat it with --yes",
        )
    if not yes:
        print_note(f"{', '.join(runs)}: all their data will be deleted for good")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1

    async def work(pool: Pool) -> list[str]:
        return [(await pool.delete_run(run)).name for run in runs]

    names = with_pool(common.nats_url, work)
    return print_result({"deleted": names}, f"deleted {', '.join(names)}", as_json=common.json)


def archive(run: str, /, *, undo: bool = False, common: Common = COMMON) -> int:
    """Archive a run that has ended: move its data from the broker into its run folder.

    An archived run can still be forked, served and evaluated from its checkpoints. Only
    `tinkermq ps --archived` lists it.

    Parameters
    ----------
    run
        Name or job id.
    undo
        Restore it, so that it can be inspected and resumed.
    """

    name = with_pool(common.nats_url, lambda pool: pool.archive_run(run, undo=undo)).name
    done = "unarchived" if undo else "archived"
    return print_result({done: name}, f"{name} is {done}", as_json=common.json)
