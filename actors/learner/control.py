"""Control requests to the learner: pause, resume, checkpoint, stop, tasks, reservations, traces."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from ...schemas import control
from ...schemas.wire.errors import StorageError
from ..runtime import JobContext
from .intake import Intake
from .tasks import TaskIssuer

# -- torch's own traces of steps, for chrome://tracing or Perfetto ---------------------------------

T = TypeVar("T")


class TorchTracer:
    """Traces the next steps of a learner; as many files are kept as may be asked for at once."""

    def __init__(self, folder: Path) -> None:
        """Traces are written into `folder`, which is made when it is needed."""
        self._folder = folder
        self._steps_left = 0
        self._files: list[str] = []
        self._waiting: list[asyncio.Future[list[str]]] = []

    def trace_steps(self, steps: int) -> "asyncio.Future[list[str]]":
        """Trace the next steps; the files are the future's result. Others' wishes are joined."""
        self._steps_left = max(self._steps_left, steps)
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def traced(self, work: Callable[[], T], step: int) -> Callable[[], T]:
        """Return the work of a step, to be called in torch's thread: traced if that was asked."""
        if not self._steps_left:
            return work
        self._steps_left -= 1
        return lambda: self._compute(work, step)

    def step_done(self) -> None:
        """Answer those who asked once their last step is traced."""
        if not self._steps_left:
            self.finish()

    def finish(self) -> None:
        """Answer those who asked with what there is: no further step comes."""
        waiting, self._waiting, self._steps_left = self._waiting, [], 0
        files, self._files = self._files, []
        for future in waiting:
            if future.done():
                continue
            if files:
                future.set_result(files)
            else:
                future.set_exception(
                    StorageError(
                        f"no trace was written below {self._folder}",
                        hint="the run ended before a step, or the disk is full",
                    )
                )

    def _compute(self, work: Callable[[], T], step: int) -> T:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as trace:
            result = work()
        self._write(trace, step)
        return result

    def _write(self, trace: Any, step: int) -> None:
        """Write a trace; one that cannot be written does not end the run."""
        file = self._folder / f"step_{step:06d}.json"
        hidden = self._folder / f".{file.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(hidden))
            hidden.replace(file)
            for old in sorted(self._folder.glob("step_*.json"))[: -control.MAX_TRACED_STEPS]:
                old.unlink()
        except (OSError, RuntimeError):
            return
        self._files.append(str(file))


# -- control requests ------------------------------------------------------------------------------

_ANSWER_S = 600.0


class LearnerControl:
    """The learner's control endpoints, and the wishes that they leave behind."""

    def __init__(
        self,
        context: JobContext,
        issuer: TaskIssuer,
        intake: Intake,
        vocab_size: int,
        version: Callable[[], int],
        tracer: TorchTracer,
    ) -> None:
        self._tracer = tracer
        self._context = context
        self._issuer = issuer
        self._intake = intake
        self._vocab_size = vocab_size
        self._version = version
        self.paused = False
        self.changed = asyncio.Event()
        self._checkpoints: list[asyncio.Future[str | None]] = []

    async def serve(self) -> None:
        """Answer on `ctl.learner`, and on its `reserve` and `tasks`."""
        context = self._context
        await context.serve_control(self._control)
        subject = context.scope.control(context.name)
        await context.service.endpoint(
            "reserve", f"{subject}.reserve", control.ReserveRequest, self._reserve
        )
        await context.service.endpoint(
            "tasks", f"{subject}.tasks", control.PublishTasksRequest, self._tasks
        )

    @property
    def checkpoint_wanted(self) -> bool:
        """Whether somebody waits for a checkpoint."""
        return bool(self._checkpoints)

    def checkpoint_done(self, folder: str | None) -> None:
        """Answer everybody who waits for a checkpoint."""
        waiting, self._checkpoints = self._checkpoints, []
        for future in waiting:
            if not future.done():
                future.set_result(folder)

    async def _control(self, request: control.ControlRequest) -> dict[str, Any]:
        context = self._context
        if request.verb == "stop":
            context.stop_asked = True
            context.stopping.set()
        elif request.verb in ("pause", "resume"):
            before, self.paused = self.paused, request.verb == "pause"
            context.set_state("paused" if self.paused else "working")
            if self.paused != before:  # it may be told twice
                await context.event(f"training_{request.verb}d", request.reason)
        elif request.verb == "checkpoint":
            future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._checkpoints.append(future)
            self._wake()
            async with asyncio.timeout(_ANSWER_S):
                return {"folder": await future}
        elif request.verb == "profile":
            async with asyncio.timeout(_ANSWER_S):
                return {"files": await self._tracer.trace_steps(request.steps)}
        self._wake()
        return {"paused": self.paused}

    async def _reserve(self, request: control.ReserveRequest) -> control.ReserveReply:
        await self._issuer.check_owner()
        return control.ReserveReply(
            tasks=self._issuer.reserve(request, self._version()),
            group_size=self._context.config.rollout.group_size,
            version=self._version(),
            vocab_size=self._vocab_size,
            max_tokens=self._context.config.rollout.max_tokens,
        )

    async def _tasks(self, request: control.PublishTasksRequest) -> control.PublishTasksReply:
        queued = await self._issuer.publish_for_client(request, self._version())
        return control.PublishTasksReply(queued=queued)

    def _wake(self) -> None:
        self.changed.set()
        self._intake.changed.set()
