"""Follow a run to its end: metrics, events, states of the job, and plots."""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

from ..broker.feed import ValidationScore, best_of, follow
from ..broker.presence import INTERVAL_S, list_presences
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.metric import WHY_EQUAL, Event, LogLines, Metric, Presence
from ..schemas.wire.errors import NotFoundError
from .pool import Pool

Actors: TypeAlias = tuple[Presence, ...]
"""The actors of a run, by their heartbeats."""
Update: TypeAlias = Metric | Event | JobRecord | Actors
POLL_S = 0.5
QUIET_S = 0.5
"""After the end of a run, its feed is read until no message comes for this long."""
_QUEUE_LENGTH = 256


async def follow_run(
    pool: Pool, record: JobRecord, *, with_actors: bool = False
) -> AsyncGenerator[Update, None]:
    """Yield metrics and events of a run in order, and its record after each change.

    `with_actors` also yields its actors every two seconds, while it runs. The last update is the
    record in its final state. Waits for a broker that is away and yields the events `broker_away`
    and `broker_back`. Use it with `contextlib.aclosing`. Raises NotFoundError when the job is
    removed.
    """
    broker = pool.broker
    follower = _Follower(pool, record)
    removals = (
        broker.on_disconnect(follower.report_broker_away),
        broker.on_reconnect(follower.report_broker_back),
    )
    parts: list[Coroutine[Any, Any, None]] = [follower.pump(), follower.watch()]
    if with_actors:
        parts.append(follower.read_actors())
    with broker.availability.patience():
        tasks = [asyncio.create_task(follower.guard(part), name="follow_run") for part in parts]
        try:
            while True:
                update = await follower.updates.get()
                if isinstance(update, Exception):
                    raise update
                yield update
                if isinstance(update, JobRecord) and update.state in FINAL_STATES:
                    return
        finally:
            for remove in removals:
                remove()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class _Follower:
    """The readers of feed, record and heartbeats, and the queue that they fill."""

    def __init__(self, pool: Pool, record: JobRecord) -> None:
        self.updates: asyncio.Queue[Update | Exception] = asyncio.Queue(_QUEUE_LENGTH)
        self._pool = pool
        self._record = record
        self._last_message_at = time.monotonic()
        self._is_away = False
        self._is_over, self._has_read_all = asyncio.Event(), asyncio.Event()

    def report_broker_away(self) -> None:
        """Report that the broker is away, once per outage."""
        if self._is_away:
            return
        self._is_away = True
        self._put_event("broker_away", "waiting for the broker, as the pool does")

    def report_broker_back(self) -> None:
        """Report that the broker is back."""
        self._is_away = False
        self._put_event("broker_back", "following the run again")

    def _put_event(self, kind: str, message: str) -> None:
        event = Event(kind=kind, source="client", message=message, time=time.time())
        with contextlib.suppress(asyncio.QueueFull):  # the queue is full: the reader is far behind
            self.updates.put_nowait(event)

    async def guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run one reader; put its exception into the queue."""
        try:
            await part
        except Exception as error:  # noqa: BLE001  handed on to the reader, not swallowed
            await self.updates.put(error)

    async def pump(self) -> None:
        """Read metrics and events once the job's streams exist, until it is over."""
        while not self._is_over.is_set():
            try:
                await self._read_feed()
            except NotFoundError:
                if self._ended:
                    break  # its streams were deleted; only the record is left
                await asyncio.sleep(POLL_S)
        self._has_read_all.set()

    async def _read_feed(self) -> None:
        feed = follow(
            self._pool.broker,
            self._record.scope,
            ("metric", "event"),
            stop=self._is_over,
        )
        async with aclosing(feed) as messages:
            async for message in messages:
                self._last_message_at = time.monotonic()
                if not isinstance(message, LogLines):
                    await self.updates.put(message)

    async def watch(self) -> None:
        """Poll the record; its final state is queued after the last metrics."""
        if not self._ended:
            await self.updates.put(self._record)
        while not self._ended:
            await asyncio.sleep(POLL_S)
            newest = await self._pool.find(self._record.job)
            if newest != self._record:
                self._record = newest
                if not self._ended:
                    await self.updates.put(newest)
        self._last_message_at = time.monotonic()
        while (left := self._last_message_at + QUIET_S - time.monotonic()) > 0:  # noqa: ASYNC110  quiet is the absence of events
            await asyncio.sleep(left)
        self._is_over.set()
        await self._has_read_all.wait()
        await self.updates.put(self._record)

    async def read_actors(self) -> None:
        """Poll the heartbeats."""
        while not self._ended:
            presences = await list_presences(self._pool.broker, self._record.scope.key)
            await self.updates.put(tuple(entry.value for entry in presences))
            await asyncio.sleep(INTERVAL_S)

    @property
    def _ended(self) -> bool:
        return self._record.state in FINAL_STATES


# The progress of a run: a pure summary of its metrics and events.

REWARD = "training_step_reward"
LOSS = "actor/pg_loss"
SUCCESS = "game/success_rate"
VALIDATED_SUCCESS = "val/success_rate"
_RECENT_STEPS = 10
_BARS = "▁▂▃▄▅▆▇█"
_LAG_SHARE = "staleness/lag_share/"
_QUIET_EVENTS = frozenset({"bottleneck"})


@dataclass
class RunProgress:
    """The state of a run so far; `add_*` update it."""

    record: JobRecord
    step: int = 0
    total_steps: int | None = None
    rewards: dict[int, float] = field(default_factory=dict[int, float])
    """By step: the reward, or the loss of an SFT job."""
    validation: dict[int, float] = field(default_factory=dict[int, float])
    _scores: dict[int, ValidationScore] = field(default_factory=dict[int, ValidationScore])
    values: dict[str, float] = field(default_factory=dict[str, float])
    bottleneck: str = ""
    num_unlearnt: int = 0
    """Training steps whose gradient was 0 because all groups had equal rewards."""
    event: Event | None = None
    phases: dict[str, int] = field(default_factory=dict[str, int])
    """Running episodes by phase; empty before the first heartbeat."""
    _times: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        training: dict[str, Any] = self.record.config.get("training") or {}
        self.total_steps = training.get("num_steps")

    @property
    def measure(self) -> str:
        """What `rewards` holds: reward or loss."""
        return "loss" if self.record.kind == "sft" else "reward"

    @property
    def ended(self) -> bool:
        """Return whether the run is in a final state."""
        return self.record.state in FINAL_STATES

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds from the last steps; None before two steps."""
        steps = sorted(self._times)
        if self.total_steps is None or len(steps) < 2:
            return None
        pace = (self._times[steps[-1]] - self._times[steps[0]]) / (steps[-1] - steps[0])
        return max(0.0, (self.total_steps - self.step) * pace)

    def add_record(self, record: JobRecord) -> None:
        """Add the job's newest record."""
        self.record = record

    def add_event(self, event: Event) -> None:
        """Add an event."""
        if event.kind == "bottleneck":
            self.bottleneck = event.message
        if event.kind not in _QUIET_EVENTS:
            self.event = event

    def add_actors(self, crew: Sequence[Presence]) -> None:
        """Count the running episodes of generators, evaluators and environment hosts."""

        def total(name: str, *roles: str) -> int:
            return int(sum(actor.numbers.get(name, 0.0) for actor in crew if actor.role in roles))

        generating = total("running", "generator", "evaluator")
        queued = total("waiting", "generator", "evaluator")
        opened = total("episodes", "environment")
        self.phases = {
            "generating": generating,
            "waiting for the engine": queued,
            "in the environment": max(opened - generating - queued, 0),
        }

    @property
    def unlearnt(self) -> str:
        """Describe the steps of an ended run that changed nothing; empty if most of them did."""
        if not self.ended or 2 * self.num_unlearnt <= len(self.rewards):
            return ""
        return (
            f"{self.num_unlearnt} of {len(self.rewards)} steps learnt nothing: all groups had "
            f"equal rewards. {WHY_EQUAL}"
        )

    def add_metric(self, metric: Metric) -> bool:
        """Add the metrics of a step; return whether it is a new training step."""
        self.values.update(metric.values)
        total = metric.values.get("training/total_steps")
        if total is not None and math.isfinite(total):
            self.total_steps = int(total)
        score = ValidationScore.of(metric.values)
        if score is not None and math.isfinite(score.mean):
            self.validation[metric.step], self._scores[metric.step] = score.mean, score
        reward = metric.values.get(LOSS if self.measure == "loss" else REWARD)
        if reward is None:
            return False
        self.num_unlearnt += metric.is_unlearnt and metric.step not in self.rewards
        self.rewards[metric.step] = reward
        self._times[metric.step] = metric.time
        if len(self._times) > _RECENT_STEPS + 1:
            del self._times[min(self._times)]
        self.step = max(self.step, metric.step)
        return True

    def value(self, name: str) -> float | None:
        """Return the newest finite value of a metric."""
        value = self.values.get(name)
        return value if value is not None and math.isfinite(value) else None

    def lag_shares(self) -> dict[str, float]:
        """Return the share of the newest step's tokens by lag in versions, smallest lag first."""
        return {
            name.removeprefix(_LAG_SHARE): value
            for name, value in self.values.items()
            if name.startswith(_LAG_SHARE)
        }

    def last_validation(self) -> tuple[int, float] | None:
        """Return step and score of the newest validation."""
        return max(self.validation.items(), default=None)

    def validation_text(self, step: int) -> str:
        """Return the score of a validation, and how many episodes are missing from it."""
        return self._scores[step].text

    def best_validation(self) -> tuple[int, float] | None:
        """Return step and score of the best validation, as `RUN@best` is chosen."""
        best = best_of(self._scores, self._scores)
        return None if best is None else (best, self.validation[best])

    def smoothed_rewards(self, width: int) -> list[float]:
        """Return at most `width` means of consecutive rewards, oldest first."""
        values = [value for _, value in sorted(self.rewards.items()) if math.isfinite(value)]
        if not values:
            return []
        count = min(width, len(values))
        edges = [round(place * len(values) / count) for place in range(count + 1)]
        parts = [values[start:end] for start, end in itertools.pairwise(edges)]
        return [sum(part) / len(part) for part in parts]


def sparkline(values: list[float]) -> str:
    """Return a line of bars from the smallest to the largest value."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / span * 8))] for value in values)


# -- plots of a few curves: SVG for notebooks, characters for terminals and logs -------------------

_WIDTH, _HEIGHT, _MARGIN = 420, 140, 34
_COLOURS = ("#3b6ea5", "#d1782f", "#4a8f4a")


def curve_svg(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG of curves with a legend; a curve without points is left out.

    The y axis begins at 0 unless a value is below it.
    """
    shown = {name: points for name, points in curves.items() if points}
    if not shown:
        return "<i>no numbers yet</i>"
    xs = [x for points in shown.values() for x, _ in points]
    ys = [y for points in shown.values() for _, y in points]
    left, right, low, high = min(xs), max(xs), min(0.0, *ys), max(ys)

    def place(x: float, y: float) -> str:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return f"{_MARGIN + across * _WIDTH:.1f},{10 + (1 - up) * _HEIGHT:.1f}"

    lines: list[str] = []
    for number, (name, points) in enumerate(shown.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<text x="{_MARGIN + 150 * number}" y="{_HEIGHT + 40}" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    axis = (
        f'<path d="M{_MARGIN},10 V{_HEIGHT + 10} H{_MARGIN + _WIDTH}" fill="none" stroke="#888"/>'
        f'<text x="0" y="16">{high:.3g}</text><text x="0" y="{_HEIGHT + 10}">{low:.3g}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT + 24}">{left:g}</text>'
        f'<text x="{_MARGIN + _WIDTH - 20}" y="{_HEIGHT + 24}">{right:g}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _MARGIN}" '
        f'height="{_HEIGHT + 50}" font-family="sans-serif" font-size="11">'
        f"{axis}{''.join(lines)}</svg>"
    )


_Points = Sequence[tuple[float, float]]
_ROWS = 12
_COLUMNS = 64


def text_plot(curves: Mapping[str, _Points], *, width: int = _COLUMNS, height: int = _ROWS) -> str:
    """Return a plot of curves; the key of each is the one character that marks it.

    Later curves are drawn over earlier ones. The y axis starts at 0 unless a value is below it.
    """
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return "(nothing to plot)"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    cells = [[" "] * width for _ in range(height)]
    for mark, curve in curves.items():
        for x, y in curve:
            column = _place(x, left, right, width)
            cells[height - 1 - _place(y, low, high, height)][column] = mark
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    rows = [f"{labels.get(row, ''):>6} │{''.join(line)}" for row, line in enumerate(cells)]
    axis = f"{'':>6} └{'─' * width}"
    numbers = f"{left:<{width // 2}.6g}{right:>{width - width // 2}.6g}"
    return "\n".join([*rows, axis, f"{'':>8}{numbers}"])


def _place(value: float, low: float, high: float, count: int) -> int:
    """Return the index of a value's cell among `count` cells from low to high."""
    span = (high - low) or 1.0
    return min(count - 1, max(0, round((value - low) / span * (count - 1))))
