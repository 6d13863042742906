"""Games that own a file until they close, as others own a session, a simulator or a licence."""

import asyncio
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from broken_games import CountingGame

RESET_S = 0.03


class OwningGame(CountingGame):
    """Owns a file of a folder from the middle of its reset on."""

    def __init__(self, folder: str) -> None:
        super().__init__(trouble_at=0)
        self._folder = Path(folder)
        self._owned: list[Path] = []
        self._itself = self  # so that it is not collected soon

    def reset(self, **_: Any) -> str:
        time.sleep(RESET_S / 2)
        self._take()
        time.sleep(RESET_S / 2)
        return "begun"

    def _take(self) -> None:
        owned = self._folder / uuid4().hex
        owned.touch()
        self._owned.append(owned)

    def close(self) -> None:
        for owned in self._owned:
            owned.unlink()  # raises if it is called twice


_Owner: Any = OwningGame  # an async game's methods return what is awaited


class WaitingOwner(_Owner):
    """The same as an async game."""

    async def reset(self, **_: Any) -> str:
        await asyncio.sleep(RESET_S / 2)
        self._take()
        await asyncio.sleep(RESET_S / 2)
        return "begun"

    async def step(self, action: str) -> Any:
        await asyncio.sleep(RESET_S)
        return super().step(action)
