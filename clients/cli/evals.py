"""`tinkermq eval` and `tinkermq replay`."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ...broker.kv import Bucket
from ...schemas.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
)
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.load_config import apply_override
from ...schemas.metric import EvalRecord, Metric, Presence
from ...schemas.subjects import BUCKET_ACTORS, BUCKET_EVALS
from ..follow import follow_run
from ..home import URL_VARIABLE, find_url
from ..opentinker_keys import merged
from ..paths import resolve_paths
from ..pool import Pool, new_request_id
from ..scheduler_client import failure
from .options import COMMON, Common
from .output import note, print_json, print_table
from .session import with_pool

IDENTICAL, DIFFERENT = 0, 1
POLL_S = 0.5
EVALUATION_DEADLINE_S = 3600.0


def evaluate(
    target: str,
    /,
    *overrides: str,
    like: str | None = None,
    common: Common = COMMON,
) -> int:
    """Evaluate the newest version of a live run, or a checkpoint, on its validation set.

    A live run's own evaluator does it beside the training; a checkpoint is evaluated by a job of
    its own.

    Parameters
    ----------
    target
        A run (its newest version, or last checkpoint when it has ended), `RUN@STEP`, or the folder
        of a model.
    overrides
        Configuration keys that differ: `evaluation.samples=8`. Only for checkpoints.
    like
        For a model folder: the run whose game and configuration are used.
    """
    given = Path(target).resolve() if Path(target).is_dir() else None

    async def work(pool: Pool) -> tuple[str, dict[str, float]]:
        if given is not None:
            record = await pool.find(_needed(like))
            return target, await _evaluate_folder(pool, record, given, overrides)
        run, _, step = target.partition("@")
        record = await pool.find(run)
        if not step and record.state not in FINAL_STATES:
            if overrides:
                raise ConfigError(
                    f"run {record.name} is live and is evaluated as it is configured",
                    hint="name a checkpoint (RUN@STEP) to evaluate it with other settings",
                )
            return await _evaluate_live(pool, record)
        folder = _checkpoint(record, step)
        return str(folder), await _evaluate_folder(pool, record, folder, overrides)

    what, values = with_pool(common.nats_url, work)
    if common.json:
        print_json({"evaluated": what, "values": values})
    else:
        note(f"evaluated {what}")
        print_table(("metric", "value"), [(name, f"{value:.4g}") for name, value in values.items()])
    return 0


def _needed(like: str | None) -> str:
    if like is None:
        raise ConfigError(
            "a model folder does not say on which game to evaluate it",
            hint="name a run with the game and configuration to use: --like RUN",
        )
    return like


def _checkpoint(record: JobRecord, step: str) -> Path:
    """Return the folder of a run's checkpoint, of the last one if no step is given."""
    folder = Path(record.run_dir) / "checkpoints"
    found = sorted(folder.glob("step_*"))
    if step:
        if not step.isdigit():
            raise ConfigError(f"{step!r} is no step", hint="write RUN@STEP, such as my-run@40")
        found = [one for one in found if one.name == f"step_{int(step):06d}"]
    if not found:
        which = f"of step {step}" if step else "yet"
        raise NotFoundError(
            f"run {record.name} has no checkpoint {which} in {folder}",
            hint=f"see which there are: ls {folder}",
        )
    return found[-1]


async def _evaluate_live(pool: Pool, record: JobRecord) -> tuple[str, dict[str, float]]:
    """Ask a live run's evaluator for its newest version, and wait for the result."""
    version = await _newest_version(pool, record)
    bucket = Bucket(pool.broker, BUCKET_EVALS, EvalRecord)
    key = f"{pool.scope(record).key}.{version}"
    try:
        await bucket.create(key, EvalRecord(version=version, step=version))
    except ConflictError:
        note(f"version {version} was asked for before")
    deadline = time.monotonic() + EVALUATION_DEADLINE_S
    while time.monotonic() < deadline:
        entry = await bucket.get(key)
        if entry is not None and entry.value.state in ("done", "reported"):
            return f"{record.name}@{version}", entry.value.values
        if entry is not None and entry.value.state in ("failed", "given_up"):
            raise JobFailedError(f"the evaluation of version {version} failed: {entry.value.blame}")
        await asyncio.sleep(POLL_S)
    raise DeadlineError(
        f"version {version} of {record.name} was not evaluated within "
        f"{EVALUATION_DEADLINE_S:.0f} s",
        hint=f"see whether its evaluator runs: `tinkermq logs {record.name} --actor evaluator-0`",
    )


async def _newest_version(pool: Pool, record: JobRecord) -> int:
    actors = Bucket(pool.broker, BUCKET_ACTORS, Presence)
    learner = await actors.get(f"{pool.scope(record).key}.learner")
    if learner is None or learner.value.version is None:
        raise NotFoundError(
            f"run {record.name} has no learner that is heard of yet",
            hint=f"see what it waits for: `tinkermq watch {record.name}`",
        )
    return learner.value.version


async def _evaluate_folder(
    pool: Pool, record: JobRecord, folder: Path, overrides: tuple[str, ...]
) -> dict[str, float]:
    """Submit a job of kind `eval` for a model folder and return its results.

    Raises JobFailedError.
    """
    config: dict[str, Any] = {k: v for k, v in record.config.items() if k != "name"}
    config = merged(config, {"model": {"path": str(folder)}})
    for override in overrides:
        apply_override(config, override)
    job = await pool.submit(
        resolve_paths(config, pool.broker.url), kind="eval", request_id=new_request_id()
    )
    values: dict[str, float] = {}
    async with aclosing(follow_run(pool, job)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                values.update(update.values)
            elif isinstance(update, JobRecord) and update.state in FINAL_STATES - {"COMPLETED"}:
                raise failure(update)
    return values


def replay(run: str, /, *, common: Common = COMMON) -> int:
    """Train a finished run again from its rollout log and compare the weights.

    The run must have kept its log: `training.keep_rollouts=true`.

    Parameters
    ----------
    run
        Name or job id.
    """
    url = find_url(common.nats_url)

    async def work(pool: Pool) -> JobRecord:
        return await pool.find(run)

    record = with_pool(url, work)
    command = [sys.executable, "-m", "tinkermq.actors.learner.replay"]
    command += ["--user", record.user, "--job", record.job]
    process = subprocess.run(command, env={**os.environ, URL_VARIABLE: url}, check=False)
    if common.json and process.returncode in (IDENTICAL, DIFFERENT):
        print_json({"run": record.name, "identical": process.returncode == IDENTICAL})
    return process.returncode
