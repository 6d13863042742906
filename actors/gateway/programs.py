"""Requests of agent programs: all requests with the key of an episode, under any path.

Each episode has its own connection to the broker, with the rights of this episode only. It is used
after the episode's host has confirmed the key. Connections are bounded, also per user, and close
when idle. Requests are answered by the same proxy that programs use next to their host; they never
reach the rest of the gateway.
"""

import asyncio
import time
from collections import Counter
from hashlib import blake2b

from cachetools import TTLCache
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ...broker.client.connection import connect
from ...broker.client.fair_queue import end_tasks
from ...broker.client.keys import EPISODE_KEY, EpisodeIdentity, read_episode_key
from ...broker.client.login import of_program
from ...envs.agents.proxy.calls import bare_key
from ...envs.agents.proxy.exchange import BodyRoom, KeyRefused, error_answer
from ...envs.agents.proxy.model_calls import MAX_BODY_BYTES
from ...envs.agents.proxy.remote_episode import RemoteEpisode
from ...envs.agents.proxy.routes import api_of, presented_keys, split_path
from ...schemas.wire.errors import BusyError, LogInRefusedError, TinkermqError
from .limits import TAKEN, Share, body_bytes

MAX_EPISODES = 1024
MAX_OF_USER = 512
"""Maximum number of one user's episodes, and of concurrent requests of their programs."""
MAX_USER_BYTES = 256 << 20
"""Maximum bytes of the bodies of one user's programs at the same time."""
MAX_BODIES_BYTES = 512 << 20
"""Maximum bytes of all bodies that are being read."""
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

    def __init__(self, url: str, *, with_keys: bool) -> None:
        """Use the broker at `url`, which may require keys; nothing is opened yet."""
        self._url = url
        self._with_keys = with_keys
        self._episodes: dict[str, RemoteEpisode] = {}
        self._opening: dict[str, asyncio.Task[RemoteEpisode]] = {}
        self._refused: TTLCache[bytes, KeyRefused, float] = TTLCache(
            _MAX_REFUSED, _REFUSED_S, time.monotonic
        )
        self._checking: Counter[str] = Counter()
        self._shares: dict[str, Share] = {}
        self._room = BodyRoom(MAX_BODIES_BYTES)
        self._free = asyncio.Semaphore(_CONNECTING_AT_ONCE)

    def __len__(self) -> int:
        """Episodes that are connected."""
        return len(self._episodes)

    def share(self, user: str) -> Share:
        """Return the counter of the requests of one user's programs."""
        if user not in self._shares:
            self._shares = {
                name: share for name, share in self._shares.items() if share.num_running
            }
            self._shares[user] = Share(MAX_OF_USER, MAX_USER_BYTES)
        return self._shares[user]

    async def of_key(self, key: str) -> RemoteEpisode:
        """Return the episode of a key, with a connection.

        Raises KeyRefused, BusyError if too many are connected, and BrokerError.
        """
        match = self._episodes.get(key)
        if match is not None and not match.broker.closed.is_set():
            return match
        digest = blake2b(key.encode(errors="replace")).digest()
        refused = self._refused.get(digest)
        if refused is not None:
            raise KeyRefused(refused.message, hint=refused.hint)
        if key not in self._opening:
            opening = asyncio.create_task(self._open(key), name="open a program's connection")
            self._opening[key] = opening
            opening.add_done_callback(lambda _: self._opening.pop(key, None))
        try:
            return await asyncio.shield(self._opening[key])
        except KeyRefused as error:
            self._refused[digest] = KeyRefused(error.message, hint=error.hint)
            raise

    async def sweep(self) -> None:
        """Close unused connections, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for key, episode in list(self._episodes.items()):
                idle_s = _OVER_IDLE_S if episode.over else IDLE_S
                is_idle = not episode.num_requests and now - episode.used > idle_s
                if is_idle or episode.broker.closed.is_set():
                    await self._drop(key)

    async def close(self) -> None:
        """Close all of them."""
        await end_tasks(self._opening.values())
        await asyncio.gather(*(self._drop(key) for key in list(self._episodes)))

    async def _open(self, key: str) -> RemoteEpisode:
        identity = read_episode_key(key)
        if identity is None:
            raise KeyRefused(
                "this is not the key of an episode that a gateway could find",
                hint="its host makes such keys if it has the gateway's URL: "
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
        """Admit an episode after its host confirms the key; the broker has checked its owner."""
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
                hint="its job has ended, or the key is not complete",
            ) from error
        return RemoteEpisode(broker, identity, key, self._room)

    async def _make_room(self, user: str) -> None:
        """Drop the longest idle episode, of the user's own if these are too many."""
        own = {key: episode for key, episode in self._episodes.items() if episode.user == user}
        if len(own) >= MAX_OF_USER:
            await self._drop_idle(own, f"{MAX_OF_USER} programs of user {user}")
        elif len(self._episodes) >= MAX_EPISODES:
            await self._drop_idle(self._episodes, f"{MAX_EPISODES} programs")

    async def _drop_idle(self, among: dict[str, RemoteEpisode], who: str) -> None:
        idle = [key for key, episode in among.items() if not episode.num_requests]
        if not idle:
            raise BusyError(
                f"{who} have calls open here, the most that this gateway serves",
                hint="call again later, or through another gateway",
            )
        await self._drop(min(idle, key=lambda key: among[key].used))

    async def _drop(self, key: str) -> None:
        episode = self._episodes.pop(key, None)
        if episode is not None:
            await episode.close()


# -- the middleware --------------------------------------------------------------------------------


class ProgramRequests:
    """ASGI middleware that answers the requests of programs."""

    def __init__(self, app: ASGIApp, *, episodes: ProgramEpisodes) -> None:
        """Pass requests without an episode's key on to `app`."""
        self._app = app
        self._episodes = episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a program, or pass the request on."""
        if not is_of_program(scope):
            await self._app(scope, receive, send)
            return
        try:
            key = bare_key(split_path(scope["path"])[0]) or _presented(scope)
            episode = await self._episodes.of_key(key)
            num_bytes = body_bytes(Headers(scope=scope), MAX_BODY_BYTES)
            with self._episodes.share(episode.user).taken(num_bytes) as share:
                scope[TAKEN] = share
                await episode(scope, receive, send)
        except TinkermqError as error:
            api = api_of(split_path(scope["path"])[1])
            await error_answer(error, api)(scope, receive, send)


def is_of_program(scope: Scope) -> bool:
    """Return whether a request has the key of an episode, in its headers or path."""
    if scope["type"] != "http":
        return False
    return bool(split_path(scope["path"])[0]) or bool(_presented(scope))


def _presented(scope: Scope) -> str:
    keys = (bare_key(key) for key in presented_keys(Headers(scope=scope)) if key)
    return next((key for key in keys if key.startswith(EPISODE_KEY)), "")
