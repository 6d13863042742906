"""Torch's own trace of training steps, for chrome://tracing or Perfetto, when somebody asks."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from ...schemas.control import MAX_TRACED_STEPS
from ...schemas.wire.errors import StorageError

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
            for old in sorted(self._folder.glob("step_*.json"))[:-MAX_TRACED_STEPS]:
                old.unlink()
        except (OSError, RuntimeError):
            return
        self._files.append(str(file))
