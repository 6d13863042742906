"""`tinkermq sweep`."""

import asyncio
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from ....broker.feed import recent_values
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import load_config
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.wire.errors import NotFoundError
from ...home import find_url
from ...pool import Pool
from ...secrets import secrets_for, with_tracker_settings
from ...sweeps import Point, parse_space, points
from ...validation.files import refuse_missing
from ...validation.paths import resolve_paths
from ..options import COMMON, Common
from ..output import note, print_json, print_table
from ..session import with_pool
from .train import INTERRUPTED

_POLL_S = 1.0


def sweep(
    config: Path,
    /,
    *overrides: str,
    name: str,
    runs: int | None = None,
    at_once: int = 4,
    seed: int = 0,
    metric: str = "val/mean_score",
    dry_run: bool = False,
    common: Common = COMMON,
) -> int:
    """Train a run for each combination of values, some at a time, and compare what they came to.

    `learner.lr=1e-5,3e-5 seed=1,2,3` are six runs. `learner.lr=1e-6..1e-4` is a range, of which
    --runs says how many points are drawn. The runs are named NAME-000 and so on and have the group
    NAME. Ctrl-C leaves those that run; the same command goes on where it was, and makes none twice.

    Parameters
    ----------
    config
        YAML file.
    overrides
        `section.key=value`; a key with several values, or a range, varies.
    name
        Name of the group, and the beginning of the runs' names.
    runs
        Draw so many points instead of taking every combination.
    at_once
        Runs that are queued or running at the same time.
    seed
        Of what is drawn.
    metric
        What the table is sorted by, the best first.
    dry_run
        Print the points, submit nothing.
    """
    same, space = parse_space(overrides)
    chosen = points(space, runs, seed)
    configs = [_config_of(config, same, name, number, point) for number, point in enumerate(chosen)]
    if dry_run:
        _print([{"run": one.name, **point} for one, point in zip(configs, chosen, strict=True)],
               list(space), as_json=common.json)  # fmt: skip
        return 0
    url = find_url(common.nats_url)
    refuse_missing(configs[0].model_dump(), url, has_model=False)

    async def work(pool: Pool) -> list[dict[str, Any]]:
        records = await _run_all(pool, configs, max(1, at_once), quiet=common.json)
        return [
            {**await _result(pool, record, metric), **point}
            for record, point in zip(records, chosen, strict=True)
        ]

    try:
        rows = with_pool(url, work)
    except KeyboardInterrupt:
        note(f"left; what runs goes on (`tinkermq ps --group {name}`), the same command continues")
        return INTERRUPTED
    rows.sort(key=lambda row: -math.inf if row[metric] is None else row[metric], reverse=True)
    _print(rows, [*space, "state", "step", metric], as_json=common.json)
    return 0


def _config_of(file: Path, same: list[str], name: str, number: int, point: Point) -> JobConfig:
    """Return the configuration of one run; raises ConfigError for a key or value that is wrong."""
    own = [f"name={name}-{number:03d}", f"group={name}"]
    return load_config(file, [*same, *(f"{key}={value}" for key, value in point.items()), *own])


async def _run_all(
    pool: Pool, configs: list[JobConfig], at_once: int, *, quiet: bool
) -> list[JobRecord]:
    """Submit the runs, as many at a time as may be, and wait for the end of all."""
    waiting, told = list(configs), set[str]()
    records: dict[str, JobRecord] = {}
    while True:
        for job in [one.job for one in records.values() if one.state not in FINAL_STATES]:
            records[job] = await pool.get(job)
        live = sum(one.state not in FINAL_STATES for one in records.values())
        while waiting and live < at_once:
            record = await _submit(pool, waiting.pop(0))
            records[record.job] = record
            live += record.state not in FINAL_STATES
        for record in records.values():
            if record.state in FINAL_STATES and record.job not in told and not quiet:
                note(f"{record.name} {record.state}, {len(told) + 1} of {len(configs)}")
            if record.state in FINAL_STATES:
                told.add(record.job)
        if not waiting and len(told) == len(configs):
            return list(records.values())
        await asyncio.sleep(_POLL_S)


async def _submit(pool: Pool, config: JobConfig) -> JobRecord:
    """Submit a run; one that an earlier call of the same command submitted is returned."""
    given = with_tracker_settings(config.model_dump(exclude_unset=True))
    values = resolve_paths(given, pool.broker.url, has_users=pool.has_users)
    text = json.dumps(values, sort_keys=True, default=str)
    request_id = f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return await pool.submit(values, request_id=request_id, secrets=secrets_for(values))


async def _result(pool: Pool, record: JobRecord, metric: str) -> dict[str, Any]:
    values: dict[str, float] = {}
    try:
        values = await recent_values(pool.broker, record.scope)
    except NotFoundError:
        values = {}  # it failed before it had begun
    return {
        "run": record.name,
        "job": record.job,
        "state": record.state,
        "step": int(values.get("step", record.version)),
        metric: values.get(metric),
    }


def _print(rows: list[dict[str, Any]], columns: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    print_table(
        ("run", *columns), [[_shown(row[key]) for key in ("run", *columns)] for row in rows]
    )


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
