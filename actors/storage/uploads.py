"""Brings each checkpoint of a learner to its store, while training goes on.

A checkpoint that waits is held by hard links in `uploading/` of the run's folder: the run may
remove its own meanwhile. While one is on its way only the newest of the others waits. What fails is
tried again for ever: until a checkpoint is in the store, the log is not trimmed behind it.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...broker.disk.run_folder import Folder
from ...schemas.wire.errors import TinkermqError
from ..runtime import JobContext
from .bases import name_bases_by_url
from .checkpoint_mirror import CheckpointMirror

_PAUSE_S = 5.0


class Uploads:
    """The checkpoints of one learner on their way to the store."""

    def __init__(
        self,
        context: JobContext,
        mirror: CheckpointMirror,
        uploaded: Callable[[], Awaitable[None]],
    ) -> None:
        """`uploaded` is called whenever a checkpoint has come into the store."""
        self._context = context
        self._mirror = mirror
        self._uploaded = uploaded
        self._folder = context.run_dir / "uploading"
        self._waiting: tuple[int, int, Path] | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._begun = asyncio.Event()
        self.trouble: TinkermqError | None = None
        self.first_seqs: dict[int, int] = {}
        """By step of the checkpoints that are in the store: the first log entry behind each."""

    @property
    def missing(self) -> str:
        """What is waited for while an upload fails."""
        return f"the store {self._mirror.store.url} for a checkpoint"

    async def begin(self, local: dict[int, int]) -> list[int]:
        """Look which local checkpoints (step: first log entry) are in the store; return the others.

        Raises StorageError for a store that cannot be written.
        """
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        there = {one.step for one in await asyncio.to_thread(self._mirror.whole)}
        self.first_seqs = {step: seq for step, seq in local.items() if step in there}
        self._idle.set()
        self._begun.set()
        return [step for step in local if step not in there]

    async def take(self, step: int, first_seq: int, folder: Path) -> None:
        """Upload a checkpoint when its turn comes; it may be removed from where it is."""
        await self._begun.wait()
        held = self._folder / f"{folder.name}.{first_seq}"
        await asyncio.to_thread(link_tree, folder, held)
        await asyncio.to_thread(name_bases_by_url, held)
        left, self._waiting = self._waiting, (step, first_seq, held)
        self._idle.clear()
        self._changed.set()
        if left is not None and left[2] != held:
            await asyncio.to_thread(shutil.rmtree, left[2], ignore_errors=True)

    async def run(self) -> None:
        """Upload what is taken, for ever."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while self._waiting is not None:
                    one, self._waiting = self._waiting, None
                    await self._upload(*one)
                self._idle.set()
        finally:
            self._mirror.store.close()

    async def _upload(self, step: int, first_seq: int, held: Path) -> None:
        """Upload one, trying again until it is there or a newer one waits."""
        while self._waiting is None or self.trouble is None:
            try:
                await asyncio.to_thread(self._mirror.upload, step, held)
            except TinkermqError as error:
                await self._failed(step, error)
                continue
            self.trouble = None
            self.first_seqs[step] = first_seq
            await self._context.event("checkpoint_uploaded", self._mirror.store.url, step=step)
            await self._uploaded()
            break
        await asyncio.to_thread(shutil.rmtree, held, ignore_errors=True)

    async def _failed(self, step: int, error: TinkermqError) -> None:
        first, self.trouble = self.trouble is None, error
        if first:
            await self._context.event("checkpoint_upload_failed", str(error), step=step)
        with self._context.missing(self.missing):
            await asyncio.sleep(_PAUSE_S)

    async def finished(self, deadline_s: float) -> bool:
        """Wait until all that was taken is in the store; return whether it is."""
        try:
            async with asyncio.timeout(deadline_s):
                with self._context.waiting(f"the upload to {self._mirror.store.url}"):
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True


def link_tree(source: Path, target: Path) -> None:
    """Give all files of a folder a second name in a new folder. Raises OSError, StorageError."""
    shutil.rmtree(target, ignore_errors=True)
    with Folder(source.parent) as here, Folder(target.parent, make=True) as there:
        here.copy(source.name, there, target.name, link=True)
