"""`tinkermq ps`, `stop`, `checkpoint`, `pause`, `resume`, `fork` and `scale`.

What one of them alone needs is imported there: `ps` is typed often, and should answer at once.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ....broker.feed import recent_values, run_row
from ....broker.presence import list_presences
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.metric import Presence
from ....schemas.wire.errors import BrokerError, ConfigError, NotFoundError, TinkermqError
from ...pool import Pool
from ...progress import RunProgress
from ...validation.names import did_you_mean
from ..options import COMMON, Common
from ..output import duration, note, print_json, print_table, say, say_plain
from ..session import with_pool

_EXPLAINED = frozenset({"QUEUED", "LOST", "FAILED"})
_WHY_CHARACTERS = 72
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

    Where the user has a quota, the last line tells how many slots of it are held.

    Parameters
    ----------
    all
        Also runs that have ended, archived ones included.
    everyone
        Those of all users, for admins.
    archived
        Those that were archived, and no others.
    tag
        Only those with this tag; of several tags, with all of them.
    group
        Only those of this group.
    """

    async def work(pool: Pool) -> tuple[list[dict[str, Any]], str]:
        listed = pool.everybodys_jobs if everyone else pool.list_jobs
        records = await listed(all=all or archived)
        records = [
            one
            for one in records
            if (one.archived is not None or not archived)
            and set(tag or ()) <= set(one.tags)
            and group in (None, one.group)
        ]
        told = asyncio.create_task(_told(pool)) if not common.json else None
        rows = await asyncio.gather(*(_row(pool, record) for record in records))
        return list(rows), "" if told is None else await told

    rows, told = with_pool(common.nats_url, work)
    if common.json:
        print_json(rows)
        return 0
    if not rows:
        note("no runs" if all else "no runs; `tinkermq ps --all` shows those that have ended")
    else:
        _print_rows(rows, everyone=everyone)
    if told:
        note(told)
    return 0


def _print_rows(rows: Sequence[dict[str, Any]], *, everyone: bool) -> None:
    columns = ["run", "state", "step", "reward", "validation", "tokens/s", "slots", "age"]
    columns += ["restarts"]
    cells = [_cells(row) for row in rows]
    if everyone:
        columns = ["user", *columns]
        cells = [[row["user"], *line] for row, line in zip(rows, cells, strict=True)]
    if any(_why(row) for row in rows):
        columns = [*columns, "why"]
        cells = [[*line, _why(row)] for row, line in zip(rows, cells, strict=True)]
    print_table(columns, cells)


async def _told(pool: Pool) -> str:
    """Say what keeps the pool from going on, and what of the user's quota is held."""
    return "\n".join(one for one in (await trouble_of(pool), await _quota(pool)) if one)


async def trouble_of(pool: Pool) -> str:
    """Say what keeps the pool from going on, as its scheduler sees it."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            trouble = await pool.trouble()
    except (BrokerError, TimeoutError):
        return ""  # no scheduler answers: the quota's line says so
    return f"the broker is in trouble: {trouble}" if trouble else ""


async def _quota(pool: Pool) -> str:
    """Say what of the user's quota is held; runs are told of without a scheduler, too."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            quota = await pool.quota()
    except (BrokerError, TimeoutError):
        return await _silent_scheduler(pool)
    shown = {"max_slots": "slots", "max_live_jobs": "live runs", "max_jobs": "runs in all"}
    bounds = {name: getattr(quota, name) for name in shown}
    told = [
        f"{quota.held.get(name, 0)} of {most} {shown[name]}"
        for name, most in bounds.items()
        if most is not None
    ]
    return f"{', '.join(told)} of your quota are held" if told else ""


async def _silent_scheduler(pool: Pool) -> str:
    """Say of a scheduler that does not answer whether there is one, which its heartbeat tells."""
    try:
        async with asyncio.timeout(_QUOTA_S):
            heard = [entry.value for entry in await list_presences(pool.broker, "pool")]
    except (TinkermqError, TimeoutError):
        return f"the broker does not answer within {_QUOTA_S:g} s: your quota is unknown"
    there = [one.actor for one in heard if one.role == "scheduler"]
    if not there:
        return "no scheduler answers: your quota is unknown, and nothing is placed"
    return (
        f"{', '.join(there)} lives and has not answered within {_QUOTA_S:g} s: your quota is "
        "unknown"
    )


async def _row(pool: Pool, record: JobRecord) -> dict[str, Any]:
    """Return what is known of a run, its figures from its newest metrics if it is the user's."""
    values: dict[str, float] = {}
    actors: list[Presence] = []
    if record.user == pool.broker.user:
        with contextlib.suppress(NotFoundError):  # its streams were removed
            values = await recent_values(pool.broker, record.scope)
        if record.state not in FINAL_STATES:
            actors = [one.value for one in await list_presences(pool.broker, record.scope.key)]
    learner = next((one for one in actors if one.role == "learner"), None)
    live = record.state not in FINAL_STATES
    return {
        "run": record.name,
        "user": record.user,
        **run_row(record, values),
        "total_steps": values.get("training/total_steps", RunProgress(record).total_steps),
        "serves": record.serves,
        "tokens_per_s": _throughput(record, values, actors) if live else None,
        "trouble": _trouble(record, actors) if live else "",
        "waits_for": learner.waits_for if learner is not None else "",
        "missing": _missing(actors),
        "run_dir": record.run_dir,
    }


def _missing(actors: Sequence[Presence]) -> str:
    """Say what is not there that somebody outside must bring, and since when."""
    waits = [(one.missing_since, one) for one in actors if one.missing_since is not None]
    if not waits:
        return ""
    since, first = min(waits, key=lambda wait: wait[0])
    return f"{first.actor} waits for {first.waits_for}, for {duration(time.time() - since)}"


def _trouble(record: JobRecord, actors: Sequence[Presence]) -> str:
    """Say which actor fails again and again, unless it has done some work by now."""
    working = {one.actor for one in actors if one.progress}
    told = (one.trouble for one in record.actors if one.trouble and one.name not in working)
    return next(told, "")


def _throughput(
    record: JobRecord, values: Mapping[str, float], actors: Sequence[Presence]
) -> float | None:
    """Return tokens/s: the learner's figure, or what the servers of an inference job generate."""
    if record.kind != "infer":
        return values.get("perf/throughput")
    return sum(one.numbers.get("tokens_per_s", 0.0) for one in actors if one.role == "server")


def _cells(row: dict[str, Any]) -> list[str]:
    total = f"/{row['total_steps']:.0f}" if row["total_steps"] else ""
    return [
        row["run"],
        row["state"],
        f"{row['step']}{total}" if row["trains"] else row["kind"],
        _number(row["reward"], ".3f"),
        _number(row["validation"], ".3f"),
        _number(row["tokens_per_s"], ",.0f"),
        str(row["slots"]),
        duration(row["age_s"]),
        str(row["restarts"]),
    ]


def _why(row: dict[str, Any]) -> str:
    """Say in a line why a run does not run, or does not get on."""
    if row["missing"]:
        return str(row["missing"])
    if row["trouble"]:
        return str(row["trouble"])[:_WHY_CHARACTERS]
    first = row["reason"].splitlines()[0] if row["reason"] else ""
    return first[:_WHY_CHARACTERS] if row["state"] in _EXPLAINED else ""


def _number(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def stop(run: str, /, *, now: bool = False, complete: bool = False, common: Common = COMMON) -> int:
    """Stop a run; one that trains writes a checkpoint first. It ends as CANCELLED.

    Parameters
    ----------
    run
        Name or job id.
    now
        Do not wait for a checkpoint, or for answers that are being made.
    complete
        Let it end as COMPLETED: what it has learned is enough.
    """
    record = with_pool(
        common.nats_url,
        _on_run(run, lambda pool, job: pool.stop(job, now=now, complete=complete)),
    )
    if record.state in FINAL_STATES:
        told = f"{record.name} is {record.state} already"
    else:
        drains = "after a checkpoint" if record.trains else "once it has answered what it was asked"
        told = f"{record.name} stops {'at once' if now else drains}"
    return _tell(record, told, as_json=common.json)


def checkpoint(run: str, /, *, common: Common = COMMON) -> int:
    """Have a run write a checkpoint now, between two steps; prints its folder on the pool.

    Parameters
    ----------
    run
        Name or job id.
    """

    from ....broker.calls import write_checkpoint

    async def work(pool: Pool) -> str:
        return await write_checkpoint(pool.broker, await pool.find(run))

    folder = with_pool(common.nats_url, work)
    if common.json:
        print_json({"folder": folder})
    else:
        say_plain(folder)
    return 0


def pause(run: str, /, *, common: Common = COMMON) -> int:
    """Let a run stand still; its actors keep their slots, and `resume` lets it go on.

    Parameters
    ----------
    run
        Name or job id.
    """
    record = with_pool(common.nats_url, _on_run(run, lambda pool, job: pool.pause(job)))
    return _tell(record, f"{record.name} is {record.state}", as_json=common.json)


def resume(run: str, /, *overrides: str, common: Common = COMMON) -> int:
    """Let a run go on: after a pause, or from its last checkpoint; harmless while it runs.

    Parameters
    ----------
    run
        Name or job id.
    overrides
        Of a run that has ended: keys that differ from now on: `training.num_steps=80`.
    """
    changes = _tree(overrides)
    record = with_pool(common.nats_url, lambda pool: pool.resume_run(run, changes))
    return _tell(record, f"{record.name} is {record.state}", as_json=common.json)


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
        Configuration keys that differ: `learner.lr=1e-5`.
    """
    changes = _tree(overrides)
    record = with_pool(common.nats_url, lambda pool: pool.fork_run(source, changes))
    if common.json:
        print_json(record.model_dump())
    else:
        from .live import announce

        announce(record)
    return 0


def scale(run: str, target: str, /, *, common: Common = COMMON) -> int:
    """Change how many generators, environment hosts or servers a running run has.

    Parameters
    ----------
    run
        Name or job id.
    target
        `generators=N`, `environments=N`, or `servers=N` of an inference job.
    """
    role, count = _parse_target(target)
    record = with_pool(
        common.nats_url, _on_run(run, lambda pool, job: pool.scale(job, role, count))
    )
    return _tell(record, f"{record.name} shall have {count} {role}(s)", as_json=common.json)


def _parse_target(target: str) -> tuple[Literal["generator", "environment", "server"], int]:
    word, separator, count = target.partition("=")
    if not separator or not count.isdigit():
        raise ConfigError(
            f"{target!r} does not say how many of what", hint="write it as generators=2"
        )
    if word not in _ROLES:
        raise ConfigError(f"{word!r} cannot be scaled", hint=did_you_mean(word, _ROLES))
    return _ROLES[word], int(count)


def _tree(overrides: Sequence[str]) -> dict[str, Any]:
    from ....schemas.config.load_config import apply_override

    changes: dict[str, Any] = {}
    for override in overrides:
        apply_override(changes, override)
    return changes


def _on_run(
    run: str, change: Callable[[Pool, str], Awaitable[JobRecord]]
) -> Callable[[Pool], Awaitable[JobRecord]]:
    async def work(pool: Pool) -> JobRecord:
        record = await pool.find(run)
        return await change(pool, record.job)

    return work


def _tell(record: JobRecord, text: str, *, as_json: bool) -> int:
    if as_json:
        print_json(record.model_dump())
    else:
        say(text)
    return 0
