"""The proxy between the programs of one host and the generators that play their episodes."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping

from ....broker.client.connection import Broker
from ....broker.client.parts import SharedInbox
from ....schemas.wire.errors import StateError
from ....schemas.wire.subjects import JobScope
from ...http_server import Connections, Deadlines, HttpServer
from ..episode import EpisodeOver, ProgramEpisode
from ..remote.host_posts import HostPosts
from ..remote.signing import EpisodeSigner
from .calls import CallAsker, ProgramCalls, ProxyTimes
from .model_calls import ModelCalls
from .open_episodes import KEPT_BYTES, EpisodeSubjects, OpenEpisode, OpenEpisodes
from .routes import ProxyRoutes, Seen

MODEL = "policy"
_MODEL_NAMES = (
    "OPENAI_MODEL",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
)
_QUIET: Mapping[str, str] = {
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


def model_environment(episode: ProgramEpisode, base_url: str) -> dict[str, str]:
    """Return what points a program at the proxy under `base_url`, which ends without a slash."""
    key = episode.key
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "TINKERMQ_EPISODE_URL": f"{base_url}/v1/episode",
        "TINKERMQ_EPISODE_KEY": key,
        **dict.fromkeys(_MODEL_NAMES, MODEL),
        **_QUIET,
    }


class ModelProxy:
    """Speaks OpenAI's and Anthropic's APIs with programs, and NATS with generators.

    Use it as an async context manager: within, it listens on 127.0.0.1. A program is let in by the
    key of its episode, from `open` to `close`. With the URL of the pool's gateway, programs
    elsewhere are let in there by the same keys.
    """

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        *,
        times: ProxyTimes | None = None,
        deadlines: Deadlines | None = None,
        kept_bytes: int = KEPT_BYTES,
        port: int = 0,
        gateway: str = "",
        seen: Seen | None = None,
    ) -> None:
        """Prepare a proxy of one job; `kept_bytes` is each episode's room for its answers.

        `gateway` is the URL of the pool's, where it is to let programs in as well; `seen` is
        called with each request that was answered here.
        """
        self._broker, self._scope = broker, scope
        self._times = times or ProxyTimes()
        self._kept_bytes = kept_bytes
        self._episodes = OpenEpisodes()
        self._inbox = SharedInbox(broker)
        calls = ModelCalls(CallAsker(broker, self._times, self._inbox))
        routes = ProxyRoutes(self._episodes, calls, seen)
        self._server = HttpServer(routes, Connections("proxy", deadlines=deadlines))
        self._gateway = gateway.rstrip("/")
        self._posts = HostPosts(broker, scope, routes) if gateway else None
        self._signer = EpisodeSigner(scope, None)
        self._port = port
        self._is_listening = False

    @property
    def base_url(self) -> str:
        """Where it listens: `http://127.0.0.1:<port>`. Raises StateError before it does."""
        if not self._is_listening:
            raise StateError("the proxy does not listen yet", hint="use it with `async with`")
        return f"http://127.0.0.1:{self._port}"

    @property
    def outer_url(self) -> str:
        """Where programs elsewhere find it: the gateway, if there is one; else `base_url`."""
        return self._gateway or self.base_url

    def new_key(self, episode: str) -> str:
        """Return a key for an episode that begins."""
        return self._signer.key(episode)

    @property
    def num_episodes(self) -> int:
        """Episodes whose programs may call."""
        return len(self._episodes)

    def listen(self, listening: socket.socket) -> contextlib.AbstractAsyncContextManager[None]:
        """Listen at a program's socket as well, in a network of its own, while it runs."""
        return self._server.listen_at(listening)

    def env_of(self, episode: ProgramEpisode, base_url: str = "") -> dict[str, str]:
        """Return the environment variables that lead a program to its model.

        `base_url` is where it finds the proxy, if that is elsewhere for it than here.
        """
        return model_environment(episode, base_url or self.base_url)

    def open(self, episode: ProgramEpisode) -> None:
        """Let the program of an episode call; StateError if it may already."""
        calls = ProgramCalls(self._times.adopt_s)
        subjects = EpisodeSubjects.of(self._scope, episode.episode)
        opened = OpenEpisode(episode, subjects, calls, kept_bytes=self._kept_bytes)
        self._episodes.add(opened)
        if self._posts is not None:
            self._posts.open(opened)

    def close(self, episode: str) -> None:
        """Let it call no more, and end its calls; harmless for an episode that is not open."""
        opened = self._episodes.of(episode)
        if opened is None:
            return
        why = opened.episode.over = opened.episode.over or "it has ended"
        opened.calls.end(EpisodeOver(f"the episode is over: {why}"))
        self._episodes.remove(opened)
        if self._posts is not None:
            self._posts.close(episode)

    async def __aenter__(self) -> "ModelProxy":
        if self._posts is not None:
            self._signer = await EpisodeSigner.of_job(self._broker, self._scope)
            await self._posts.start()
        self._port = await self._server.listen(port=self._port)
        self._is_listening = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        ended = [call for opened in self._episodes for call in opened.calls]
        for opened in list(self._episodes):
            self.close(opened.episode.episode)
        await self._server.stop()
        if self._posts is not None:
            await self._posts.stop()
        if ended:
            await asyncio.gather(*(call.settle() for call in ended))
        await self._inbox.close()
        self._is_listening = False
