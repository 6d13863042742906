"""The checkpoints of one job in the broker, for machines that have no disk and no store in common.

They are objects of a bucket of the job's own, which `limits.checkpoint_bytes` bounds. Calls block,
as those of a store by URL do, and are made in threads; the loop of the process carries them.
"""

import asyncio
import contextlib
import mmap
import os
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar

from ...broker.client.connection import Broker
from ...broker.jetstream.objects import ObjectInfo, ObjectStore
from ...broker.jetstream.streams import (
    WEIGHTS_BYTES,
    delete_stream,
    ensure_stream,
    job_streams,
    stream_info,
)
from ...schemas.config.job import LimitsConfig
from ...schemas.config.sections import BROKER
from ...schemas.wire.errors import BrokerError, NotFoundError, StoreAwayError
from ...schemas.wire.subjects import JobScope
from .url_store import StoredObject

T = TypeVar("T")
_DEADLINE_S = 600.0
_BUCKET_ROOM_BYTES = 4 << 20


class BrokerStore:
    """What a job has in its bucket of checkpoints."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        below: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Reach nothing yet; to be made on the loop of the connection, or with that named.

        `below` is the path in the bucket that names are relative to.
        """
        self.url = f"{BROKER}runs/{scope.user}/{scope.job}/{below}".rstrip("/") if below else BROKER
        self._broker, self._scope = broker, scope
        self._below = f"{below}/" if below else ""
        self._objects = ObjectStore(broker, scope.object_checkpoints)
        self._loop = loop or asyncio.get_running_loop()
        self._running: set[Future[Any]] = set()
        self._closed = False

    def close(self) -> None:
        """End what is under way, with its error."""
        self._closed = True
        for one in list(self._running):
            one.cancel()

    def make_room(self, num_bytes: int) -> None:
        """Let the bucket, made if it is missing, hold so much more. Raises StoreAwayError."""
        making = _grow_bucket(self._broker, self._scope, num_bytes)
        self._wait(f"make room for {num_bytes:,} bytes", making)

    def remove(self) -> None:
        """Delete the job's bucket with all that it holds. Raises StoreAwayError."""
        bucket = f"OBJ_{self._scope.object_checkpoints}"
        self._wait("remove its bucket", delete_stream(self._broker, bucket))

    def put(self, name: str, content: Path | bytes) -> None:
        """Store a file or bytes under a name. Raises StoreAwayError, also when it is full."""
        views = [memoryview(content)] if isinstance(content, bytes) else _mapped(content)
        self._wait(f"write {name}", self._put(name, views))

    def fetch(self, name: str, num_bytes: int, target: Path) -> None:
        """Write an object of that size to a file.

        Raises NotFoundError, StoreAwayError, OSError for the file.
        """
        info = self._wait(f"read {name}", self._objects.info(self._below + name))
        if info is None or info.num_bytes != num_bytes:
            raise NotFoundError(f"{self.url} has no {name} any more", hint="take another one")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w+b") as file:
            if num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk is told here
                view = memoryview(mmap.mmap(file.fileno(), num_bytes))
                reading = self._objects.get_into(info, view, deadline_s=_DEADLINE_S)
                self._wait(f"read {name}", reading)

    def objects(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects below a prefix, by name. Raises StoreAwayError."""
        infos = self._wait("list what it has", self._objects.infos())
        below = self._below + (f"{prefix}/" if prefix else "")
        told = (_told(one, self._below) for one in infos if one.name.startswith(below))
        return sorted(told)

    def delete(self, names: list[str]) -> None:
        """Remove objects; one that has gone is no error. Raises StoreAwayError."""
        for name in names:
            self._wait(f"remove {name}", self._objects.delete(self._below + name))

    def _put(self, name: str, views: list[memoryview]) -> Coroutine[Any, Any, ObjectInfo]:
        return self._objects.put(self._below + name, views, deadline_s=_DEADLINE_S)

    def _wait(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise StoreAwayError(f"{self.url} was closed", hint="nothing to do: its actor ends")
        doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(doing)
        try:
            return doing.result()
        except (BrokerError, CancelledError) as error:
            raise StoreAwayError(
                f"{self.url} could not {what}: {error}",
                hint="limits.checkpoint_bytes must have room for training.keep_last + 2 "
                "checkpoints, and the broker's disk for all that is in it",
            ) from error
        finally:
            self._running.discard(doing)


def _mapped(file: Path) -> list[memoryview]:
    """Return the content of a file, read when it is needed."""
    with file.open("rb") as opened:
        if not file.stat().st_size:
            return []
        return [memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))]


def _told(info: ObjectInfo, below: str) -> StoredObject:
    return StoredObject(info.name.removeprefix(below), info.num_bytes, info.digest)


async def _grow_bucket(broker: Broker, scope: JobScope, num_bytes: int) -> None:
    """Let the bucket of a job's checkpoints, made if it is missing, hold so many bytes more.

    For what a job begins with, before it starts; `create_job_streams` then sets its own bound.
    Raises BrokerError when the server has no room, DeadlineError.
    """
    name = f"OBJ_{scope.object_checkpoints}"
    configs = job_streams(scope, LimitsConfig(), WEIGHTS_BYTES)
    config = next(one for one in configs if one["name"] == name)
    held = 0
    with contextlib.suppress(NotFoundError):
        held = int((await stream_info(broker, name))["state"]["bytes"])
    room = num_bytes + num_bytes // 50 + _BUCKET_ROOM_BYTES
    await ensure_stream(broker, {**config, "max_bytes": held + room})
