"""The display of a run: a few lines that are redrawn, or one line per step when piped."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...schemas.job import JobRecord
from ...schemas.metric import Event, Metric
from ..follow import SUCCESS, VALIDATED_SUCCESS, RunProgress, Update, sparkline
from .output import (
    duration,
    harmless,
    is_terminal,
    literal,
    print_commands,
    print_json_line,
    print_plain,
    print_text,
    stdout,
)

_STATE_STYLES = {
    "RUNNING": "green",
    "COMPLETED": "bold green",
    "FAILED": "bold red",
    "CANCELLED": "yellow",
    "LOST": "red",
}
_SPARK_WIDTH = 40
_LAG_WIDTH = 10
_SHOWN_EVENTS = 3


@contextmanager
def open_display(progress: RunProgress, *, as_json: bool) -> Iterator["Display"]:
    """Yield the display that fits the output: live on a terminal, lines in a pipe, or JSON."""
    if as_json:
        yield JsonDisplay(progress)
    elif is_terminal():
        display = LiveDisplay(progress)
        with Live(console=stdout(), refresh_per_second=4, get_renderable=display.draw):
            yield display
    else:
        yield LineDisplay(progress)


class JsonDisplay:
    """One JSON document per line: `{"metric": …}`, `{"event": …}` or `{"job": …}`."""

    needs_actors = False

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def show(self, update: Update) -> None:
        """Print the update."""
        if isinstance(update, tuple):
            return
        update_progress(self._progress, update)
        kind = "job" if isinstance(update, JobRecord) else type(update).__name__.lower()
        fields = update.model_dump(exclude={"config"})
        print_json_line({kind: fields})


class LineDisplay:
    """One line for each step, validation, event and change of state."""

    needs_actors = False

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._state = ""
        self._moved = ""
        """The last printed change of state."""
        self._has_ended = False
        self._change: Any = ""
        """What the last printed line on the bottleneck advises."""

    def show(self, update: Update) -> None:
        """Print what is new."""
        progress = self._progress
        stepped = update_progress(progress, update)
        if isinstance(update, JobRecord):
            if update.state != self._state or update.state == "QUEUED":
                self._move(update.state, update.reason)
            if progress.unlearnt and not self._has_ended:
                print_plain(progress.unlearnt)
            self._has_ended = progress.ended
        elif isinstance(update, Event) and update.kind.startswith("job_"):
            self._move(update.kind.removeprefix("job_").upper(), update.message)
        elif isinstance(update, Event):
            if update.kind == "bottleneck":
                if update.data.get("change") == self._change:
                    return
                self._change = update.data.get("change")
            print_plain(f"{update.kind}: {update.message}".rstrip(": "))
        elif isinstance(update, tuple):
            return
        elif stepped:
            print_plain(step_line(progress))
        elif update.step in progress.validation:
            print_plain(
                f"validation at step {update.step}: {progress.validation_text(update.step)}"
            )

    def _move(self, state: str, reason: str) -> None:
        """Print a change of state once, whether its event or the record comes first."""
        line = f"{self._progress.record.name} {state} {reason}".rstrip()
        if line != self._moved:
            print_plain(line)
        self._state = state
        self._moved = line


class LiveDisplay:
    """Progress, reward, validation, success, lag, speed, time left, episodes, the bottleneck.

    It is redrawn a few times per second, however fast updates come.
    """

    needs_actors = True

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._events: list[Event] = []

    def show(self, update: Update) -> None:
        """Add an update; the next redraw shows it."""
        update_progress(self._progress, update)
        if isinstance(update, Event) and update.kind != "bottleneck":
            self._events = [*self._events, update][-_SHOWN_EVENTS:]

    def draw(self) -> Group:
        """Return the current display."""
        return render(self._progress, self._events)


Display: TypeAlias = JsonDisplay | LineDisplay | LiveDisplay


def update_progress(progress: RunProgress, update: Update) -> bool:
    """Add an update to the progress; return whether it has a new training step."""
    if isinstance(update, Metric):
        return progress.add_metric(update)
    if isinstance(update, Event):
        progress.add_event(update)
    elif isinstance(update, tuple):
        progress.add_actors(update)
    else:
        progress.add_record(update)
    return False


def step_line(progress: RunProgress) -> str:
    """Return one line on the newest step."""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    parts = [
        f"step {progress.step}{total}",
        f"{progress.measure} {progress.rewards[progress.step]:.3f}",
    ]
    parts += [f"{name} {text}" for name, text in _figures(progress)]
    return "  ".join(parts)


def render(progress: RunProgress, events: list[Event]) -> Group:
    """Return the display as lines."""
    record = progress.record
    style = _STATE_STYLES.get(record.state, "cyan")
    age = (record.finished or time.time()) - record.created
    lines: list[Text | Table] = [
        Text.assemble(
            (record.name, "bold"), "  ", (record.state, style), f"  {duration(age)}", ("", "dim")
        )
    ]
    lines += [_bar(progress), *_curves(progress), _figures_line(progress)]
    if any(progress.phases.values()) and not progress.ended:
        phases = "   ".join(f"{count} {phase}" for phase, count in progress.phases.items())
        lines.append(Text(f"episodes    {phases}"))
    if progress.bottleneck and not progress.ended:
        lines.append(Text(progress.bottleneck, style="yellow"))
    if progress.unlearnt:
        lines.append(Text(progress.unlearnt, style="yellow"))
    lines += [Text.from_markup(_event_line(event)) for event in events]
    if record.reason and record.state != "RUNNING":
        lines.append(Text(harmless(record.reason), style=style))
    return Group(*lines)


def _bar(progress: RunProgress) -> Table:
    total = progress.total_steps
    left = progress.seconds_left
    row = Table.grid(padding=(0, 2))
    row.add_row(
        "step      ",
        ProgressBar(total=total or None, completed=progress.step, width=_SPARK_WIDTH),
        f"{progress.step}/{total or '?'}",
        "" if left is None or progress.ended else f"{duration(left)} left",
    )
    return row


def _curves(progress: RunProgress) -> list[Table]:
    row = Table.grid(padding=(0, 2))
    rewards = progress.smoothed_rewards(_SPARK_WIDTH)
    newest = progress.rewards.get(progress.step)
    if newest is not None:
        line = sparkline(rewards).ljust(_SPARK_WIDTH)
        row.add_row(progress.measure.ljust(10), f"[cyan]{line}[/]", f"{newest:.3f}")
    last = progress.last_validation()
    if last is not None:
        scores = [score for _, score in sorted(progress.validation.items())]
        line = sparkline(scores).ljust(_SPARK_WIDTH)
        row.add_row("validation", f"[magenta]{line}[/]", _validated(progress, last))
    if any(progress.lag_shares().values()):
        row.add_row("lag       ", _lags(progress), "of the step's tokens")
    return [row]


def _validated(progress: RunProgress, last: tuple[int, float]) -> str:
    """Return the last score, and the best one if different."""
    text = f"{progress.validation_text(last[0])} at step {last[0]}"
    best = progress.best_validation()
    if best is None or best == last:
        return text
    return f"{text}, best {progress.validation_text(best[0])} at {best[0]}"


def _lags(progress: RunProgress) -> str:
    """Return a histogram: a bar for each lag that tokens of the newest step have."""
    return "  ".join(
        f"{lag} [blue]{'█' * max(round(share * _LAG_WIDTH), 1)}[/] {share:.0%}"
        for lag, share in progress.lag_shares().items()
        if share > 0
    )


def _figures(progress: RunProgress) -> list[tuple[str, str]]:
    """Return the figures of a step, learning first."""
    figures: list[tuple[str, str]] = []
    last = progress.last_validation()
    for name, label, shape in (
        (SUCCESS, "success", "{:.0%}"),
        (VALIDATED_SUCCESS, "validated success", "{:.0%}"),
        ("actor/entropy", "entropy", "{:.2f}"),
        ("response_length/mean", "length", "{:,.0f}"),
        ("staleness/lag_mean", "lag", "{:.2f}"),
        ("perf/throughput", "tokens/s", "{:,.0f}"),
        ("perf/time_per_step", "s/step", "{:.2f}"),
    ):
        value = progress.value(name)
        if value is not None:
            figures.append((label, shape.format(value)))
    if last is not None:
        figures.insert(0, ("validation", progress.validation_text(last[0])))
    return figures


def _figures_line(progress: RunProgress) -> Text:
    parts = [part for part in _figures(progress) if part[0] != "validation"]
    if not parts:
        return Text("waiting for the first step", style="dim")
    return Text("   ".join(f"{name} {text}" for name, text in parts))


def _event_line(event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"[dim]{clock} {literal(event.kind)} {literal(event.message)}[/]"


def print_submitted(record: JobRecord, *, commands: bool = True) -> None:
    """Print which job was submitted and, unless suppressed, commands for it."""
    name = record.name
    print_text(f"[bold green]submitted[/] [bold]{name}[/]  (job {record.job})")
    if commands:
        print_commands(
            {
                f"tinkermq watch {name}": "come back to this display",
                f"tinkermq logs {name} -f": "what its actors write",
                f"tinkermq stop {name}": "stop it, with a checkpoint",
            }
        )
