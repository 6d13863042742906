"""`tinkermq sweep`."""

import asyncio
import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from ...broker.feed import VALIDATION, ValidationScore, recent_values, whole_means
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import load_config
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import ConfigError, NotFoundError
from ..home import find_url
from ..pool import Pool, secrets_for, with_tracker_settings
from ..validation import resolve_paths
from .dry_run import check_first
from .evaluation import print_queued
from .output import print_json, print_note, print_table
from .session import COMMON, Common, with_pool
from .train import INTERRUPTED

# The points of a sweep: all combinations of values, or random ones. Pure.

MAX_RUNS = 1000
_LOG_RATIO = 10.0
_RANGE = re.compile(r"(-?[0-9][0-9.eE+-]*)\.\.(-?[0-9][0-9.eE+-]*)")
_OPEN, _CLOSE = "[{", "]}"

Point = Mapping[str, str]
"""Value of each key that varies, in the form of an override."""


class NumberRange(NamedTuple):
    """Numbers from low to high, drawn uniformly; log-uniformly if their ratio is at least 10."""

    low: float
    high: float
    whole: bool

    def draw(self, chance: float) -> str:
        """Return the number at a share from 0 to 1 of the way."""
        if self.low > 0 and self.high / self.low >= _LOG_RATIO:
            value = self.low * math.exp(chance * math.log(self.high / self.low))
        else:
            value = self.low + chance * (self.high - self.low)
        return str(round(value)) if self.whole else f"{value:.6g}"


def parse_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str] | NumberRange]]:
    """Return the overrides that all runs share, and the keys that vary.

    `learner.lr=1e-5,1e-4` are values, `learner.lr=1e-6..1e-4` is a range. Raises ConfigError.
    """
    same: list[str] = []
    space: dict[str, list[str] | NumberRange] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        values, span = _split(text), _RANGE.fullmatch(text.strip())
        if separator and span is not None:
            space[key.strip()] = _span(override, *span.groups())
        elif separator and len(values) > 1:
            space[key.strip()] = values
        else:
            same.append(override)
    return same, space


def list_points(
    space: Mapping[str, list[str] | NumberRange], runs: int | None, seed: int
) -> list[Point]:
    """Return every combination of the values, or `runs` drawn ones; the same for the same `seed`.

    Raises ConfigError for a range without `runs`, and for too many.
    """
    if not space:
        raise ConfigError(
            "nothing varies", hint="give a key several values: learner.lr=1e-5,3e-5 seed=1,2,3"
        )
    if runs is None:
        lists = {
            key: values for key, values in space.items() if not isinstance(values, NumberRange)
        }
        if len(lists) < len(space):
            ranged = next(key for key in space if key not in lists)
            raise ConfigError(
                f"{ranged} is a range, which needs a number of runs",
                hint="add --runs 20: points are drawn",
            )
        _refuse_too_many(math.prod(len(values) for values in lists.values()))
        return [
            dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
        ]
    _refuse_too_many(runs)
    return [
        {key: _draw_points(values, key, seed, n) for key, values in space.items()}
        for n in range(runs)
    ]


def _draw_points(values: list[str] | NumberRange, key: str, seed: int, number: int) -> str:
    draw = random.Random(f"{seed} {number} {key}")  # noqa: S311  no secret
    return values.draw(draw.random()) if isinstance(values, NumberRange) else draw.choice(values)


def _refuse_too_many(count: int) -> None:
    if not 1 <= count <= MAX_RUNS:
        raise ConfigError(
            f"a sweep has from 1 to {MAX_RUNS:,} runs, not {count:,}",
            hint="vary fewer values, or draw points: --runs 50",
        )


def _span(override: str, low: str, high: str) -> NumberRange:
    try:
        span = NumberRange(float(low), float(high), low.lstrip("-").isdigit() and high.isdigit())
    except ValueError as error:
        raise ConfigError(f"{override!r} is not a range", hint="write it as 1e-6..1e-4") from error
    if not span.low < span.high:
        raise ConfigError(
            f"{override!r} ends before it begins", hint="write the smaller number first"
        )
    return span


def _split(text: str) -> list[str]:
    """Split a text at its commas, except those within brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


_POLL_S = 1.0


def sweep(
    config: Path,
    /,
    *overrides: str,
    name: str,
    runs: int | None = None,
    at_once: Annotated[int, Parameter(validator=Number(gte=1))] = 4,
    seed: int = 0,
    metric: str = VALIDATION,
    dry_run: bool = False,
    common: Common = COMMON,
) -> int:
    """Train a run for each combination of values, some at a time, and compare the results.

    `learner.lr=1e-5,3e-5 seed=1,2,3` are six runs. `learner.lr=1e-6..1e-4` is a range, from which
    --runs points are drawn. The runs are named NAME-000 and so on, in the group NAME. Ctrl-C
    leaves them running; the same command continues the sweep and submits no run twice.

    Parameters
    ----------
    config
        YAML file.
    overrides
        `section.key=value`; a key with several values, or a range, varies.
    name
        Name of the group, and prefix of the runs' names.
    runs
        Number of points to draw instead of taking every combination.
    at_once
        Most runs that are queued or running at once.
    seed
        Seed of the drawn points.
    metric
        Metric that sorts the table, best first.
    dry_run
        Print the points without submitting.
    """
    same, space = parse_space(overrides)
    chosen = list_points(space, runs, seed)
    configs = [_config_of(config, same, name, number, point) for number, point in enumerate(chosen)]
    if dry_run:
        _print([{"run": job.name, **point} for job, point in zip(configs, chosen, strict=True)],
               list(space), as_json=common.json)  # fmt: skip
        return 0
    url = find_url(common.nats_url)
    check_first(configs[0], url, quiet=common.json)

    async def work(pool: Pool) -> list[dict[str, Any]]:
        records = await _run_all(pool, configs, at_once, quiet=common.json)
        return [
            {**await _result(pool, record, metric), **point}
            for record, point in zip(records, chosen, strict=True)
        ]

    try:
        rows = with_pool(url, work)
    except KeyboardInterrupt:
        print_note(
            f"detached; the runs continue (`tinkermq ps --group {name}`), and the same command "
            "continues the sweep"
        )
        return INTERRUPTED
    columns = [*space, "state", "step", metric]
    if metric == VALIDATION and any(row["failed_episodes"] for row in rows):
        columns.append("failed_episodes")
    _print(_ranked(rows, metric), columns, as_json=common.json)
    return 0


def _ranked(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Sort the rows, best first; failed episodes of a validation count as the worst of all runs."""
    values = {row["run"]: row[metric] for row in rows if row[metric] is not None}
    if metric == VALIDATION:
        scores = {row["run"]: row["score"] for row in rows if row["score"] is not None}
        values |= whole_means(scores)
    best = sorted(rows, key=lambda row: values.get(row["run"], -math.inf), reverse=True)
    return [{key: value for key, value in row.items() if key != "score"} for row in best]


def _config_of(file: Path, same: list[str], name: str, number: int, point: Point) -> JobConfig:
    """Return the configuration of one run; raises ConfigError for a wrong key or value."""
    own = [f"name={name}-{number:03d}", f"group={name}"]
    return load_config(file, [*same, *(f"{key}={value}" for key, value in point.items()), *own])


async def _run_all(
    pool: Pool, configs: list[JobConfig], at_once: int, *, quiet: bool
) -> list[JobRecord]:
    """Submit the runs, at most `at_once` at a time, and wait until all have ended."""
    waiting, announced, queued = list(configs), set[str](), set[str]()
    records: dict[str, JobRecord] = {}
    while True:
        for job in [record.job for record in records.values() if record.state not in FINAL_STATES]:
            records[job] = await pool.get(job)
        live = sum(record.state not in FINAL_STATES for record in records.values())
        while waiting and live < at_once:
            record = await _submit(pool, waiting.pop(0))
            records[record.job] = record
            live += record.state not in FINAL_STATES
        for record in records.values():
            if record.state in FINAL_STATES and record.job not in announced and not quiet:
                print_note(f"{record.name} {record.state}, {len(announced) + 1} of {len(configs)}")
            if record.state in FINAL_STATES:
                announced.add(record.job)
            elif record.state == "QUEUED" and record.reason and record.job not in queued:
                queued.add(record.job)
                print_queued(record)
        if not waiting and len(announced) == len(configs):
            return list(records.values())
        await asyncio.sleep(_POLL_S)


async def _submit(pool: Pool, config: JobConfig) -> JobRecord:
    """Submit a run, or return the one that an earlier call of the same command submitted."""
    values = with_tracker_settings(config.model_dump(exclude_unset=True))
    values = resolve_paths(values, pool.broker.url, has_users=pool.has_users)
    text = json.dumps(values, sort_keys=True, default=str)
    request_id = f"sweep-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return await pool.submit(values, request_id=request_id, secrets=secrets_for(values))


async def _result(pool: Pool, record: JobRecord, metric: str) -> dict[str, Any]:
    values: dict[str, float] = {}
    try:
        values = await recent_values(pool.broker, record.scope)
    except NotFoundError:
        values = {}  # it failed before it started
    return {
        "run": record.name,
        "job": record.job,
        "state": record.state,
        "step": int(values.get("step", record.version)),
        metric: values.get(metric),
        "failed_episodes": int(values.get("val/failed_episodes", 0.0)),
        "score": ValidationScore.of(values),
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
