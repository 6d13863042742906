"""A run in Python: `SchedulerClient(...).run("my-run")`, and `AsyncRun` for async code."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from ..broker.calls import new_request_id
from ..broker.feed import VALIDATION, read_metrics, read_traces
from ..broker.jetstream.kv import Bucket
from ..broker.kept_rollouts import RunRollouts
from ..broker.presence import presences
from ..envs.evaluation import Comparison, Scored, compare
from ..schemas.config.load_config import apply_override
from ..schemas.job import FINAL_STATES, LAST_STEP, JobRecord
from ..schemas.metric import EvalRecord, Event, Metric, readable
from ..schemas.profile import Profile, profile_of
from ..schemas.tinker.names import is_path
from ..schemas.wire.codec import merged
from ..schemas.wire.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
)
from ..schemas.wire.subjects import BUCKET_EVALS
from . import run_records
from .base import PoolClient, SyncTwin, listed, make_sync
from .follow import LOSS, REWARD, curve_svg, follow_run
from .pool import Pool
from .scheduler_client import job_failure
from .validation import resolve_paths, split_checkpoint_name

# Evaluate a version of a run, or a model, and compare two.

OnRecord: TypeAlias = Callable[[JobRecord], None]
"""Called with the job that evaluates, once it is submitted."""
POLL_S = 0.5
EVALUATION_DEADLINE_S = 3600.0
_log = structlog.get_logger()


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    what: str
    """What was evaluated."""
    values: dict[str, float]
    """Its figures."""
    episodes: list[Scored]
    """Its episodes; empty for a live run, which stores only the figures."""
    record: JobRecord | None = None
    """The job that evaluated; None for a live run."""


class EvaluationSettings(NamedTuple):
    """How a checkpoint is evaluated; see `tinkermq eval`."""

    overrides: tuple[str, ...] = ()
    tasks: list[int] | None = None
    data: list[Path] | None = None
    like: str | None = None

    @property
    def has_changes(self) -> bool:
        """Return whether anything differs from the run's own configuration."""
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


async def evaluate(
    pool: Pool,
    target: str,
    settings: EvaluationSettings,
    on_record: OnRecord | None = None,
) -> Evaluated:
    """Evaluate `RUN`, `RUN@STEP`, or a model folder.

    `on_record` gets the record of the job that evaluates a checkpoint or folder, and its changes.
    Raises ConfigError, NotFoundError, JobFailedError, DeadlineError.
    """
    folder = _folder(target)
    if folder is not None or is_path(target):
        record = await pool.find(_needed(settings.like))
        fork_of, config = None if folder else target, settings.config(record, folder)
        return await _evaluate_model(pool, target, config, fork_of, on_record)
    run, step = split_checkpoint_name(target)
    record = await pool.find(run)
    if step is None and record.state not in FINAL_STATES:
        if settings.has_changes:
            raise ConfigError(
                f"run {record.name} is live and is evaluated as it is configured",
                hint="name a checkpoint (RUN@STEP) to evaluate it with other settings",
            )
        what, values = await _evaluate_live(pool, record)
        return Evaluated(what, values, [])
    fork_of = f"{record.job}@{step or LAST_STEP}"
    return await _evaluate_model(pool, target, settings.config(record, None), fork_of, on_record)


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
    """Have a live run evaluate its newest version, and wait for the result."""
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
        hint=f"see what its generators, or its evaluator, do: `tinkermq watch {record.name}`",
    )


async def _newest_version(pool: Pool, record: JobRecord) -> int:
    learner = await presences(pool.broker).find(f"{record.scope.key}.learner")
    if learner is None or learner.value.version is None:
        raise NotFoundError(
            f"run {record.name} has no learner with a heartbeat yet",
            hint=f"it is of kind {record.kind} and {record.state}; only a run that trains is "
            "evaluated by its name, others by RUN@STEP or their model's folder",
        )
    return learner.value.version


async def _evaluate_model(
    pool: Pool,
    target: str,
    config: dict[str, Any],
    fork_of: str | None,
    on_record: OnRecord | None,
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
    values: dict[str, float] = {}
    episodes: list[Scored] = []
    async with aclosing(follow_run(pool, job)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                values.update(update.values)
            elif isinstance(update, Event) and update.kind == "evaluation_episodes":
                episodes += _episodes(update)
            elif isinstance(update, JobRecord):
                if update.state in FINAL_STATES - {"COMPLETED"}:
                    raise job_failure(update)
                if on_record is not None:
                    on_record(update)
    return Evaluated(job.fork_of or target, values, episodes, job)


def _episodes(event: Event) -> list[Scored]:
    names = ("tasks", "samples", "rewards", "successes", "types")
    return [Scored(*row) for row in zip(*(event.data[name] for name in names), strict=True)]


async def evaluate_both(
    pool: Pool,
    pair: tuple[str, str],
    settings: EvaluationSettings,
    on_record: OnRecord | None = None,
) -> tuple[Evaluated, Evaluated]:
    """Evaluate two versions on the same tasks; ConfigError for a live run's newest one."""
    for target in pair:
        live = _folder(target) is None and "@" not in target
        if live and (await pool.find(target)).state not in FINAL_STATES:
            raise ConfigError(
                f"{target} is live: its newest version cannot be compared task by task",
                hint="name checkpoints: RUN@STEP",
            )
    a, b = await asyncio.gather(*(evaluate(pool, target, settings, on_record) for target in pair))
    return a, b


_STEPS = 100
Numbers = dict[str, NDArray[np.float64]]
"""Values of each metric by step, NaN for steps without a value; `step` has the steps."""


class AsyncRun(PoolClient):
    """One run of a pool, for async code; see `Run`."""

    def __init__(self, name: str, broker_url: str, api_key: str | None = None) -> None:
        """Name the run; nothing is read yet."""
        super().__init__(broker_url, api_key)
        self.name = name
        self.record: JobRecord | None = None
        """The run's record, as it was last read."""

    def __repr__(self) -> str:
        state = "" if self.record is None else f", {self.record.state}"
        return f"{type(self).__name__}({self.name!r}{state})"

    async def refresh(self) -> JobRecord:
        """Read and return the run's record: state, reason, times, configuration."""
        self.record = await (await self._connected()).find(self.name)
        return self.record

    async def metrics(self, names: str | Sequence[str] | None = None) -> Numbers:
        """Return the metrics of the run as arrays by name (float64[steps]), including `step`.

        Validation has values at validated steps and NaN at the others. Raises NotFoundError
        for a run without a feed (not started, or archived), ConfigError for an unknown name.
        """
        record = await self.refresh()
        metrics = await read_metrics((await self._connected()).broker, record.scope)
        return as_numbers(metrics, names)

    async def rollouts(
        self,
        step: int | None = None,
        *,
        errors: bool = False,
        sort: Literal["log", "reward"] = "log",
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """Return episodes, newest or best first: messages, rewards by turn, versions, info.

        `step`: only episodes trained in this step; `errors`: only failed ones. Raises NotFoundError
        for a step that was not trained.
        """
        record, broker = await self.refresh(), (await self._connected()).broker
        rollouts = await RunRollouts.open(broker, record.scope, record.run_dir)
        episode_filter = run_records.EpisodeFilter(
            step, errors=errors, most=limit if sort == "log" else None
        )
        episodes = await run_records.read_episodes(
            rollouts, await run_records.read_steps(broker, record.scope, rollouts), episode_filter
        )
        if sort == "reward":
            episodes.sort(key=lambda episode: episode.reward, reverse=True)
        return [episode.fields() for episode in episodes[:limit]]

    async def logs(self, actor: str | None = None, attempt: int | None = None) -> list[str]:
        """Return the lines that the run's actors wrote, oldest first; NotFoundError."""
        record = await self.refresh()
        pool = await self._connected()
        await run_records.check_actor(pool, record, actor)
        lines: list[str] = []
        async with aclosing(run_records.read_log_lines(pool, record, follow_on=False)) as batches:
            async for batch in batches:
                if isinstance(batch, Event):
                    continue
                if actor in (None, batch.actor) and attempt in (None, batch.attempt):
                    lines += [f"{batch.actor} | {readable(line)}" for line in batch.lines]
        return lines

    async def profile(self, steps: int = _STEPS) -> Profile:
        """Return where the time of the newest steps went, as `tinkermq profile` prints it."""
        record = await self.refresh()
        return profile_of(await read_traces((await self._connected()).broker, record.scope, steps))

    async def evaluate(
        self,
        step: int | str | None = None,
        overrides: str | Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Evaluate a checkpoint (a step, `best`, `last`) or the newest version; return its scores.

        `overrides` are changed keys (`evaluation.samples=8`), `tasks` rows or seeds. Raises
        JobFailedError, NotFoundError, DeadlineError.
        """
        pool, settings = await self._connected(), _settings(overrides, tasks)
        return (await evaluate(pool, self._at(step), settings)).values

    async def compare(
        self,
        step: int | str,
        other: str,
        overrides: str | Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> Comparison:
        """Play the same tasks with a checkpoint and with `other` (`RUN@STEP`, or a folder).

        Differences are the checkpoint's minus `other`'s, with 95 % intervals.
        """
        pool, pair = await self._connected(), (other, self._at(step))
        a, b = await evaluate_both(pool, pair, _settings(overrides, tasks))
        return compare(a.episodes, b.episodes)

    def _at(self, step: int | str | None) -> str:
        return self.name if step is None else f"{self.name}@{step}"


class Run(SyncTwin[AsyncRun]):
    """One run of a pool: its metrics, episodes, logs and evaluations.

    In a notebook it is displayed with its reward curve. It has its own connection; `close` or the
    end of a `with` block closes it.
    """

    def __init__(self, name: str, broker_url: str, api_key: str | None = None) -> None:
        """Name the run; see `SchedulerClient.run`."""
        super().__init__(AsyncRun(name, broker_url, api_key))

    @property
    def name(self) -> str:
        """Name, or job id."""
        return self.aio.name

    refresh = make_sync(AsyncRun.refresh)
    metrics = make_sync(AsyncRun.metrics)

    def frame(self, names: str | Sequence[str] | None = None) -> Any:
        """Return the same as a pandas.DataFrame, indexed by step; needs pandas."""
        try:
            pandas = cast(Any, import_module("pandas"))
        except ImportError as error:
            raise ConfigError(
                "a DataFrame needs pandas, which is not installed",
                hint="`pip install pandas`, or take the arrays of `metrics()`",
            ) from error
        return pandas.DataFrame(self.metrics(names)).set_index("step")

    rollouts = make_sync(AsyncRun.rollouts)
    logs = make_sync(AsyncRun.logs)
    profile = make_sync(AsyncRun.profile)
    evaluate = make_sync(AsyncRun.evaluate)
    compare = make_sync(AsyncRun.compare)

    def _repr_html_(self) -> str:
        """Return state and reward curve for a notebook."""
        record = self.refresh()
        numbers: Numbers = {}
        if record.trains and record.started:
            with contextlib.suppress(NotFoundError):  # archived
                numbers = self.metrics()
        measure = LOSS if record.kind == "sft" else REWARD
        curves = {name: _points(numbers, name) for name in (measure, VALIDATION)}
        title = escape(f"{record.name}  {record.state}  {record.reason}")
        return f"<div><b>{title}</b><br>{curve_svg(curves)}</div>"


def as_numbers(metrics: Sequence[Metric], names: str | Sequence[str] | None = None) -> Numbers:
    """Return metrics as arrays by name, with one entry for each step that has a metric."""
    chosen = None if names is None else listed(names)
    steps = sorted({metric.step for metric in metrics})
    place = {step: at for at, step in enumerate(steps)}
    numbers: Numbers = {}
    for metric in metrics:
        for name, value in metric.values.items():
            if name not in numbers:
                numbers[name] = np.full(len(steps), np.nan)
            numbers[name][place[metric.step]] = value
    if unknown := sorted(set(chosen or ()) - numbers.keys()):
        raise ConfigError(
            f"the run has no metric {unknown[0]!r}",
            hint=f"it has {len(numbers)}, such as {', '.join(sorted(numbers)[:5])}",
        )
    names = sorted(numbers) if chosen is None else chosen
    return {"step": np.array(steps, np.float64), **{name: numbers[name] for name in names}}


def _points(numbers: Mapping[str, NDArray[np.float64]], name: str) -> list[tuple[float, float]]:
    values = numbers.get(name)
    if values is None:
        return []
    there = np.isfinite(values)
    steps: list[float] = numbers["step"][there].tolist()
    return list(zip(steps, values[there].tolist(), strict=True))


def _settings(overrides: str | Sequence[str], tasks: Sequence[int] | None) -> EvaluationSettings:
    return EvaluationSettings(tuple(listed(overrides)), None if tasks is None else list(tasks))
