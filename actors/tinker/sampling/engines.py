"""Whatever adapters are sampled from, beside one base model in one engine.

A bounded number of them is in the engine at a time. A request for another one takes the place of
that which was idle for longest; where requests run with all of them it waits. One whose samples
move on takes newer weights in its place, while they run.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...generator.engine.engine import AdapterEngine
from .snapshots import Snapshot


@dataclass
class _Place:
    """An adapter in the engine, or on its way there."""

    snapshot: Snapshot
    ready: "asyncio.Task[None]"
    users: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def has_failed(self) -> bool:
        done = self.ready.done()
        return done and (self.ready.cancelled() or self.ready.exception() is not None)


class SampledAdapters:
    """The adapters in an engine."""

    def __init__(
        self,
        engine: AdapterEngine,
        most: int,
        fetch: Callable[[Snapshot], Awaitable[Path]],
        free: Callable[[Snapshot], None],
    ) -> None:
        """Hold at most so many beside the base model of `engine`.

        `fetch` gives the folder of one, which is there until it is given to `free`.
        """
        self._engine = engine
        self._most = most
        self._fetch = fetch
        self._free = free
        self._places: dict[str, _Place] = {}
        self._changed = asyncio.Condition()

    @property
    def num_held(self) -> int:
        """Adapters in the engine."""
        return len(self._places)

    def moving(self) -> list[Snapshot]:
        """Return those that samples are drawn with now and that may move on."""
        return [
            place.snapshot
            for place in self._places.values()
            if place.users and place.snapshot.source.moves
        ]

    @contextlib.asynccontextmanager
    async def using(self, snapshot: Snapshot | None) -> AsyncIterator[str]:
        """Give the engine's name of an adapter while the block runs; None and "": the base.

        Raises ModelError for what is no adapter, or one that does not fit the base.
        """
        if snapshot is None:
            yield ""
            return
        place = await self._take(snapshot)
        try:
            await asyncio.shield(place.ready)
            yield snapshot.name
        finally:
            await self._leave(place)

    async def _take(self, snapshot: Snapshot) -> _Place:
        name = snapshot.name
        async with self._changed:
            while (place := self._places.get(name)) is None and not self._has_room():
                await self._changed.wait()
            if place is None:
                place = _Place(snapshot, asyncio.create_task(self._load(snapshot), name=name))
                self._places[name] = place
            elif snapshot.version > place.snapshot.version:
                moved = self._move(place.ready, place.snapshot, snapshot)
                place.snapshot, place.ready = snapshot, asyncio.create_task(moved, name=name)
            place.users += 1
            return place

    async def _load(self, snapshot: Snapshot) -> None:
        folder = await self._fetch(snapshot)
        await self._engine.add_adapter(snapshot.name, folder, snapshot.version)

    async def _move(self, before: "asyncio.Task[None]", old: Snapshot, new: Snapshot) -> None:
        """Let requests that have the old weights, and later ones, have the new ones."""
        await asyncio.wait({before})
        await self._load(new)
        self._free(old)

    def _has_room(self) -> bool:
        """Whether there is a place, maybe that of an adapter that is idle."""
        if len(self._places) < self._most:
            return True
        idle = [place for place in self._places.values() if not place.users]
        if not idle:
            return False
        self._drop(min(idle, key=lambda place: place.used))
        return True

    def _drop(self, place: _Place) -> None:
        del self._places[place.snapshot.name]
        place.ready.cancel()  # nobody waits for it any more
        self._engine.drop_adapter(place.snapshot.name)
        self._free(place.snapshot)

    async def _leave(self, place: _Place) -> None:
        place.users -= 1
        place.used = time.monotonic()
        if place.has_failed and self._places.get(place.snapshot.name) is place:
            self._drop(place)  # the next one tries again
        async with self._changed:
            self._changed.notify_all()
