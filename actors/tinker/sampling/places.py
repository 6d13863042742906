"""Who samples next: the engine's places are given to users by turns, by tokens and weights."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..turns import FairTurns

QUANTUM = 2048
"""Tokens of one user's turn."""


@dataclass
class _Asked:
    """Somebody who waits for a place."""

    place: "asyncio.Future[None]"
    tokens: int


@dataclass
class Place:
    """A place in the engine."""

    tokens: int
    """What it is charged with: at first all that may be computed, at last what was."""


class FairPlaces:
    """Places in an engine: one user's hundreds of requests hold up another's only for one place."""

    def __init__(self, most: int, quantum: int = QUANTUM) -> None:
        """Let `most` be inside at a time."""
        self.turns = FairTurns(quantum)
        """The users' turns."""
        self._free = most
        self._waiting: dict[str, deque[_Asked]] = {}

    @asynccontextmanager
    async def place(self, user: str, tokens: int) -> AsyncIterator[Place]:
        """Hold a place in which at most so many tokens are computed for a user."""
        place = Place(tokens)
        await self._enter(user, tokens)
        try:
            yield place
        finally:
            self.turns.charge(user, place.tokens - tokens)
            self._leave()

    async def _enter(self, user: str, tokens: int) -> None:
        asked = _Asked(asyncio.get_running_loop().create_future(), tokens)
        self._waiting.setdefault(user, deque()).append(asked)
        self._let_in()
        try:
            await asked.place
        except asyncio.CancelledError:
            if not asked.place.cancelled():  # it was let in at that very moment
                self.turns.charge(user, -tokens)
                self._leave()
            raise

    def _leave(self) -> None:
        self._free += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._free:
            user = self.turns.choose(self._users_waiting())
            if user is None:
                return
            asked = self._waiting[user].popleft()
            self.turns.charge(user, asked.tokens)
            self._free -= 1
            asked.place.set_result(None)

    def _users_waiting(self) -> list[str]:
        """Return who waits, once those are gone who no longer do."""
        for user, queue in list(self._waiting.items()):
            while queue and queue[0].place.done():
                queue.popleft()
            if not queue:
                del self._waiting[user]
        return list(self._waiting)
