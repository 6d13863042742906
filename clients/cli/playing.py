"""Playing a game from the command line: what `tinkermq infer` and `tinkermq env eval` share."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import ConfigError, NotFoundError
from ..inference.inference import play_served
from ..inference.play import InferenceReport, PlayOptions
from ..inference.results import EpisodeResult
from ..inference.served_job import open_served
from ..pool import Pool, is_token
from .output import literal, note, print_commands, print_json_line, print_table, say
from .session import with_pool

FAILED = 1
_TOLD_EVERY = 10
"""Parts of an inference after which its progress is told."""


@Parameter(name="*")
@dataclass(frozen=True)
class PlayFlags:
    """Which episodes are played, and how the model answers."""

    data: Annotated[
        list[Path] | None,
        Parameter(help="Parquet or JSONL files of a dataset game; default: its own."),
    ] = None
    output: Annotated[
        Path | None,
        Parameter(
            alias="-o",
            help="JSONL file of the results; started again with the same settings, it goes on "
            "with it.",
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
        """Return what is played, with what the command itself says of it."""
        given: dict[str, Any] = {
            "data_path": [str(path) for path in self.data] if self.data else None,
            "output_path": self.output,
            "tasks": read_tasks(self.tasks) if self.tasks else None,
            "max_samples": self.max_samples,
            "samples_per_task": self.samples,
            "temperature": self.temperature,
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            "seed": self.seed,
        }
        return PlayOptions(**{**given, **others})


PLAY_FLAGS = PlayFlags()
"""None is given."""


def find_served(url: str, model: str) -> tuple[JobRecord | None, dict[str, Any]]:
    """Return the serving job that a name means, if it is one, and the `env` of the run it means."""

    async def resolve(pool: Pool) -> tuple[JobRecord | None, dict[str, Any]]:
        return await resolve_served(pool, model)

    return with_pool(url, resolve)


async def resolve_served(pool: Pool, model: str) -> tuple[JobRecord | None, dict[str, Any]]:
    """Return what `find_served` does."""
    run = model.partition("@")[0]
    if not is_token(run):
        return None, {}
    try:
        record = await pool.find(run)
    except NotFoundError:
        return None, {}  # whoever serves it says what is wrong
    is_serving = record.kind == "infer" and record.state not in FINAL_STATES
    return (record if is_serving else None), dict(record.config.get("env") or {})


def play_in_pool(
    url: str, served: JobRecord | None, model: str, options: PlayOptions, *, as_json: bool
) -> InferenceReport:
    """Play with a serving job, or with `model` served for the occasion."""
    progress = Progress(as_json=as_json)
    opened = open_served(
        served.job if served else None, None, model_path=None if served else model, url=url
    )
    return asyncio.run(play_served(opened, progress.follow(options), progress.announce))


class Progress:
    """Tells how an inference goes on."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._total = self._done = self._next = 0
        self._reward = 0.0

    def follow(self, options: PlayOptions) -> PlayOptions:
        """Return the options with which this is told of each episode."""
        return replace(options, on_start=self.start, on_result=self.add)

    def announce(self, record: JobRecord) -> None:
        """Say which job plays."""
        if self._as_json:
            print_json_line({"job": record.model_dump(exclude={"config"})})
        else:
            serves = record.serves or record.config.get("model", {}).get("path")
            say(f"[bold]{record.name}[/]  (job {record.job}) serves {literal(str(serves))}")
            print_commands(
                {
                    f"tinkermq logs {record.name} -f": "what its servers write",
                    f"tinkermq stop {record.name}": "end it",
                }
            )

    def start(self, total: int, done: int) -> None:
        """Say how much there is to play."""
        self._total, self._next = total - done, 0
        if not self._as_json:
            note(f"{total} episodes" + (f", {done} of them are there already" if done else ""))

    def add(self, result: EpisodeResult) -> None:
        """Tell of one more episode, every tenth part of the way."""
        if self._as_json:
            print_json_line({"result": result.to_dict()})
            return
        self._done += 1
        self._reward += result.reward
        if self._done * _TOLD_EVERY >= self._next * max(1, self._total):
            self._next = self._done * _TOLD_EVERY // max(1, self._total) + 1
            mean = self._reward / self._done
            note(f"{self._done} of {self._total} played, mean reward {mean:.3f}")


def conclude(report: InferenceReport, output: Path | None, *, as_json: bool) -> int:
    """Print the scores of an inference, and where its results are; return the exit code."""
    if as_json:
        print_json_line({"summary": report.summary})
    else:
        _tell_report(report, output)
    return FAILED if report.failed and not report.results else 0


def _tell_report(report: InferenceReport, output: Path | None) -> None:
    summary = report.summary
    rows = score_rows(summary)
    for kind, scores in summary.get("by_type", {}).items():
        rows += [(f"{kind} {name}", text) for name, text in score_rows(scores)]
    print_table(("score", "value"), rows)
    if report.failed:
        note(f"{len(report.failed)} episodes failed; the first: {literal(_first_error(report))}")
        note(
            "the same command tries them again" if output else "--output FILE keeps what was played"
        )
    if output is not None:
        say(f"results  {output}")


def _first_error(report: InferenceReport) -> str:
    return (report.failed[0].error or "").splitlines()[0]


def score_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the scores of a summary as lines of a table, with their intervals."""
    rows = [("tasks", str(summary["tasks"])), ("episodes", str(summary["episodes"]))]
    for name in ("mean_reward", "accuracy"):
        low, high = summary[f"{name}_ci95"]
        rows.append((name, f"{summary[name]:.4f}  ({low:.4f} to {high:.4f})"))
    rows += [(key, f"{value:.4f}") for key, value in summary.items() if key.startswith("pass@")]
    return rows


def read_tasks(text: str) -> list[int]:
    """Return a list of rows or seeds: `1,5,9`, or a file with one number (or JSON object) a line.

    Raises ConfigError.
    """
    file = Path(text)
    words: Sequence[str] = text.split(",")
    if file.is_file():
        words = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return [_task(word) for word in words]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{text!r} is no list of tasks: {error}",
            hint='write 1,5,9, or a file with one number, or one {"task": 5}, a line',
        ) from error


def _task(word: str) -> int:
    value: Any = json.loads(word)
    number: Any = cast("dict[str, Any]", value)["task"] if isinstance(value, dict) else value
    return int(number)
