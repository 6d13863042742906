"""`tinkermq eval` and `tinkermq replay`."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from ....broker.jetstream.kv import Bucket
from ....broker.presence import presences
from ....envs.evaluation import Comparison, Scored, summarize
from ....envs.evaluation import compare as compare_versions
from ....schemas.config.load_config import apply_override, merged
from ....schemas.job import FINAL_STATES, LAST_STEP, JobRecord
from ....schemas.metric import EvalRecord, Event, Metric
from ....schemas.tinker.names import is_path
from ....schemas.wire.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
)
from ....schemas.wire.subjects import BUCKET_EVALS
from ...follow import follow_run
from ...home import URL_VARIABLE, find_url
from ...pool import Pool, new_request_id
from ...scheduler_client import failure
from ...validation.names import run_and_step
from ...validation.paths import resolve_paths
from ..options import COMMON, Common
from ..output import note, print_json, print_table, say
from ..playing import read_tasks
from ..session import with_pool

IDENTICAL, DIFFERENT = 0, 1
POLL_S = 0.5
EVALUATION_DEADLINE_S = 3600.0


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


def evaluate(
    target: str | None = None,
    /,
    *overrides: str,
    compare: tuple[str, str] | None = None,
    tasks: str | None = None,
    data: list[Path] | None = None,
    like: str | None = None,
    common: Common = COMMON,
) -> int:
    """Evaluate the newest version of a live run, or a checkpoint, on its validation set.

    A live run's own evaluator does it beside the training; a checkpoint is evaluated by a job of
    its own. With --compare two of them play the same tasks, and the difference is told with its
    95 % confidence interval.

    Parameters
    ----------
    target
        A run (its newest version, or last checkpoint when it has ended), `RUN@STEP`, or the folder
        of a model.
    overrides
        Configuration keys that differ: `evaluation.samples=8`. Only for checkpoints.
    compare
        Two checkpoints or model folders: `--compare RUN@10 RUN@80`.
    tasks
        A fixed list of rows, or seeds of a generated game: `1,5,9`, or a file with one a line.
    data
        Parquet or JSONL files to evaluate on, row by row, instead of the validation set.
    like
        For a model folder: the run whose game and configuration are used.
    """
    if compare is not None:
        settings = [word for word in (target, *overrides) if word is not None]
        return _compare(compare, _Settings(tuple(settings), tasks, data, like), common)
    if target is None:
        raise ConfigError(
            "it was not said what to evaluate", hint="name a run, RUN@STEP, or a model folder"
        )
    settings = _Settings(overrides, tasks, data, like)
    done = with_pool(common.nats_url, lambda pool: _evaluate(pool, target, settings, common))
    if common.json:
        job = {"job": done.record.job, "name": done.record.name} if done.record else {}
        print_json({"evaluated": done.what, "values": done.values, **job})
    else:
        note(f"evaluated {done.what}")
        rows = [(name, f"{value:.4g}") for name, value in done.values.items()]
        print_table(("metric", "value"), rows)
        _tell_scores(done)
    return 0


class _Settings(NamedTuple):
    """How a checkpoint is evaluated."""

    overrides: tuple[str, ...] = ()
    tasks: str | None = None
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
            config = merged(config, {"evaluation": {"tasks": read_tasks(self.tasks)}})
        for override in self.overrides:
            apply_override(config, override)
        return config


async def _evaluate(pool: Pool, target: str, settings: _Settings, common: Common) -> Evaluated:
    given = _folder(target)
    if given is not None:
        record = await pool.find(_needed(settings.like))
        return await _evaluate_model(pool, target, settings.config(record, given), None, common)
    if is_path(target):
        record = await pool.find(_needed(settings.like))
        return await _evaluate_model(pool, target, settings.config(record, None), target, common)
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
    return await _evaluate_model(pool, target, settings.config(record, None), fork_of, common)


def _folder(target: str) -> Path | None:
    return Path(target).resolve() if Path(target).is_dir() else None


def _tell_scores(done: Evaluated) -> None:
    if not done.episodes:
        return
    summary = summarize(done.episodes)
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        say(f"{name} {summary[name]:.4f}  (95 % interval {low:.4f} to {high:.4f})")
    say(f"  tinkermq eval --compare {done.what} OTHER    compare it with another version")


def _compare(pair: tuple[str, str], settings: _Settings, common: Common) -> int:
    """Evaluate two versions on the same tasks and tell their difference."""

    async def work(pool: Pool) -> list[Evaluated]:
        for target in pair:
            live = _folder(target) is None and "@" not in target
            if live and (await pool.find(target)).state not in FINAL_STATES:
                raise ConfigError(
                    f"{target} is live: its newest version cannot be compared task by task",
                    hint="name checkpoints: RUN@STEP",
                )
        working = (_evaluate(pool, target, settings, common) for target in pair)
        return list(await asyncio.gather(*working))

    a, b = with_pool(common.nats_url, work)
    result = compare_versions(a.episodes, b.episodes)
    if common.json:
        sides = {
            name: {
                "evaluated": side.what,
                "values": side.values,
                "summary": summarize(side.episodes),
            }
            for name, side in (("a", a), ("b", b))
        }
        print_json({**sides, "difference": asdict(result)})
    else:
        _tell_difference(pair, [summarize(side.episodes) for side in (a, b)], result)
    return 0


def _tell_difference(
    pair: tuple[str, str], scores: Sequence[dict[str, Any]], result: Comparison
) -> None:
    rows = [
        (
            name,
            *(f"{score[name]:.4f}" for score in scores),
            f"{difference.mean:+.4f}",
            f"{difference.low:+.4f} to {difference.high:+.4f}",
        )
        for name, difference in (("mean_reward", result.reward), ("accuracy", result.accuracy))
    ]
    print_table(("score", *pair, "difference", "95 % interval"), rows)
    say(
        f"{result.num_tasks} tasks: {pair[1]} is better on {result.better}, worse on {result.worse}"
    )
    low, high = result.reward.low, result.reward.high
    clear = low > 0 or high < 0
    say("the difference is clear" if clear else "the interval holds 0: no difference is shown")


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
    learner = await presences(pool.broker).find(f"{record.scope.key}.learner")
    if learner is None or learner.value.version is None:
        raise NotFoundError(
            f"run {record.name} has no learner that is heard of yet",
            hint=f"see what it waits for: `tinkermq watch {record.name}`",
        )
    return learner.value.version


async def _evaluate_model(
    pool: Pool, target: str, config: dict[str, Any], fork_of: str | None, common: Common
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
    if not common.json:
        say(f"[bold green]submitted[/] [bold]{job.name}[/]  (job {job.job})")
        say(f"  tinkermq logs {job.name} -f    tinkermq stop {job.name}")
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


def replay(run: str, /, *, common: Common = COMMON) -> int:
    """Train a finished run again from its rollout log and compare the weights.

    The run must have kept its log: `training.keep_rollouts=true`. Or do the session of a program
    again that was written with Tinker's SDK, on the machine that has the folder of its service.

    Parameters
    ----------
    run
        Name or job id; or the id of a session, or of one of its models.
    """
    url = find_url(common.nats_url)
    record, session = with_pool(url, partial(_found, run))
    module = "tinker.replaying" if session else "learner.replay"
    command = [sys.executable, "-m", f"tinkermq.actors.{module}"]
    command += ["--user", record.user, "--job", record.job]
    if session:
        command += ["--session", session, *(["--json"] if common.json else [])]
    process = subprocess.run(command, env={**os.environ, URL_VARIABLE: url}, check=False)
    if common.json and not session and process.returncode in (IDENTICAL, DIFFERENT):
        print_json({"run": record.name, "identical": process.returncode == IDENTICAL})
    return process.returncode


async def _found(name: str, pool: Pool) -> tuple[JobRecord, str]:
    """Return a run, or the service that has a session, and which; raises NotFoundError."""
    session = name.partition(":")[0]
    try:
        return await pool.find(name), ""
    except NotFoundError:
        for record in await pool.list_jobs(all=True):
            folder = Path(record.run_dir) / "tinker"
            if record.kind == "tinker" and any(folder.glob(f"*/{escape(session)}.train.*")):
                return record, name
        raise
