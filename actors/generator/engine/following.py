"""Following the learner's weights: fetch what is newest, swap it in, tell who waits for it."""

import asyncio
from collections.abc import Mapping

import structlog

from ....broker.weights.store import TensorBytes, WeightStore
from ....schemas.wire.errors import DeadlineError, NotFoundError
from ...job_weights import as_sources
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

    async def run(self) -> None:
        """Load every newest version, for ever."""
        while True:
            manifest = await self._store.wait_newer(self.version, timeout_s=_POLL_S)
            if manifest is None:
                continue
            try:
                tensors = await self._store.fetch(manifest)
            except NotFoundError:
                _log.info("weights_gone", version=manifest.version)
                await asyncio.sleep(_GONE_S)  # removed under us: a newer one is out, or comes
                continue
            except DeadlineError as error:  # whatever serves goes on with what it has
                _log.warning("weights_late", version=manifest.version, error=error.message)
                continue
            await load_policies(self._engines, manifest.version, tensors, self._kv)
            async with self._changed:
                self.version = manifest.version
                self._changed.notify_all()

    async def wait_for(self, version: int) -> None:
        """Wait until the engine is at `version` or newer."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version >= version)
