"""The sender's side: a learner publishes the versions of its job's weights.

`Publisher` copies the weights at once and sends the copy in the background, so that training
continues. `store` decides a version's transport, form and lifetime.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from typing import Literal

import torch

from ...broker.client.rpc import call
from ...schemas.config.job import JobConfig
from ...schemas.local.disk import with_room
from ...schemas.weights import WeightsBound, WeightsRoom
from ...schemas.wire.errors import StorageError
from ...schemas.wire.subjects import rpc
from ..policy.devices import own_device
from ..runtime import JobContext
from .job_weights import make_sender, open_weights
from .shared_memory import UnfinishedFile, is_in_memory
from .store import NEWEST, room_for
from .tensors import CopiedWeights

_RESERVE_S = 60.0

Read = Callable[[Callable[[], CopiedWeights]], "Awaitable[asyncio.Future[CopiedWeights]]"]
"""Starts a function that reads the weights; returns its future once training may continue."""
TakeSnapshot = Callable[[torch.dtype, UnfinishedFile | None], CopiedWeights]


class Publisher:
    """Publishes the versions of a job's policies."""

    def __init__(
        self,
        context: JobContext,
        snapshot: TakeSnapshot,
        snapshot_bytes: Callable[[torch.dtype], int],
        *,
        kind: Literal["full", "lora"],
        num_evaluated: int,
    ) -> None:
        """`snapshot` copies the tensors that change between versions, into a file if given.

        The copy has `snapshot_bytes`. At most `num_evaluated` versions wait for an evaluation.
        """
        config = self._config = context.config
        self._context = context
        self._service = context.service
        self._missing = context.missing
        self._sender = make_sender(context)
        self._store = open_weights(context, self._sender)
        self._snapshot = snapshot
        self._kind: Literal["full", "lora"] = kind
        on_gpu = own_device().type == "cuda"
        self._dtype: torch.dtype = getattr(torch, config.published_dtype(on_gpu=on_gpu))
        self._num_bytes = snapshot_bytes(self._dtype)
        differences = config.weights.differences and self._dtype.itemsize == 2
        self._num_versions = num_versions(config, num_evaluated, differences=differences)
        self._sending: asyncio.Task[None] | None = None
        self._pinned: set[int] = set()
        self.sending_bytes = 0
        """Bytes of the copy being sent, if they are in this process's memory."""
        self.send_s = 0.0
        """Duration of the last transfer; training continued meanwhile."""

    async def reserve(self) -> None:
        """Reserve room for all versions that may be needed at the same time.

        Raises BrokerError, QuotaError or StorageError if the room does not suffice for a run.
        """
        if self._sender is not None:
            return
        await self._store.sweep()
        most, least = (room_for(number, self._num_bytes) for number in self._num_versions)
        bound = await self._store.bound_bytes()
        is_file = self._config.weights.transport == "file"
        if is_file and bound < least:
            raise StorageError(
                f"the versions of weights need {least:,} bytes, and the disk of weights.folder "
                f"has room for {bound:,}",
                hint="free some space, name another folder, or set learner.publish_dtype=bfloat16",
            )
        if not is_file and bound < most:
            scope = self._context.scope
            await call(
                self._context.broker,
                rpc(scope.user, "scheduler", "weights-room"),
                WeightsRoom(job=scope.job, wanted_bytes=most, least_bytes=least),
                WeightsBound,
                timeout_s=_RESERVE_S,
                waiting_for="room for versions of weights",
                idempotent=True,
            )

    async def retract(self, behind: int) -> None:
        """Remove the versions after `behind`, which no recorded step has made."""
        await self._store.retract(behind)

    async def publish(self, version: int, read: Read, *, keep: Callable[[], Set[int]]) -> None:
        """Publish the model as `version`, after the previous publication has ended.

        `keep` returns the currently needed versions; it is called whenever room is needed.
        """
        await self.wait()
        if await self._store.is_out(version):
            return
        copying = await read(self._copy)
        self._pinned &= keep()
        self._sending = asyncio.create_task(
            self._send(version, copying, keep), name=f"weights {version}"
        )
        if version == 0:
            await self.wait()

    def _copy(self) -> CopiedWeights:
        """Copy the models; without a GPU into shared memory, if there is room."""
        draft = None if own_device().type == "cuda" else self._store.draft(self._num_bytes)
        return self._snapshot(self._dtype, draft)

    async def serve(self) -> None:
        """Send versions from this process's memory, for `nccl` only; runs forever."""
        if self._sender is not None:
            await self._sender.open(self._service)
            await self._sender.serve()

    async def has(self, version: int) -> bool:
        """Return whether a version can be fetched now."""
        return await self._store.manifest(version) is not None

    def pin(self, version: int) -> None:
        """Keep a version until its evaluation is reported."""
        self._pinned.add(version)

    async def wait(self) -> None:
        """Wait until the last publication is done; raises its error."""
        if self._sending is not None:
            await self._sending
            self._sending = None

    async def _send(
        self, version: int, copying: "asyncio.Future[CopiedWeights]", keep: Callable[[], Set[int]]
    ) -> None:
        tensors = await copying

        async def publish() -> None:
            await self._store.make_room(tensors, self._pinned | keep())
            await self._store.publish(version, tensors, kind=self._kind)

        started = time.perf_counter()
        views = (tensor.data for tensor in tensors.values())
        self.sending_bytes = sum(view.nbytes for view in views if not is_in_memory(view))
        await with_room(publish, f"the weights of version {version}", self._missing)
        self.sending_bytes = 0
        self.send_s = time.perf_counter() - started
        await self._store.keep(self._pinned | keep(), newest=NEWEST)


def num_versions(config: JobConfig, num_evaluated: int, *, differences: bool) -> tuple[int, int]:
    """Return how many whole versions may be needed at a time, and the minimum for a run.

    Needed are the newest two versions, the one being stored, versions in evaluation, and opponents
    in self-play; with differences also their anchors. With room for the newest, the next, one in
    evaluation, and the opponents, a run continues more slowly.
    """
    opponents = config.self_play.pool_size if config.self_play.past_share else 0
    evaluated = int(config.validates)
    anchors = 1 + evaluated + opponents if differences else 0
    most = 3 + num_evaluated * evaluated + opponents + anchors
    return most, 2 + evaluated + opponents + anchors
