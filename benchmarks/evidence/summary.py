"""The tables of docs/results.md: every result in results/, for better or worse.

Each experiment names the commit that added its results, so a table can be made anywhere.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from benchmarks.evidence.cells import RESULTS, Result, Results

_TINY = "Qwen3, 0.4 M weights"
_TWO_CORES = "two CPU cores"
_BARS = "▁▂▃▄▅▆▇█"
_NO_GAIN = 0.02


@dataclass(frozen=True)
class Experiment:
    """What stands beside the results of an experiment."""

    title: str
    shows: str
    """What it shows, for or against."""
    commit: str
    date: str
    model: str = _TINY
    machine: str = "one CPU core"
    command: str = ""
    """Module in benchmarks.evidence; empty: named like its results."""


EXPERIMENTS = {
    "staleness": Experiment(
        "Staleness and corrections",
        "up to two versions cost nothing visible with a correction; without one, training degrades "
        "from one or two versions on, and guess ends below its start from four on",
        "9f51f4b6",
        "2026-11-24",
    ),
    "equivalence": Experiment(
        "Equivalence over twenty seeds",
        "`tis` at a lag of 4 is within 0.03 of no lag in two games of three, not in guess",
        "f26250dd",
        "2026-11-25",
    ),
    "language_model": Experiment(
        "A language model",
        "at a lag of 4 `tis` recovers about half of what is lost without it; LoRA at ten times the "
        "rate learns more slowly",
        "f0b3ce70",
        "2026-11-26",
        "SmolLM2-135M-Instruct",
        "one H200, twelve processes",
    ),
    "sanity": Experiment(
        "Sanity test: prompts that the model solves at times",
        "32 sums that had 3 to 7 right answers of 16, and nothing else, are trained. The seeds "
        "reach 95, 92 and 92 % by step 20 and do not rise from there, where "
        "[arXiv 2510.26788](https://arxiv.org/abs/2510.26788) asks for nearly 100 %. But of fresh "
        "answers 13 % were right before, and it takes prompts that are solved in 20 to 80 %",
        "fb67fe52",
        "2026-11-29",
        "SmolLM2-135M-Instruct",
    ),
    "choices": Experiment(
        "Advantages, losses, LoRA",
        "few choices differ from the default by more than the seeds do, and some are worse; LoRA "
        "is slower",
        "e7131350",
        "2026-11-24",
    ),
    "distillation": Experiment(
        "Distillation",
        "a teacher needs about as many samples as GRPO and more time, but neither groups nor "
        "rewards",
        "e7131350",
        "2026-11-24",
    ),
    "peer": Experiment(
        "TRL's GRPOTrainer on the same data",
        "the curves are alike; ours needs fewer CPU seconds",
        "155464a8",
        "2026-11-25",
    ),
    "caches": Experiment(
        "KV caches at new weights",
        "keeping or computing them again makes no difference in reward",
        "73e70052",
        "2026-11-25",
        machine=_TWO_CORES,
    ),
    "stragglers": Experiment(
        "Groups older than the bound",
        "the policies differ in wasted tokens more than in reward",
        "155464a8",
        "2026-11-25",
        machine=_TWO_CORES,
    ),
    "kinds": Experiment(
        "Kinds of layers",
        "a hybrid and a model with windows learn no less than a dense model of their size",
        "9e604aec",
        "2026-11-29",
        "Qwen3, Qwen3.5 and Gemma 3 of 0.4 M weights",
        _TWO_CORES,
    ),
    "gomoku": Experiment(
        "Gomoku",
        "self-play alone gains less against the one-ply opponent than training against opponents",
        "05ac6e6e",
        "2026-11-25",
        machine=_TWO_CORES,
        command="gomoku_curve",
    ),
}
"""By the name of their results."""


@dataclass(frozen=True)
class _Run:
    """One run: its curve, and how long it took."""

    task: str
    method: str
    lag: str
    seed: int
    curve: dict[int, float]
    seconds: float


def runs() -> Iterator[str]:
    """All experiments, each with all of its runs."""
    for name, experiment in EXPERIMENTS.items():
        yield f"### {experiment.title}"
        yield ""
        yield (
            f"{experiment.model}; {experiment.machine}; commit `{experiment.commit}` "
            f"({experiment.date}); `python -m benchmarks.evidence.{experiment.command or name}`. "
            f"In short: {experiment.shows}."
        )
        yield ""
        yield "| task | method | η | seeds | steps | before → after | gain | curve | s |"
        yield "|---|---|---|---|---|---|---|---|---|"
        groups: defaultdict[tuple[str, str, str], list[_Run]] = defaultdict(list)
        for run in _runs_of(name):
            groups[run.task, run.method, run.lag].append(run)
        methods = list(dict.fromkeys(method for _, method, _ in groups))
        for (task, method, lag), of_seeds in sorted(
            groups.items(), key=lambda item: (item[0][0], methods.index(item[0][1]))
        ):
            yield f"| {task} | {method} | {lag} | {_cells(of_seeds)} |"
        yield ""


def _runs_of(name: str) -> Iterator[_Run]:
    if name == "gomoku":
        for line in (RESULTS / "gomoku.jsonl").read_text().splitlines():
            row = json.loads(line)
            curve = {point["step"]: point["one_ply"] for point in row["points"]}
            yield _Run("gomoku", row["way"], "pool", row["seed"], curve, row["seconds"])
        return
    for result in Results(name):
        yield _run_of(result)


def _run_of(result: Result) -> _Run:
    lag = str(result.lag)
    return _Run(result.game, result.method, lag, result.seed, result.validation, result.seconds)


def _cells(of_seeds: Sequence[_Run]) -> str:
    """Return the cells of all seeds of one setting: a mean, ± the standard deviation."""
    firsts = [run.curve[min(run.curve)] for run in of_seeds]
    lasts = [mean(list(run.curve.values())[-2:]) for run in of_seeds]
    gains = [last - first for first, last in zip(firsts, lasts, strict=True)]
    spread = f" ± {stdev(gains):.2f}" if len(gains) > 1 else ""
    steps = sorted(of_seeds[0].curve)
    curve = [mean(run.curve[step] for run in of_seeds if step in run.curve) for step in steps]
    verdict = " **no gain**" if mean(gains) < _NO_GAIN else ""
    seconds = f"{median(run.seconds for run in of_seeds):.0f}"
    before_after = f"{mean(firsts):.2f} → {mean(lasts):.2f}"
    cells = (
        *(str(len(of_seeds)), str(steps[-1]), before_after),
        *(f"{mean(gains):+.2f}{spread}{verdict}", _bars(curve), seconds),
    )
    return " | ".join(cells)


def _bars(values: Sequence[float]) -> str:
    """Return values from 0 to 1 as bars."""
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def lost_prompts() -> Iterator[str]:
    """Prompts lost per kill, ours and TRL's."""
    yield "| killed | side | kills | prompts | never trained | trained twice | steps lost | date |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in (RESULTS / "lost_prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = ("role", "side", "kills", "prompts", "never", "twice", "steps_lost", "date")
        yield f"| {' | '.join(str(row[name]) for name in names)} |"
