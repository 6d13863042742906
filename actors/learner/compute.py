"""The learner's models, and the thread in which torch runs.

Steps, copies for checkpoints and snapshots of weights run in that one thread, one after the other.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from ...schemas.control import MAX_TRACED_STEPS
from ...schemas.rollout import Group
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import StorageError
from ..policy.policies import MAIN
from ..runtime import JobContext
from ..training.checkpoint_copy import CheckpointCopy
from ..training.parallel import torch_thread
from ..training.policies import Policies, vocab_size
from ..training.step import StepReport
from .memory import GpuTurns, PassTokens, gpu_use_of

T = TypeVar("T")


class Compute:
    """The models of a learner, and the thread that computes with them."""

    def __init__(
        self, context: JobContext, policies: Policies, tokenizer: Any, passes: PassTokens
    ) -> None:
        """`passes` holds the tokens of a pass in each step; a shared GPU is used in turns."""
        self.policies = policies
        self.passes = passes
        self.vocab_size = vocab_size(policies.models[MAIN])
        use = None
        if context.record.is_colocated:
            models = [*policies.models.values()]
            use = gpu_use_of(context.config, models, policies.critics)
        self.gpu = GpuTurns(context, use)
        self.tracer = TorchTracer(context.run_dir / "traces")
        self._context = context
        self._tokenizer = tokenizer
        self._thread = torch_thread(context.config.learner.threads)

    async def train(self, groups: Sequence[Group], record: BatchRecord) -> StepReport:
        """Train one recorded step.

        Later steps use the pass size that this one needed; a smaller size is reported as an event.
        """
        tokens = self.passes.of(record)
        step = partial(
            self.policies.step,
            groups,
            record.step,
            record.oldest,
            record.seqs,
            microbatch_tokens=tokens,
        )
        report = await self._in_thread(self.gpu.freeing(self.tracer.traced(step, record.step)))
        used = self.policies.microbatch_tokens
        self.passes.note(used)
        if used < tokens:
            message = f"out of memory at {tokens} tokens a pass; from now on {used}"
            await self._context.event("microbatch_lowered", message, step=record.step)
        self.tracer.step_done()
        return report

    async def copy(self) -> CheckpointCopy:
        """Copy a checkpoint's contents of the models and their optimisers."""
        return await self._in_thread(partial(self.policies.copy, self._tokenizer))

    def write_form(self, folder: Path) -> None:
        """Write a model folder without weights."""
        self.policies.save_form(folder, tokenizer=self._tokenizer)

    async def read_weights(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Start a function that reads the weights; return its future once training may continue."""
        reading = self.policies.read_beside_training(work)
        if reading is not None:
            return asyncio.wrap_future(reading)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        result.set_result(await self._in_thread(work))
        return result

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


# -- torch's own traces of steps, for chrome://tracing or Perfetto ---------------------------------


class TorchTracer:
    """Traces the next steps of a learner; keeps at most the files of one maximal request."""

    def __init__(self, folder: Path) -> None:
        """Write traces into `folder`, which is created when needed."""
        self._folder = folder
        self._steps_left = 0
        self._files: list[str] = []
        self._waiting: list[asyncio.Future[list[str]]] = []

    def trace_steps(self, steps: int) -> "asyncio.Future[list[str]]":
        """Trace the next steps, together with other requests; the future returns the files."""
        self._steps_left = max(self._steps_left, steps)
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def traced(self, work: Callable[[], T], step: int) -> Callable[[], T]:
        """Wrap the work of a step, called in torch's thread, to trace it if requested."""
        if not self._steps_left:
            return work
        self._steps_left -= 1
        return lambda: self._compute(work, step)

    def step_done(self) -> None:
        """Answer the requests whose last step is traced."""
        if not self._steps_left:
            self.finish()

    def finish(self) -> None:
        """Answer the requests with the files so far; there are no further steps."""
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
        """Write a trace; a failure does not end the run."""
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
