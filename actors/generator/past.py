"""An earlier version as an opponent: engines of its own, one per policy, that play the pool.

The generator holds one of the pool's versions at a time and draws another when the policy has moved
on. The new one is swapped in between two decode steps, as new weights of the policy are: episodes
that run go on with it.
"""

import random
from collections.abc import Mapping

import structlog

from ...broker.weights import WeightStore
from ...schemas.config import SelfPlayConfig
from ...schemas.errors import NotFoundError
from ..self_play import pool
from .engine import Engine
from .following import WeightFollower, load_policies

_log = structlog.get_logger()


class PastFollower:
    """Keeps engines at some earlier version."""

    def __init__(
        self,
        store: WeightStore,
        engines: Mapping[str, Engine],
        policy: WeightFollower,
        config: SelfPlayConfig,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._engines = engines
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
        await load_policies(self._engines, chosen, tensors, "recompute")
        self._version = chosen
