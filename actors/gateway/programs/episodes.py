"""The episodes whose programs use this gateway, each with a connection of its own to the broker.

The broker lets a program in by its key and gives it the rights of its one episode; the episode's
host says that the key is the right one. So a connection is worth nothing else, whoever finds a way
to use it. Connections are bounded, for each user as well, and close when nobody uses them.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from hashlib import blake2b

from ....broker.client.connection import connect
from ....broker.client.keys import EpisodeIdentity, read_episode_key
from ....broker.client.login import of_program
from ....envs.agents.proxy.exchange import BodyRoom, KeyRefused
from ....envs.agents.proxy.remote_episode import RemoteEpisode
from ....schemas.wire.errors import BusyError, LogInRefusedError
from ..limits import Share

MAX_EPISODES = 1024
MAX_OF_USER = 512
"""Episodes of one user, and as many requests of their programs at a time."""
MAX_USER_BYTES = 256 << 20
"""Of the bodies of one user's programs at a time."""
MAX_BODIES_BYTES = 512 << 20
"""Of all bodies that are being read."""
IDLE_S = 120.0
_OVER_IDLE_S = 10.0
_REFUSED_S = 10.0
_MAX_REFUSED = 4096
_CONNECTING_AT_ONCE = 32
_CHECKING_OF_USER = 256
_CONNECT_DEADLINE_S = 10.0
_SWEEP_S = 5.0


class ProgramEpisodes:
    """Finds the episode of a key."""

    def __init__(self, url: str, *, with_keys: bool, idle_s: float = IDLE_S) -> None:
        """Speak to the broker at `url`, which asks for keys or does not; nothing is opened yet."""
        self._url = url
        self._with_keys = with_keys
        self._idle_s = idle_s
        self._episodes: dict[str, RemoteEpisode] = {}
        self._opening: dict[str, asyncio.Task[RemoteEpisode]] = {}
        self._refused: OrderedDict[bytes, tuple[float, str, str]] = OrderedDict()
        self._checking: Counter[str] = Counter()
        self._shares: dict[str, Share] = {}
        self._room = BodyRoom(MAX_BODIES_BYTES)
        self._free = asyncio.Semaphore(_CONNECTING_AT_ONCE)

    def __len__(self) -> int:
        """Episodes that are connected."""
        return len(self._episodes)

    def share(self, user: str) -> Share:
        """Return what counts the requests of one user's programs."""
        if user not in self._shares:
            self._shares = {one: share for one, share in self._shares.items() if share.num_running}
            self._shares[user] = Share(MAX_OF_USER, MAX_USER_BYTES)
        return self._shares[user]

    async def of_key(self, key: str) -> RemoteEpisode:
        """Return the episode of a key, connected if need be.

        Raises KeyRefused, BusyError where too many are connected, and BrokerError.
        """
        found = self._episodes.get(key)
        if found is not None and not found.broker.closed.is_set():
            return found
        digest = blake2b(key.encode(errors="replace")).digest()
        since, why, hint = self._refused.get(digest, (0.0, "", ""))
        if why and time.monotonic() - since < _REFUSED_S:
            raise KeyRefused(why, hint=hint)
        if key not in self._opening:
            opening = asyncio.create_task(self._open(key), name="open a program's connection")
            self._opening[key] = opening
            opening.add_done_callback(lambda _: self._opening.pop(key, None))
        try:
            return await asyncio.shield(self._opening[key])
        except KeyRefused as error:
            self._refused[digest] = time.monotonic(), error.message, error.hint
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise

    async def sweep(self) -> None:
        """Close connections that nobody uses, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for key, one in list(self._episodes.items()):
                idle_s = _OVER_IDLE_S if one.over else self._idle_s
                is_idle = not one.num_requests and now - one.used > idle_s
                if is_idle or one.broker.closed.is_set():
                    await self._drop(key)

    async def close(self) -> None:
        """Close all of them."""
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)
        await asyncio.gather(*(self._drop(key) for key in list(self._episodes)))

    async def _open(self, key: str) -> RemoteEpisode:
        identity = read_episode_key(key)
        if identity is None:
            raise KeyRefused(
                "this is not the key of an episode that a gateway could find",
                hint="its host gives such keys out if it was told of the gateway: "
                "AgentEpisodes(job, gateway=URL)",
            )
        await self._drop(key)
        async with self._free:
            episode = await self._connect(key, identity)
        try:
            await self._check(episode)
        except BaseException:
            await episode.close()
            raise
        self._episodes[key] = episode
        return episode

    async def _check(self, episode: RemoteEpisode) -> None:
        """Let an episode in that its host knows; the broker has said by now whose it is."""
        user = episode.user
        if self._checking[user] >= _CHECKING_OF_USER:
            raise BusyError("keys of many episodes are being checked", hint="call again")
        self._checking[user] += 1
        try:
            await episode.check()
        finally:
            self._checking[user] -= 1
            if not self._checking[user]:
                del self._checking[user]
        await self._make_room(user)

    async def _connect(self, key: str, identity: EpisodeIdentity) -> RemoteEpisode:
        login = of_program(key, with_users=self._with_keys)
        try:
            broker = await connect(
                self._url, name="gateway-program", login=login, deadline_s=_CONNECT_DEADLINE_S
            )
        except LogInRefusedError as error:
            raise KeyRefused(
                "the broker refuses the key of this episode",
                hint="its job has ended, or the key was changed on its way",
            ) from error
        return RemoteEpisode(broker, identity, key, self._room)

    async def _make_room(self, user: str) -> None:
        """Drop who has been idle for longest, of the user's own if these are too many."""
        own = {key: one for key, one in self._episodes.items() if one.user == user}
        if len(own) >= MAX_OF_USER:
            await self._drop_idle(own, f"{MAX_OF_USER} programs of user {user}")
        elif len(self._episodes) >= MAX_EPISODES:
            await self._drop_idle(self._episodes, f"{MAX_EPISODES} programs")

    async def _drop_idle(self, among: dict[str, RemoteEpisode], who: str) -> None:
        idle = [key for key, one in among.items() if not one.num_requests]
        if not idle:
            raise BusyError(
                f"{who} have calls open here, as many as this gateway serves",
                hint="call again later, or through another gateway",
            )
        await self._drop(min(idle, key=lambda key: among[key].used))

    async def _drop(self, key: str) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None:
            await episode.close()
