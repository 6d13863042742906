"""An earlier version as an opponent: engines of its own, one per policy, that play the pool.

The generator holds one of the pool's versions at a time and draws another when the policy has moved
on. The new one is swapped in between two decode steps, as new weights of the policy are: episodes
that run go on with it.
"""

import random
from collections.abc import Mapping

import structlog

from ...broker.weights.store import WeightStore
from ...schemas.config.sections import SelfPlayConfig
from ...schemas.wire.errors import NotFoundError
from ..engine.engine import Engine
from ..engine.weight_updates import WeightFollower, load_policies
from ..rollout.self_play import pool

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
        candidates = pool(self._config, version)
        self._rng.shuffle(candidates)
        for chosen in candidates:
            if chosen == self._version or await self._load(chosen):
                return
        _log.warning("pool_is_empty", version=version)

    async def _load(self, version: int) -> bool:
        """Load a version; False when it has been removed, for the policy has moved on."""
        manifest = await self._store.manifest(version)
        if manifest is None:
            return False
        try:
            tensors = await self._store.fetch(manifest)
        except NotFoundError:
            return False
        await load_policies(self._engines, version, tensors, "recompute")
        self._version = version
        return True
