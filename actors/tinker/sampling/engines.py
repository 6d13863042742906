"""Whatever adapters are sampled from, beside one base model in one engine.

A bounded number of them is in the engine at a time. A request for another one takes the place of
that which was idle for longest; where requests run with all of them it waits.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from ...generator.engine.engine import AdapterEngine


@dataclass
class _Place:
    """An adapter in the engine, or on its way there."""

    ready: "asyncio.Task[None]"
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class SampledAdapters:
    """The adapters in an engine."""

    def __init__(self, engine: AdapterEngine, most: int) -> None:
        """Hold at most so many beside the base model of `engine`."""
        self._engine = engine
        self._most = most
        self._places: dict[str, _Place] = {}
        self._changed = asyncio.Condition()

    @property
    def num_held(self) -> int:
        """Adapters in the engine."""
        return len(self._places)

    @contextlib.asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncIterator[str]:
        """Give the engine's name of the adapter of a folder, while the block runs; "": the base.

        Raises ModelError for a folder that holds none, or one that does not fit the base.
        """
        if folder is None:
            yield ""
            return
        name = str(folder)
        place = await self._take(name, folder)
        try:
            await asyncio.shield(place.ready)
            yield name
        finally:
            await self._leave(name, place)

    async def _take(self, name: str, folder: Path) -> _Place:
        async with self._changed:
            while (place := self._places.get(name)) is None and not self._has_room():
                await self._changed.wait()
            if place is None:
                ready = asyncio.create_task(self._engine.add_adapter(name, folder), name=name)
                place = self._places[name] = _Place(ready)
            place.users += 1
            return place

    def _has_room(self) -> bool:
        """Whether there is a place, maybe that of an adapter that is idle."""
        if len(self._places) < self._most:
            return True
        idle = [name for name, place in self._places.items() if not place.users]
        if not idle:
            return False
        oldest = min(idle, key=lambda name: self._places[name].used)
        del self._places[oldest]
        self._engine.drop_adapter(oldest)
        return True

    async def _leave(self, name: str, place: _Place) -> None:
        place.users -= 1
        place.used = time.monotonic()
        failed = place.ready.done() and (
            place.ready.cancelled() or place.ready.exception() is not None
        )
        if failed and self._places.get(name) is place:
            del self._places[name]  # the next one tries again
        async with self._changed:
            self._changed.notify_all()
