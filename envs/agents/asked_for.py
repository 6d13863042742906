"""Episodes that are given out when somebody asks the host for one."""

import asyncio
import contextlib
import time
from collections import deque

from ...schemas.agent import GiveReply, GiveRequest
from ...schemas.wire.errors import BusyError
from .given_out import GivenEpisode


class AskedEpisodes:
    """Who asks for episodes: the places of a host are those that are asked for."""

    def __init__(self, most: int) -> None:
        """Have at most so many under way."""
        self._most = most
        self._unclaimed: deque[GivenEpisode] = deque()
        self._asked: deque[asyncio.Future[GivenEpisode]] = deque()
        self._named: dict[str, GivenEpisode] = {}
        self._num_open = 0
        self._wanted = 0
        self._changed = asyncio.Event()

    async def acquire(self) -> None:
        """Wait until somebody asks."""
        while not self._wanted:
            self._changed.clear()
            await self._changed.wait()
        self._wanted -= 1
        self._num_open += 1

    def release(self) -> None:
        """Take note that an episode has ended."""
        self._num_open -= 1

    def give(self, given: GivenEpisode) -> None:
        """Give an episode that has started to who asks; it waits for the next if they are gone."""
        while self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(given)
                return
        self._unclaimed.append(given)

    async def answer(self, request: GiveRequest) -> GiveReply:
        """Return the next episode, or none after a while; the same once more for the same name.

        Raises BusyError for one more than there may be.
        """
        given = self._named.get(request.name) if request.name else None
        if given is None or given.episode.over:
            given = await self._next(request.wait_s)
        if given is None:
            return GiveReply()
        if request.name and request.name not in self._named:
            self._named[request.name] = given
            given.on_drop.append(lambda: self._named.pop(request.name, None))
        episode = given.episode
        return GiveReply(
            episode=episode.episode,
            key=episode.key,
            task=episode.task_input,
            prompt=given.prompt,
            seed=episode.seed,
            split=episode.split,
            left_s=max(0.0, episode.deadline - time.monotonic()),
        )

    async def _next(self, wait_s: float) -> GivenEpisode | None:
        while self._unclaimed:
            given = self._unclaimed.popleft()
            if not given.episode.over:
                return given
        if self._num_open + self._wanted >= self._most:
            raise BusyError(
                f"{self._num_open + self._wanted} episodes are open or asked for, as many as "
                f"agent.per_host={self._most} allows",
                hint="end some, or raise agent.per_host",
            )
        asked: asyncio.Future[GivenEpisode] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._wanted += 1
        self._changed.set()
        try:
            await asyncio.wait({asked}, timeout=wait_s)
            return asked.result() if asked.done() else None
        finally:
            if not asked.done():  # an episode that starts all the same waits for the next
                asked.cancel()
                self._wanted -= bool(self._wanted)
                with contextlib.suppress(ValueError):
                    self._asked.remove(asked)
