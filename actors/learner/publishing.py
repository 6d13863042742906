"""Publishing new weights: snapshot at once, send in the background, remove what nobody needs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ...broker.disk.room import with_room
from ...broker.weights.store import TensorBytes
from ..job_weights import make_sender, open_weights
from ..models.lora import has_adapter
from ..models.policies import MAIN
from ..runtime import JobContext

_KEEP_NEWEST = 2
InTorch = Callable[[Callable[[], Any]], Awaitable[Any]]
Snapshot = Callable[[torch.dtype], dict[str, TensorBytes]]


class Publisher:
    """Publishes the versions of a job's policies."""

    def __init__(
        self, context: JobContext, models: Mapping[str, nn.Module], snapshot: Snapshot
    ) -> None:
        """`models` by policy; `snapshot` copies what changes of them."""
        config = context.config
        self._service = context.service
        self._missing = context.missing
        self._sender = make_sender(context)
        self._store = open_weights(context, self._sender)
        self._snapshot = snapshot
        self._kind: Literal["full", "lora"] = "lora" if has_adapter(models[MAIN]) else "full"
        self._dtype: torch.dtype = getattr(torch, config.learner.publish_dtype)
        self._sending: asyncio.Task[None] | None = None
        self._pinned: set[int] = set()
        self.send_s = 0.0
        """Seconds that the last sending took, beside training."""

    async def publish(self, version: int, in_torch: InTorch, *, keep: Set[int]) -> None:
        """Publish the model as `version`; an earlier publication is waited for first."""
        await self.wait()
        if await self._store.is_out(version):
            return
        tensors = await in_torch(lambda: self._snapshot(self._dtype))
        self._pinned &= set(keep)
        self._sending = asyncio.create_task(
            self._send(version, tensors, set(keep)), name=f"weights {version}"
        )
        if version == 0:
            await self.wait()

    async def serve(self) -> None:
        """Hand out versions, by the transport that takes them from here; to be run beside all."""
        if self._sender is not None:
            await self._sender.open(self._service)
            await self._sender.serve()

    async def has(self, version: int) -> bool:
        """Whether a version can be fetched now."""
        return await self._store.manifest(version) is not None

    def pin(self, version: int) -> None:
        """Keep a version until its evaluation is reported."""
        self._pinned.add(version)

    async def wait(self) -> None:
        """Wait until the last publication is out; raise what it raised."""
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _send(self, version: int, tensors: dict[str, TensorBytes], keep: set[int]) -> None:
        started = time.perf_counter()
        publish = partial(self._store.publish, version, tensors, kind=self._kind)
        await with_room(publish, f"the weights of version {version}", self._missing)
        self.send_s = time.perf_counter() - started
        await self._store.keep(self._pinned | keep, newest=_KEEP_NEWEST)
