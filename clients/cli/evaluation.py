"""`tinkermq eval`, `replay`, `verify`, and how `tinkermq infer` plays a game."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from ...envs.evaluation import Comparison, summarize
from ...envs.evaluation import compare as compare_versions
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import ConfigError, NotFoundError
from ..home import URL_VARIABLE, find_url
from ..inference.play import EpisodeResult, InferenceReport, PlayOptions
from ..inference.run_inference import open_served, play_served
from ..pool import Pool, is_token
from ..run import Evaluated, EvaluationSettings, evaluate_both
from ..run import evaluate as run_evaluation
from ..verify import RecordCheck, Verification
from ..verify import verify as verify_run
from .output import (
    literal,
    print_commands,
    print_json,
    print_json_line,
    print_note,
    print_plain,
    print_table,
    print_text,
)
from .session import COMMON, Common, with_pool

FAILED = 1
_TOLD_EVERY = 10
"""Number of times that the progress of an inference is printed."""


@Parameter(name="*")
@dataclass(frozen=True)
class PlayFlags:
    """Which episodes are played and how the model samples."""

    data: Annotated[
        list[Path] | None,
        Parameter(help="Parquet or JSONL files of a dataset game; default: its own."),
    ] = None
    output: Annotated[
        Path | None,
        Parameter(
            alias="-o",
            help="JSONL file of the results; a command with the same settings continues it.",
        ),
    ] = None
    tasks: Annotated[
        str | None,
        Parameter(
            help="A fixed list of rows, or seeds of a generated game: 1,5,9, or a file with one a "
            "line."
        ),
    ] = None
    max_samples: Annotated[
        int | None, Parameter(help="Play at most so many tasks; default: all rows.")
    ] = None
    samples: Annotated[int, Parameter(help="Episodes per task; over 1 gives pass@k.")] = 1
    temperature: Annotated[float, Parameter(help="Sampling temperature; 0 is greedy.")] = 0.0
    max_turns: Annotated[
        int | None, Parameter(help="Answers of the policy per episode; default: as configured.")
    ] = None
    max_tokens_per_turn: Annotated[int | None, Parameter(help="Tokens of one turn.")] = None
    seed: Annotated[int, Parameter(help="Seed from which those of the rows follow.")] = 0

    def options(self, **others: Any) -> PlayOptions:
        """Return the options of an inference, including those of the command itself."""
        values: dict[str, Any] = {
            "data_path": [str(path) for path in self.data] if self.data else None,
            "output_path": self.output,
            "tasks": None if self.tasks is None else read_tasks(self.tasks),
            "max_samples": self.max_samples,
            "samples_per_task": self.samples,
            "temperature": self.temperature,
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            "seed": self.seed,
        }
        return PlayOptions(**{**values, **others})


PLAY_FLAGS = PlayFlags()
"""No option is set."""


async def find_served(pool: Pool, model: str) -> tuple[JobRecord | None, dict[str, Any]]:
    """Return the serving run of this name, if there is one, and the `env` of its run."""
    run = model.partition("@")[0]
    if not is_token(run):
        return None, {}
    try:
        record = await pool.find(run)
    except NotFoundError:
        return None, {}  # its server reports the error
    is_serving = record.kind == "infer" and record.state not in FINAL_STATES
    return (record if is_serving else None), dict(record.config.get("env") or {})


def play_in_pool(
    url: str, served: JobRecord | None, model: str, options: PlayOptions, *, as_json: bool
) -> InferenceReport:
    """Play with a serving run, or serve `model` for the duration of the command."""
    progress = Progress(as_json=as_json)
    path = None if served else model
    job = served.job if served else None
    opened = open_served(job, None, model_path=path, url=url, on_queued=print_queued)
    return asyncio.run(play_served(opened, progress.follow(options), progress.announce))


def print_queued(record: JobRecord) -> None:
    """Print why a model waits for slots."""
    print_note(f"{record.name} is queued: {record.reason}")


class Progress:
    """Prints the progress of an inference."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._total = self._done = self._next = self._failed = 0
        self._reward = 0.0

    def follow(self, options: PlayOptions) -> PlayOptions:
        """Return the options with this progress as their callbacks."""
        return replace(options, on_start=self.start, on_result=self.add)

    def announce(self, record: JobRecord) -> None:
        """Print which job plays."""
        if self._as_json:
            print_json_line({"job": record.model_dump(exclude={"config"})})
        else:
            serves = record.serves or record.config.get("model", {}).get("path")
            print_text(f"[bold]{record.name}[/]  (job {record.job}) serves {literal(str(serves))}")
            print_commands(
                {
                    f"tinkermq logs {record.name} -f": "what its servers write",
                    f"tinkermq stop {record.name}": "end it",
                }
            )

    def start(self, total: int, done: int) -> None:
        """Print the number of episodes."""
        self._total, self._next = total - done, 0
        if not self._as_json:
            print_note(
                f"{total} episodes" + (f", {done} of them are there already" if done else "")
            )

    def add(self, result: EpisodeResult) -> None:
        """Count one more episode; print every tenth part of the total."""
        if self._as_json:
            print_json_line({"result": result.to_dict()})
            return
        self._done += 1
        self._failed += result.error is not None
        self._reward += result.reward if result.error is None else 0.0
        if self._done * _TOLD_EVERY >= self._next * max(1, self._total):
            self._next = self._done * _TOLD_EVERY // max(1, self._total) + 1
            text = f"{self._done} of {self._total} played"
            if played := self._done - self._failed:
                text += f", mean reward {self._reward / played:.3f}"
            print_note(text + (f", {self._failed} failed" if self._failed else ""))


def print_report(report: InferenceReport, output: Path | None, *, as_json: bool) -> int:
    """Print the scores of an inference and the path of its results; return the exit code."""
    if as_json:
        print_json_line({"summary": report.summary})
    else:
        _print_scores_of_report(report, output)
    return FAILED if report.failed and not report.results else 0


def _print_scores_of_report(report: InferenceReport, output: Path | None) -> None:
    summary = report.summary
    rows = score_rows(summary)
    for kind, scores in summary.get("by_type", {}).items():
        rows += [(f"{kind} {name}", text) for name, text in score_rows(scores)]
    if summary["episodes"]:
        print_table(("score", "value"), rows)
    if report.failed:
        first = (report.failed[0].error or "").splitlines()[0]
        print_note(f"{len(report.failed)} episodes failed; the first: {first}")
        print_note(
            "run the same command again to retry them"
            if output
            else "with --output FILE, results are kept"
        )
    if output is not None:
        print_plain(f"results  {output}")


def score_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the scores of a summary as lines of a table, with their intervals."""
    rows = [("tasks", str(summary["tasks"])), ("episodes", str(summary["episodes"]))]
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        rows.append((name, f"{summary[name]:.4f}  ({low:.4f} to {high:.4f})"))
    rows += [(key, f"{value:.4f}") for key, value in summary.items() if key.startswith("pass@")]
    return rows


def read_tasks(text: str) -> list[int]:
    """Parse rows or seeds: `1,5,9`, or a file with one number or JSON object per line.

    Raises ConfigError.
    """
    file = Path(text)
    words: Sequence[str] = text.split(",")
    if file.is_file():
        words = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        tasks = [_task(word) for word in words]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{text!r} is not a list of tasks: {error}",
            hint='write 1,5,9, or a file with one number, or one {"task": 5}, a line',
        ) from error
    if not tasks:
        raise ConfigError(f"{text!r} holds no tasks", hint="leave --tasks out to play all")
    return tasks


def _task(word: str) -> int:
    value: Any = json.loads(word)
    number: Any = cast("dict[str, Any]", value)["task"] if isinstance(value, dict) else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{word.strip()} is not an integer")
    return number


# `tinkermq eval` and `tinkermq replay`.

IDENTICAL, DIFFERENT = 0, 1


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

    A live run is evaluated by its own generators during training, a checkpoint by a separate job.
    With --compare, two versions play the same tasks, and their difference is printed with its
    95 % confidence interval.

    Parameters
    ----------
    target
        A run (its newest version, or last checkpoint when it has ended), `RUN@STEP`, or the folder
        of a model.
    overrides
        Changed configuration keys: `evaluation.samples=8`. Only for checkpoints.
    compare
        Two checkpoints or model folders: `--compare RUN@10 RUN@80`.
    tasks
        A fixed list of rows, or seeds of a generated game: `1,5,9`, or a file with one per line.
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
            "no run or model to evaluate was given", hint="name a run, RUN@STEP, or a model folder"
        )
    settings = chosen(*overrides)
    on_record = _printing(as_json=common.json)
    done = with_pool(
        common.nats_url, lambda pool: run_evaluation(pool, target, settings, on_record)
    )
    if common.json:
        job = {"job": done.record.job, "name": done.record.name} if done.record else {}
        print_json({"evaluated": done.what, "values": done.values, **job})
    else:
        print_note(f"evaluated {done.what}")
        rows = [(name, f"{value:.4g}") for name, value in done.values.items()]
        print_table(("metric", "value"), rows)
        _print_scores(done)
    return 0


def _printing(*, as_json: bool) -> Callable[[JobRecord], None]:
    """Return what prints that a job was submitted, and each reason why it waits."""
    reasons: dict[str, str] = {}

    def show(job: JobRecord) -> None:
        if job.job not in reasons and not as_json:
            print_text(f"[bold green]submitted[/] [bold]{job.name}[/]  (job {job.job})")
            print_text(f"  tinkermq logs {job.name} -f    tinkermq stop {job.name}")
        if job.state == "QUEUED" and job.reason != reasons.get(job.job, ""):
            print_queued(job)
        reasons[job.job] = job.reason

    return show


def _print_scores(done: Evaluated) -> None:
    if not done.episodes:
        return
    summary = summarize(done.episodes)
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        print_text(f"{name} {summary[name]:.4f}  (95 % interval {low:.4f} to {high:.4f})")
    print_plain(f"  tinkermq eval --compare {done.what} OTHER    compare it with another version")


def _compare(pair: tuple[str, str], settings: EvaluationSettings, common: Common) -> int:
    """Evaluate two versions on the same tasks and print their difference."""

    on_record = _printing(as_json=common.json)
    a, b = with_pool(common.nats_url, lambda pool: evaluate_both(pool, pair, settings, on_record))
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
        _print_difference(pair, [summarize(side.episodes) for side in (a, b)], result)
    return 0


def _print_difference(
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
    print_text(
        f"{result.num_tasks} tasks: {pair[1]} is better on {result.better}, worse on {result.worse}"
    )
    low, high = result.reward.low, result.reward.high
    clear = low > 0 or high < 0
    print_text(
        "the difference is clear"
        if clear
        else "the interval contains 0: the difference is not significant"
    )


def replay(run: str, /, *, common: Common = COMMON) -> int:
    """Train a finished run again from its rollout log and compare the weights.

    The run must have kept its log: `training.keep_rollouts=true`.

    Parameters
    ----------
    run
        Name or job id.
    """
    url = find_url(common.nats_url)
    record = with_pool(url, partial(Pool.find, name=run))
    code = _replay_here(url, record)
    if common.json and code in (IDENTICAL, DIFFERENT):
        print_json({"run": record.name, "identical": code == IDENTICAL})
    return code


def _replay_here(url: str, record: JobRecord) -> int:
    """Replay a run in a process of its own; return its exit code."""
    command = [sys.executable, "-P", "-m", "tinkermq.actors.learner.replay"]
    command += ["--user", record.user, "--job", record.job]
    return subprocess.run(command, env={**os.environ, URL_VARIABLE: url}, check=False).returncode


def verify(run: str, /, *, replay: bool = False, common: Common = COMMON) -> int:
    """Check from a run's stored records that each task was trained once, from fresh tokens.

    The exit status is 1 if a check fails. A run that goes on is checked so far; an archived one is
    restored for the check, without its queue of tasks. What the rollout log no longer holds is not
    checked: with `training.keep_rollouts=true` it holds all.

    Parameters
    ----------
    run
        Name or job id.
    replay
        Also train the run again from its log, here, and compare the weights (`tinkermq replay`).
    """
    url = find_url(common.nats_url)
    record, verification = with_pool(url, lambda pool: _verified(pool, run, url if replay else ""))
    is_over = record.state in FINAL_STATES
    if common.json:
        checks = [check.fields() for check in verification.checks.values()]
        print_json({"run": record.name, "so_far": not is_over, "checks": checks})
    else:
        _print_checks(verification)
        so_far = "" if is_over else " so far: the run goes on"
        print_plain(f"{record.name} {'is verified' if verification.passed else 'fails'}{so_far}")
    return 0 if verification.passed else FAILED


async def _verified(pool: Pool, name: str, replay_at: str) -> tuple[JobRecord, Verification]:
    """Verify a run; also replay it if the URL of its broker is given."""
    record = await pool.find(name)
    if record.archived is not None:
        await pool.archive_run(record.job, undo=True)
        try:
            return await _verified(pool, record.job, replay_at)
        finally:
            await pool.archive_run(record.job)
    verification = await verify_run(pool.broker, record)
    if replay_at:
        check = verification.checks["replay"] = RecordCheck("replay", seen="weights compared")
        code = await asyncio.to_thread(_replay_here, replay_at, record)
        if code == DIFFERENT:
            check.wrong("the weights differ from those of the newest checkpoint")
        elif code != IDENTICAL:
            check.wrong(f"the replay ended with exit code {code}; its error is printed above")
    return record, verification


def _print_checks(verification: Verification) -> None:
    checks = verification.checks
    rows = [(name, check.result, check.seen) for name, check in checks.items()]
    print_table(("check", "result", "seen"), rows)
    for name, check in checks.items():
        for problem in check.problems:
            print_plain(f"{name}: {problem}")
        if check.num_problems > len(check.problems):
            print_plain(f"{name}: {check.num_problems - len(check.problems)} more")
