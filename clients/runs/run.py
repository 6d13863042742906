"""A run in Python: `SchedulerClient(...).run("my-run")`, and `AsyncRun` for async code."""

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from html import escape
from importlib import import_module
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ...broker.feed import read_metrics, read_traces
from ...broker.kept_rollouts import RunRollouts
from ...broker.profile import Profile, profile_of
from ...envs.evaluation import Comparison, compare
from ...schemas.job import JobRecord
from ...schemas.metric import Metric, readable
from ...schemas.wire.errors import ConfigError
from ..pool_client import PoolClient
from ..progress import LOSS, REWARD, VALIDATION
from ..sync.sync_twin import SyncTwin
from .curve import curve_svg
from .episodes import EpisodeFilter, read_episodes, steps_of
from .evaluating import EvaluationSettings, evaluate, evaluate_both
from .log_lines import check_actor, log_lines

_STEPS = 100
Numbers = dict[str, NDArray[np.float64]]
"""Metric name to its values by step, NaN where a step has none; `step` has the steps."""


class AsyncRun(PoolClient):
    """One run of a pool, for async code; see `Run`."""

    def __init__(self, name: str, broker_url: str, api_key: str | None = None) -> None:
        """Name the run; nothing is asked yet."""
        super().__init__(broker_url, api_key)
        self.name = name
        self.record: JobRecord | None = None
        """The run's record, as it was last read."""

    async def refresh(self) -> JobRecord:
        """Read the run's record. Raises NotFoundError."""
        self.record = await (await self._connected()).find(self.name)
        return self.record

    async def metrics(self, names: Sequence[str] | None = None) -> Numbers:
        """Return the numbers of the run by step; see `Run.metrics`."""
        record = await self.refresh()
        told = await read_metrics((await self._connected()).broker, record.scope)
        return as_numbers(told, names)

    async def rollouts(
        self,
        step: int | None = None,
        *,
        errors: bool = False,
        sort: Literal["log", "reward"] = "log",
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """Return episodes of the run; see `Run.rollouts`."""
        record, broker = await self.refresh(), (await self._connected()).broker
        there = await RunRollouts.open(broker, record.scope, record.run_dir)
        wanted = EpisodeFilter(step, errors=errors, most=limit if sort == "log" else None)
        found = await read_episodes(there, await steps_of(broker, record.scope, there), wanted)
        if sort == "reward":
            found.sort(key=lambda one: one.reward, reverse=True)
        return [one.fields() for one in found[:limit]]

    async def logs(self, actor: str | None = None, attempt: int | None = None) -> list[str]:
        """Return what the run's actors wrote; see `Run.logs`."""
        record = await self.refresh()
        check_actor(record, actor)
        lines: list[str] = []
        pool = await self._connected()
        async with aclosing(log_lines(pool, record, follow_on=False)) as batches:
            async for batch in batches:
                if actor in (None, batch.actor) and attempt in (None, batch.attempt):
                    lines += [f"{batch.actor} | {readable(line)}" for line in batch.lines]
        return lines

    async def profile(self, steps: int = _STEPS) -> Profile:
        """Say where the time of the run's newest steps went; see `Run.profile`."""
        record = await self.refresh()
        return profile_of(await read_traces((await self._connected()).broker, record.scope, steps))

    async def evaluate(
        self,
        step: int | str | None = None,
        overrides: Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Evaluate a version of the run; see `Run.evaluate`."""
        done = await evaluate(
            await self._connected(), self._at(step), _settings(overrides, tasks), _say_nothing
        )
        return done.values

    async def compare(
        self,
        step: int | str,
        other: str,
        overrides: Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> Comparison:
        """Compare a checkpoint with another one; see `Run.compare`."""
        pool, pair = await self._connected(), (other, self._at(step))
        a, b = await evaluate_both(pool, pair, _settings(overrides, tasks), _say_nothing)
        return compare(a.episodes, b.episodes)

    def _at(self, step: int | str | None) -> str:
        return self.name if step is None else f"{self.name}@{step}"


class Run(SyncTwin[AsyncRun]):
    """One run of a pool: its numbers, episodes, logs, and what it is worth.

    In a notebook it shows itself with its curve. It has a connection of its own, closed by `close`
    or at the end of a `with` block.
    """

    def __init__(self, name: str, broker_url: str, api_key: str | None = None) -> None:
        """Name the run; see `SchedulerClient.run`."""
        super().__init__(AsyncRun(name, broker_url, api_key))

    @property
    def name(self) -> str:
        """Name, or job id."""
        return self.aio.name

    def refresh(self) -> JobRecord:
        """Read and return the run's record: state, reason, times, configuration."""
        return self._run(self.aio.refresh())

    def metrics(self, names: Sequence[str] | None = None) -> Numbers:
        """Return the numbers of the run as arrays by name (float64[steps]), `step` included.

        Validation stands at the steps that were validated, NaN at the others. Raises NotFoundError
        for a run without a feed (not begun, or archived), ConfigError for a name that it lacks.
        """
        return self._run(self.aio.metrics(names))

    def frame(self, names: Sequence[str] | None = None) -> Any:
        """Return the same as a pandas.DataFrame, indexed by step; needs pandas."""
        try:
            pandas = cast(Any, import_module("pandas"))
        except ImportError as error:
            raise ConfigError(
                "a DataFrame needs pandas, which is not installed",
                hint="`pip install pandas`, or take the arrays of `metrics()`",
            ) from error
        return pandas.DataFrame(self.metrics(names)).set_index("step")

    def rollouts(
        self,
        step: int | None = None,
        *,
        errors: bool = False,
        sort: Literal["log", "reward"] = "log",
        limit: int = 100,
    ) -> list[dict[str, Any]]:
        """Return episodes, newest or best first: messages, rewards by turn, versions, info.

        `step`: only those that it trained; `errors`: only what failed. NotFoundError for a step
        that was not trained.
        """
        return self._run(self.aio.rollouts(step, errors=errors, sort=sort, limit=limit))

    def logs(self, actor: str | None = None, attempt: int | None = None) -> list[str]:
        """Return the lines that the run's actors wrote, oldest first; NotFoundError."""
        return self._run(self.aio.logs(actor, attempt))

    def profile(self, steps: int = _STEPS) -> Profile:
        """Say where the time of the newest steps went, as `tinkermq profile` does."""
        return self._run(self.aio.profile(steps))

    def evaluate(
        self,
        step: int | str | None = None,
        overrides: Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Evaluate a checkpoint (a step, `best`, `last`), or the newest version; its figures.

        `overrides` are keys that differ (`evaluation.samples=8`), `tasks` rows or seeds. Raises
        JobFailedError, NotFoundError, DeadlineError.
        """
        return self._run(self.aio.evaluate(step, overrides, tasks))

    def compare(
        self,
        step: int | str,
        other: str,
        overrides: Sequence[str] = (),
        tasks: Sequence[int] | None = None,
    ) -> Comparison:
        """Play the same tasks with a checkpoint and with `other` (`RUN@STEP`, or a folder).

        Differences are the checkpoint's less `other`'s, with intervals of 95 %.
        """
        return self._run(self.aio.compare(step, other, overrides, tasks))

    def __repr__(self) -> str:
        record = self.aio.record
        return f"Run({self.name!r})" if record is None else f"Run({record.name!r}, {record.state})"

    def _repr_html_(self) -> str:
        """Show state and curve in a notebook; a pool that is away is said and raises nothing."""
        record = self.refresh()
        numbers = self.metrics() if record.trains and record.started else {}
        measure = LOSS if record.kind == "sft" else REWARD
        curves = {name: _points(numbers, name) for name in (measure, VALIDATION)}
        told = escape(f"{record.name}  {record.state}  {record.reason}")
        return f"<div><b>{told}</b><br>{curve_svg(curves)}</div>"


def as_numbers(told: Sequence[Metric], names: Sequence[str] | None = None) -> Numbers:
    """Lay metrics out as arrays by name, one entry for each step that has any."""
    steps = sorted({metric.step for metric in told})
    place = {step: at for at, step in enumerate(steps)}
    numbers: Numbers = {}
    for metric in told:
        for name, value in metric.values.items():
            if name not in numbers:
                numbers[name] = np.full(len(steps), np.nan)
            numbers[name][place[metric.step]] = value
    if lacking := sorted(set(names or ()) - numbers.keys()):
        raise ConfigError(
            f"the run has no metric {lacking[0]!r}",
            hint=f"it has {len(numbers)}, such as {', '.join(sorted(numbers)[:5])}",
        )
    wanted = sorted(numbers) if names is None else list(names)
    return {"step": np.array(steps, np.float64), **{name: numbers[name] for name in wanted}}


def _points(numbers: Mapping[str, NDArray[np.float64]], name: str) -> list[tuple[float, float]]:
    values = numbers.get(name)
    if values is None:
        return []
    there = np.isfinite(values)
    steps: list[float] = numbers["step"][there].tolist()
    return list(zip(steps, values[there].tolist(), strict=True))


def _settings(overrides: Sequence[str], tasks: Sequence[int] | None) -> EvaluationSettings:
    return EvaluationSettings(tuple(overrides), None if tasks is None else list(tasks))


def _say_nothing(_: JobRecord) -> None:
    """Let the job that evaluates be."""
