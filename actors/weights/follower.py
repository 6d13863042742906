"""The receiver's side: engines follow the published versions of weights.

`WeightFollower` fetches the newest version, loads it into the engines, and wakes waiting tasks. A
validation pins the engines to its version; newer versions wait until it has ended. The engines
return to an older version once no running episode began with a newer one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import structlog

from ...schemas.weights import Manifest
from ...schemas.wire.errors import DeadlineError, NotFoundError
from ..policy.policies import MAIN, prefix_of
from .store import WeightStore
from .tensors import TensorSource

_POLL_S = 30.0
_PUBLISHED_POLL_S = 2.0
_REMOVED_PAUSE_S = 0.1
_log = structlog.get_logger()


KvOnSwap = Literal["keep", "recompute"]
"""Handling of running requests' keys and values at new weights: keep them, or recompute them."""


class LoadsWeights(Protocol):
    """An engine that loads new weights; see `actors.engine.engine.Engine`."""

    @property
    def has_weights(self) -> bool:
        """Whether it has weights to compute with."""
        ...

    async def load_weights(
        self, version: int, tensors: Mapping[str, TensorSource], kv: KvOnSwap = "keep"
    ) -> None:
        """Load a version as the engine's weights."""
        ...


@runtime_checkable
class DirectEngine(Protocol):
    """An engine whose workers may receive versions directly from the learner."""

    def takes_from_learner(self, manifest: Manifest) -> bool:
        """Return whether its workers receive this version."""
        ...

    async def receive_weights(self, manifest: Manifest, store: WeightStore, kv: KvOnSwap) -> None:
        """Receive a version in the workers as the engine's weights."""
        ...


Load: TypeAlias = Callable[[KvOnSwap], Awaitable[None]]
"""Loads a version into engines. Raises what `WeightStore.fetch` raises."""


async def fetch_version(
    store: WeightStore, engines: Mapping[str, LoadsWeights], manifest: Manifest
) -> Load:
    """Fetch a published version; return the function that loads it into engines, by policy.

    Nothing is fetched for an engine whose workers receive the version themselves, during loading.
    Raises what `WeightStore.fetch` raises.
    """
    only = next(iter(engines.values())) if len(engines) == 1 else None
    if isinstance(only, DirectEngine) and only.takes_from_learner(manifest):
        return partial(only.receive_weights, manifest, store)
    tensors = await store.fetch(manifest)

    async def load(kv: KvOnSwap) -> None:
        for policy, engine in engines.items():
            await engine.load_weights(manifest.version, of_policy(tensors, policy), kv)

    return load


def of_policy(tensors: Mapping[str, TensorSource], policy: str = MAIN) -> dict[str, TensorSource]:
    """Return the tensors of one policy by the names in its model."""
    prefix = prefix_of(policy)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if (name.startswith(prefix) if prefix else "/" not in name)
    }


class WeightFollower:
    """Keeps engines at the newest published version."""

    def __init__(
        self, store: WeightStore, engines: Mapping[str, LoadsWeights], kv: KvOnSwap
    ) -> None:
        """`engines` by policy."""
        self._store = store
        self._engines = engines
        self._kv: KvOnSwap = kv
        self._changed = asyncio.Event()
        self._swap = asyncio.Lock()
        self._pinned: int | None = None
        self._may_load = asyncio.Event()
        """Cleared while a training learner on the same GPU leaves no room for weights."""
        self._may_load.set()
        self._num_users = 0
        self._newest = -1
        self.version = -1
        """The loaded version; -1 before the first."""

    async def follow_versions(self) -> None:
        """Load every newest version, forever."""
        while True:
            manifest = await self._newer()
            if manifest is None:
                continue
            try:
                load = await fetch_version(self._store, self._engines, manifest)
                await self._advance(manifest.version, load)
            except NotFoundError:
                _log.info("weights_gone", version=manifest.version)
                await asyncio.sleep(_REMOVED_PAUSE_S)  # a newer version exists or will
                continue
            except DeadlineError as error:  # engines continue with the loaded version
                _log.warning("weights_late", version=manifest.version, error=error.message)
                continue

    async def wait_for(self, version: int) -> None:
        """Wait until the engines are at `version` or newer."""
        await self._until(lambda: self.version >= version)

    def hold(self) -> None:
        """Stop loading versions until `release`."""
        self._may_load.clear()

    def release(self) -> None:
        """Resume loading versions."""
        self._may_load.set()

    async def until_room(self) -> None:
        """Wait until there is room for new weights."""
        await self._may_load.wait()

    def may_give_up(self, engine: LoadsWeights) -> bool:
        """Return whether a sleeping engine may drop its weights, as another version will come.

        Not while it is pinned, for example for a validation, or if its versions come from another
        job.
        """
        is_own = any(engine is followed for followed in self._engines.values())
        return is_own and self._pinned is None and self.version >= 0

    @property
    def has_weights(self) -> bool:
        """Whether all engines have weights."""
        return all(engine.has_weights for engine in self._engines.values())

    async def regain(self) -> bool:
        """Reload the current version if engines have dropped their weights.

        This happens after a restart of the learner, or if engines were pinned meanwhile. The
        learner must have the version already: while training towards it, it would wait for these
        engines. Returns False if the version cannot be fetched now.
        """
        async with self._swap:
            if self.has_weights:
                return True
            version = self.version
            try:
                await self._load(version, await self._fetch(version))
            except (NotFoundError, DeadlineError) as error:
                _log.warning("weights_not_regained", version=version, error=error.message)
                return False
            return True

    async def may_wake(self, version: int) -> None:
        """Wait until sleeping engines may wake: at `version` or newer, or pinned."""
        await self._until(lambda: self.version >= version or self._pinned is not None)

    @asynccontextmanager
    async def using(self, version: int) -> AsyncIterator[None]:
        """Wait for `version` or newer; within the block, engines do not go below it."""
        await self._until(lambda: self.version >= version and not self.is_back)
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._notify()

    async def pin(self, version: int) -> None:
        """Load exactly this version, and pin the engines to it until `unpin`; one pin at a time.

        Waits until the version is published. Raises NotFoundError if it was removed, and what
        `WeightStore.fetch` raises; then no version is pinned.
        """
        assert self._pinned is None, f"version {self._pinned} is pinned already"
        self._pinned = version
        self._notify()
        try:
            async with self._swap:
                if self.version != version:
                    load = await self._fetch(version)
                    if version < self.version:
                        await self._until(lambda: self._num_users == 0)
                    await self._load(version, load)
        except BaseException:
            self.unpin()
            raise

    def unpin(self) -> None:
        """Let the engines load newer versions again."""
        self._pinned = None
        self._notify()

    @property
    def is_back(self) -> bool:
        """Whether the engines are at an older version than before, or will be."""
        return self.version < self._newest or (
            self._pinned is not None and self._pinned < self._newest
        )

    async def caught_up(self) -> None:
        """Wait until the engines are at their newest version again."""
        await self._until(lambda: not self.is_back)

    async def _newer(self) -> Manifest | None:
        """Wait for a version newer than the loaded one; None: retry, as after a return."""
        version = self.version
        newer = asyncio.ensure_future(self._store.wait_newer(version, timeout_s=_POLL_S))
        back = asyncio.ensure_future(
            self._until(lambda: self.version < version and self._pinned is None)
        )
        try:
            await asyncio.wait({newer, back}, return_when=asyncio.FIRST_COMPLETED)
            return newer.result() if newer.done() else None
        finally:
            newer.cancel()
            back.cancel()

    async def _advance(self, version: int, load: Load) -> None:
        """Load a version if it is newer, once none is pinned."""
        while True:
            await self._until(lambda: self._pinned is None)
            async with self._swap:
                if self._pinned is None:
                    if version > self.version:
                        await self._load(version, load)
                    return

    async def _load(self, version: int, load: Load) -> None:
        await self.until_room()
        await load("recompute" if version < self.version else self._kv)
        self.version = version
        self._newest = max(self._newest, version)
        self._notify()

    async def _fetch(self, version: int) -> Load:
        """Fetch a version once it is published; return the function that loads it."""
        manifest = await self._store.manifest(version)
        while manifest is None:
            latest = await self._store.latest()
            if latest is not None and latest.version > version:
                raise NotFoundError(
                    f"the weights of version {version} were removed, the newest is "
                    f"{latest.version}",
                    hint="ask for the newest version, or evaluate a checkpoint",
                )
            await self._store.wait_newer(version - 1, timeout_s=_PUBLISHED_POLL_S)
            manifest = await self._store.manifest(version)
        return await fetch_version(self._store, self._engines, manifest)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake all waiting tasks, which check their conditions."""
        self._changed.set()
        self._changed = asyncio.Event()
