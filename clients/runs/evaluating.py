"""Evaluating a version of a run, or a model, and comparing two of them."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import structlog

from ...broker.jetstream.kv import Bucket
from ...broker.presence import presences
from ...envs.evaluation import Scored
from ...schemas.config.load_config import apply_override
from ...schemas.job import FINAL_STATES, LAST_STEP, JobRecord
from ...schemas.metric import EvalRecord, Event, Metric
from ...schemas.tinker.names import is_path
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
)
from ...schemas.wire.subjects import BUCKET_EVALS
from ..follow import follow_run
from ..pool import Pool, new_request_id
from ..scheduler_client import failure
from ..validation.names import run_and_step
from ..validation.paths import resolve_paths

Told: TypeAlias = Callable[[JobRecord], None]
"""Is told of the job that evaluates, when it is submitted."""
POLL_S = 0.5
EVALUATION_DEADLINE_S = 3600.0
_log = structlog.get_logger()


class Evaluated(NamedTuple):
    """What an evaluation came to."""

    what: str
    """What was evaluated."""
    values: dict[str, float]
    """Its figures."""
    episodes: list[Scored]
    """Its episodes; empty for a live run, whose evaluator keeps the figures only."""
    record: JobRecord | None = None
    """The job that evaluated; None for a live run."""


class EvaluationSettings(NamedTuple):
    """How a checkpoint is evaluated; see `tinkermq eval`."""

    overrides: tuple[str, ...] = ()
    tasks: list[int] | None = None
    data: list[Path] | None = None
    like: str | None = None

    @property
    def differ(self) -> bool:
        """Whether anything differs from the run's own configuration."""
        return bool(self.overrides or self.tasks or self.data)

    def config(self, record: JobRecord, folder: Path | None) -> dict[str, Any]:
        """Return the configuration of the job that evaluates a model folder, or a checkpoint."""
        config = record.settings
        if folder is not None:
            policies = cast("dict[str, str]", config.get("policies") or {})
            own = {role: str(folder / "policies" / role) for role in policies}
            config = merged(config, {"model": {"path": str(folder)}})
            if own:
                config = merged(config, {"policies": own})
        env = cast("dict[str, Any]", config.get("env") or {})
        files = [str(path) for path in self.data or []]
        if self.tasks is not None and not files:
            files = list(env.get("val_data") or env.get("train_data") or [])
        if files:
            config = merged(config, {"env": {"train_data": files}, "evaluation": {"data": "train"}})
        if self.tasks is not None:
            config = merged(config, {"evaluation": {"tasks": self.tasks}})
        for override in self.overrides:
            apply_override(config, override)
        return config


async def evaluate(pool: Pool, target: str, settings: EvaluationSettings, told: Told) -> Evaluated:
    """Evaluate `RUN`, `RUN@STEP`, or the folder of a model; `told` hears of the job that does.

    Raises ConfigError, NotFoundError, JobFailedError, DeadlineError.
    """
    given = _folder(target)
    if given is not None:
        record = await pool.find(_needed(settings.like))
        return await _evaluate_model(pool, target, settings.config(record, given), None, told)
    if is_path(target):
        record = await pool.find(_needed(settings.like))
        return await _evaluate_model(pool, target, settings.config(record, None), target, told)
    run, step = run_and_step(target)
    record = await pool.find(run)
    if step is None and record.state not in FINAL_STATES:
        if settings.differ:
            raise ConfigError(
                f"run {record.name} is live and is evaluated as it is configured",
                hint="name a checkpoint (RUN@STEP) to evaluate it with other settings",
            )
        what, values = await _evaluate_live(pool, record)
        return Evaluated(what, values, [])
    fork_of = f"{record.job}@{step or LAST_STEP}"
    return await _evaluate_model(pool, target, settings.config(record, None), fork_of, told)


def _folder(target: str) -> Path | None:
    return Path(target).resolve() if Path(target).is_dir() else None


def _needed(like: str | None) -> str:
    if like is None:
        raise ConfigError(
            "a model folder does not say on which game to evaluate it",
            hint="name a run with the game and configuration to use: --like RUN",
        )
    return like


async def _evaluate_live(pool: Pool, record: JobRecord) -> tuple[str, dict[str, float]]:
    """Ask a live run's evaluator for its newest version, and wait for the result."""
    version = await _newest_version(pool, record)
    bucket = Bucket(pool.broker, BUCKET_EVALS, EvalRecord)
    key = f"{record.scope.key}.{version}"
    try:
        await bucket.create(key, EvalRecord(version=version, step=version))
    except ConflictError:
        _log.info("evaluation_asked_before", version=version)
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
    learner = await presences(pool.broker).find(f"{record.scope.key}.learner")
    if learner is None or learner.value.version is None:
        raise NotFoundError(
            f"run {record.name} has no learner that is heard of yet",
            hint=f"see what it waits for: `tinkermq watch {record.name}`",
        )
    return learner.value.version


async def _evaluate_model(
    pool: Pool,
    target: str,
    config: dict[str, Any],
    fork_of: str | None,
    told: Told,
) -> Evaluated:
    """Submit a job of kind `eval` for a model folder or checkpoint and return its results.

    Raises NotFoundError for a checkpoint that the pool does not have, JobFailedError.
    """
    job = await pool.submit(
        resolve_paths(config, pool.broker.url, has_users=pool.has_users),
        kind="eval",
        fork_of=fork_of,
        request_id=new_request_id(),
    )
    told(job)
    values: dict[str, float] = {}
    episodes: list[Scored] = []
    async with aclosing(follow_run(pool, job)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                values.update(update.values)
            elif isinstance(update, Event) and update.kind == "evaluation_episodes":
                episodes += _episodes(update)
            elif isinstance(update, JobRecord) and update.state in FINAL_STATES - {"COMPLETED"}:
                raise failure(update)
    return Evaluated(job.fork_of or target, values, episodes, job)


def _episodes(event: Event) -> list[Scored]:
    names = ("tasks", "samples", "rewards", "successes", "types")
    return [Scored(*row) for row in zip(*(event.data[name] for name in names), strict=True)]


async def evaluate_both(
    pool: Pool,
    pair: tuple[str, str],
    settings: EvaluationSettings,
    told: Told,
) -> tuple[Evaluated, Evaluated]:
    """Evaluate two versions on the same tasks; ConfigError for a live run's newest one."""
    for target in pair:
        live = _folder(target) is None and "@" not in target
        if live and (await pool.find(target)).state not in FINAL_STATES:
            raise ConfigError(
                f"{target} is live: its newest version cannot be compared task by task",
                hint="name checkpoints: RUN@STEP",
            )
    a, b = await asyncio.gather(*(evaluate(pool, target, settings, told) for target in pair))
    return a, b
