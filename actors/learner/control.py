"""Control requests to the learner: pause, resume, checkpoint, stop, tasks, reservations."""

import asyncio
from collections.abc import Callable
from typing import Any

from ...schemas.control import (
    ControlRequest,
    PublishTasksReply,
    PublishTasksRequest,
    ReserveReply,
    ReserveRequest,
)
from ..runtime import JobContext
from ..training.torch_trace import TorchTracer
from .intake import Intake
from .tasks import TaskIssuer

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
            "reserve", f"{subject}.reserve", ReserveRequest, self._reserve
        )
        await context.service.endpoint(
            "tasks", f"{subject}.tasks", PublishTasksRequest, self._tasks
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

    async def _control(self, request: ControlRequest) -> dict[str, Any]:
        context = self._context
        if request.verb == "stop":
            context.stop_asked = True
            context.stopping.set()
        elif request.verb in ("pause", "resume"):
            self.paused = request.verb == "pause"
            context.set_state("paused" if self.paused else "working")
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

    async def _reserve(self, request: ReserveRequest) -> ReserveReply:
        await self._issuer.check_owner()
        return ReserveReply(
            tasks=self._issuer.reserve(request, self._version()),
            group_size=self._context.config.rollout.group_size,
            version=self._version(),
            vocab_size=self._vocab_size,
            max_tokens=self._context.config.rollout.max_tokens,
        )

    async def _tasks(self, request: PublishTasksRequest) -> PublishTasksReply:
        queued = await self._issuer.publish_for_client(request, self._version())
        return PublishTasksReply(queued=queued)

    def _wake(self) -> None:
        self.changed.set()
        self._intake.changed.set()
