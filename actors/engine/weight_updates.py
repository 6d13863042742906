"""Weight updates of an engine: fetch the newest version, swap it in, notify who waits for it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import structlog
import torch

from ...broker.weights.payloads import TensorBytes
from ...broker.weights.store import WeightStore
from ...schemas.weights import Manifest
from ...schemas.wire.errors import DeadlineError, EngineError, NotFoundError
from ..weights.job_weights import as_sources
from ..weights.tensors import TensorSource, as_tensor, shape_of
from .engine import Engine, KvOnSwap

_POLL_S = 30.0
_GONE_S = 0.1
_log = structlog.get_logger()


async def load_policies(
    engines: Mapping[str, Engine], version: int, tensors: Mapping[str, TensorBytes], kv: KvOnSwap
) -> None:
    """Make a fetched version the weights of engines, each by its policy."""
    for policy, engine in engines.items():
        await engine.load_weights(version, as_sources(tensors, policy), kv)


Load: TypeAlias = Callable[[KvOnSwap], Awaitable[None]]
"""Makes a version the weights of engines. Raises what `WeightStore.fetch` raises."""


async def fetch_version(
    store: WeightStore, engines: Mapping[str, Engine], manifest: Manifest
) -> Load:
    """Fetch a published version; return what makes it the weights of engines, each by its policy.

    An engine whose workers take it from the learner by themselves does so then, and nothing is
    fetched here. Raises what `WeightStore.fetch` raises.
    """
    only = next(iter(engines.values())) if len(engines) == 1 else None
    if isinstance(only, DirectEngine) and only.takes_from_learner(manifest):
        return partial(only.receive_weights, manifest, store)
    tensors = await store.fetch(manifest)
    return partial(load_policies, engines, manifest.version, tensors)


@runtime_checkable
class DirectEngine(Protocol):
    """An engine whose workers may take versions from the learner, past this process."""

    def takes_from_learner(self, manifest: Manifest) -> bool:
        """Whether they take this one."""
        ...

    async def receive_weights(self, manifest: Manifest, store: WeightStore, kv: KvOnSwap) -> None:
        """Have them take it and make it the engine's weights."""
        ...


class WeightFollower:
    """Keeps engines at the newest published version."""

    def __init__(self, store: WeightStore, engines: Mapping[str, Engine], kv: KvOnSwap) -> None:
        """`engines` by policy."""
        self._store = store
        self._engines = engines
        self._kv: KvOnSwap = kv
        self._changed = asyncio.Condition()
        self.version = -1
        """Version that is loaded; -1 before the first."""

    async def follow_versions(self) -> None:
        """Load every newest version, for ever."""
        while True:
            manifest = await self._store.wait_newer(self.version, timeout_s=_POLL_S)
            if manifest is None:
                continue
            try:
                load = await fetch_version(self._store, self._engines, manifest)
                await load(self._kv)
            except NotFoundError:
                _log.info("weights_gone", version=manifest.version)
                await asyncio.sleep(_GONE_S)  # removed under us: a newer one is out, or comes
                continue
            except DeadlineError as error:  # whatever serves goes on with what it has
                _log.warning("weights_late", version=manifest.version, error=error.message)
                continue
            async with self._changed:
                self.version = manifest.version
                self._changed.notify_all()

    async def wait_for(self, version: int) -> None:
        """Wait until the engine is at `version` or newer."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)


# Which tensors new weights must have: their names, shapes, sizes, and which of them are one.

_NAMES_SHOWN = 8


class WeightNames:
    """The tensors that change from version to version; a tied one has several names."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """`weights` are the tensors themselves by name, on whatever device."""
        self.tensors: list[torch.Tensor] = []
        self.names: list[list[str]] = []
        """The names of each of `tensors`."""
        seen: dict[int, int] = {}
        for name, tensor in weights.items():
            index = seen.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
                self.names.append([])
            self.names[index].append(name)

    def check(self, given: Mapping[str, TensorSource]) -> None:
        """Raise EngineError listing the names that are missing, unknown, or of the wrong shape."""
        known = {name for names in self.names for name in names}
        problems: list[str] = []
        missing = [names[0] for names in self.names if not any(n in given for n in names)]
        extra = sorted(name for name in given if name not in known)
        wrong: list[str] = []
        for live, names in zip(self.tensors, self.names, strict=True):
            for name in names:
                shape = shape_of(given[name]) if name in given else tuple(live.shape)
                if shape != tuple(live.shape):
                    wrong.append(f"{name} {list(shape)}, the model's is {list(live.shape)}")
        for what, names in (("missing", missing), ("unknown", extra), ("wrong shape", wrong)):
            if names:
                more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
                problems.append(f"{what}: {', '.join(names[:_NAMES_SHOWN])}{more}")
        if problems:
            raise EngineError(
                f"the new weights do not fit the model: {'; '.join(problems)}",
                hint="learner and generator must run the same model",
            )

    def once(self, given: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Return each tensor under one of its names.

        Raises EngineError for a dtype or size that cannot be, and where names of one tensor are
        given different ones.
        """
        once: dict[str, TensorSource] = {}
        for names in self.names:
            first, *others = [name for name in names if name in given]
            once[first] = given[first]
            for other in others:
                both = [as_tensor(given[name]).float() for name in (first, other)]
                if not torch.equal(*both):
                    raise EngineError(
                        f"{first} and {other} are one tensor in this model, the new weights give "
                        "two",
                        hint="learner and generator must both tie their embeddings",
                    )
        return once
