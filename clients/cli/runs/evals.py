"""`tinkermq eval` and `tinkermq replay`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from ....envs.evaluation import Comparison, summarize
from ....envs.evaluation import compare as compare_versions
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConfigError, NotFoundError
from ...home import URL_VARIABLE, find_url
from ...pool import Pool
from ...runs.evaluating import Evaluated, EvaluationSettings, evaluate_both
from ...runs.evaluating import evaluate as run_evaluation
from ..options import COMMON, Common
from ..output import note, print_json, print_table, say
from ..playing import read_tasks
from ..session import with_pool

IDENTICAL, DIFFERENT = 0, 1
POLL_S = 0.5
EVALUATION_DEADLINE_S = 3600.0


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

    def chosen(*words: str) -> EvaluationSettings:
        rows = None if tasks is None else read_tasks(tasks)
        return EvaluationSettings(words, rows, data, like)

    if compare is not None:
        settings = [word for word in (target, *overrides) if word is not None]
        return _compare(compare, chosen(*settings), common)
    if target is None:
        raise ConfigError(
            "it was not said what to evaluate", hint="name a run, RUN@STEP, or a model folder"
        )
    settings = chosen(*overrides)
    told = _quiet if common.json else _tell_submitted
    done = with_pool(common.nats_url, lambda pool: run_evaluation(pool, target, settings, told))
    if common.json:
        job = {"job": done.record.job, "name": done.record.name} if done.record else {}
        print_json({"evaluated": done.what, "values": done.values, **job})
    else:
        note(f"evaluated {done.what}")
        rows = [(name, f"{value:.4g}") for name, value in done.values.items()]
        print_table(("metric", "value"), rows)
        _tell_scores(done)
    return 0


def _quiet(_: JobRecord) -> None:
    """Say nothing of the job that evaluates."""


def _tell_submitted(job: JobRecord) -> None:
    say(f"[bold green]submitted[/] [bold]{job.name}[/]  (job {job.job})")
    say(f"  tinkermq logs {job.name} -f    tinkermq stop {job.name}")


def _tell_scores(done: Evaluated) -> None:
    if not done.episodes:
        return
    summary = summarize(done.episodes)
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        say(f"{name} {summary[name]:.4f}  (95 % interval {low:.4f} to {high:.4f})")
    say(f"  tinkermq eval --compare {done.what} OTHER    compare it with another version")


def _compare(pair: tuple[str, str], settings: EvaluationSettings, common: Common) -> int:
    """Evaluate two versions on the same tasks and tell their difference."""

    told = _quiet if common.json else _tell_submitted
    a, b = with_pool(common.nats_url, lambda pool: evaluate_both(pool, pair, settings, told))
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
    module = "tinker.replay" if session else "learner.replay"
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
