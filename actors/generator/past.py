"""An earlier version of the policy as an opponent: an engine of its own that plays the pool.

The generator holds one of the pool's versions at a time and draws another when the policy has moved
on. The new one is swapped in between two decode steps, as new weights of the policy are: episodes
that run go on with it.
"""

import random

import structlog

from ...broker.weights import WeightStore
from ...schemas.config import SelfPlayConfig
from ...schemas.errors import NotFoundError
from ..job_weights import as_sources
from ..self_play import pool
from .engine import Engine
from .following import WeightFollower

_log = structlog.get_logger()


class PastFollower:
    """Keeps an engine at some earlier version."""

    def __init__(
        self,
        store: WeightStore,
        engine: Engine,
        policy: WeightFollower,
        config: SelfPlayConfig,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._engine = engine
        self._policy = policy
        self._config = config
        self._rng = rng
        self._version = -1

    async def run(self) -> None:
        """Draw and load a version of the pool, time and again, for ever."""
        while True:
            await self._policy.wait_for(0)
            drawn_at = self._policy.version
            await self._draw(drawn_at)
            await self._policy.wait_for(drawn_at + self._config.redraw_every)

    async def _draw(self, version: int) -> None:
        """Load one of the versions that are still there; stay with the old one if none is."""
        there = set(await self._store.versions())
        candidates = [item for item in pool(self._config, version) if item in there]
        if not candidates:
            _log.warning("pool_is_empty", version=version)
            return
        chosen = self._rng.choice(candidates)
        manifest = await self._store.manifest(chosen)
        if chosen == self._version or manifest is None:
            return
        try:
            tensors = await self._store.fetch(manifest)
        except NotFoundError:
            _log.info("weights_gone", version=chosen)
            return  # removed under us: the policy has moved on, and so shall we
        await self._engine.load_weights(chosen, as_sources(tensors), "recompute")
        self._version = chosen
