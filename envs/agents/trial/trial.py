"""Runs programs of a job on this machine, one after the other, with a model in the pool's place."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from ....broker.client.connection import Broker
from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import ConfigError, DataError, TinkermqError
from ....schemas.wire.subjects import JobScope
from ...data.host_data import HostData
from ...game import StepResult
from ...running.episodes import Opening
from ..programs.runner import ProgramRunner
from .model import MAX_CALLS, Speaker, TrialModel
from .observed import Observed, ObservedProxy

SCOPE = JobScope("local", "trial")


@dataclass(frozen=True)
class TrialRun:
    """What became of one program."""

    model: TrialModel
    """What it asked for."""
    seen: Observed | None
    """What was seen of it; None: it did not start."""
    began_s: float
    """Monotonic time at which its folder was begun."""
    ended_s: float
    """Monotonic time at which it had its reward."""
    result: StepResult | None
    """Its end and its reward; None: it does not count."""
    error: TinkermqError | None = None
    """Why not."""


class Trial:
    """The programs of one job, on this machine."""

    def __init__(self, broker: Broker, job: JobConfig, runner: ProgramRunner, proxy: ObservedProxy):
        """Take what `trial` has prepared."""
        self._broker = broker
        self._job = job
        self._runner = runner
        self._proxy = proxy
        self._number = 0

    async def run(
        self,
        speaker: Speaker,
        *,
        row: int | None = None,
        seed: int = 0,
        until: Callable[[TrialModel], bool] | None = None,
    ) -> TrialRun:
        """Run the program on a task to its end, or until it has done what is waited for.

        Raises DataError for a row that is not there.
        """
        opening = await asyncio.to_thread(self._opening, row, seed)
        self._proxy.now = None
        model = TrialModel(
            self._broker, SCOPE, speaker, max_calls=min(MAX_CALLS, self._job.agent.max_calls)
        )
        began_s = time.monotonic()
        result, error = None, None
        async with model.playing(opening.episode):
            try:
                result = await self._end(opening, model, until)
            except TinkermqError as failed:
                error = failed
            finally:
                self._runner.drop(opening.episode)
        return TrialRun(model, self._proxy.now, began_s, time.monotonic(), result, error)

    async def _end(
        self, opening: Opening, model: TrialModel, until: Callable[[TrialModel], bool] | None
    ) -> StepResult | None:
        await self._runner.reset(opening)
        ending = asyncio.ensure_future(self._runner.step(opening.episode, ""))
        waiting = asyncio.ensure_future(_until(model, until)) if until else None
        try:
            await asyncio.wait(
                {ending, *([waiting] if waiting else [])}, return_when=asyncio.FIRST_COMPLETED
            )
            return await ending if ending.done() else None
        finally:
            for task in (ending, waiting):
                if task is not None:
                    task.cancel()

    def _opening(self, row: int | None, seed: int) -> Opening:
        self._number += 1
        with contextlib.closing(HostData(self._job.env, seed, needs_answers=False)) as data:
            if data.num_train is None and row is not None:
                raise DataError(
                    f"row {row} was asked for, and the job has no env.train_data",
                    hint="its tasks have seeds",
                )
            if data.num_train is not None and row is None:
                row = seed % data.num_train
            if data.num_train is not None and not 0 <= (row or 0) < data.num_train:
                raise DataError(f"there is no row {row}: the training data has {data.num_train}")
            record = data.record("train", row)
        return Opening(f"trial{self._number}-1", seed, record)


@contextlib.asynccontextmanager
async def trial(
    broker: Broker, job: JobConfig, *, limit_s: float | None = None
) -> AsyncIterator[Trial]:
    """Prepare to run a job's programs here, behind the walls that they have in a pool.

    A program may take `limit_s` at most, if that is less than the job allows. Raises ConfigError
    for a job without a program, or whose command is not there, and SandboxError for a machine that
    cannot run it.
    """
    if not job.agent.command:
        raise ConfigError(
            "this is no job with a program: agent.command is empty",
            hint="set agent.command, or make an example: `tinkermq agent new NAME`",
        )
    limits = {} if limit_s is None else {"timeout_s": limit_s, "idle_s": limit_s}
    agent = job.agent.model_copy(
        update={name: min(most, getattr(job.agent, name)) for name, most in limits.items()}
    )
    proxy = ObservedProxy(broker, SCOPE)
    runner = ProgramRunner(agent, proxy, job=SCOPE.job)
    try:
        await runner.start()
        yield Trial(broker, job, runner, proxy)
    finally:
        await runner.stop()


async def _until(model: TrialModel, is_enough: Callable[[TrialModel], bool]) -> None:
    while not is_enough(model):
        model.changed.clear()
        await model.changed.wait()
