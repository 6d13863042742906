"""The proxy between the programs of one host and the generators that play their episodes."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ....broker.client.connection import Broker
from ....broker.client.keys import EpisodeIdentity, episode_key
from ....broker.client.parts import PartsService, SharedInbox, Tell
from ....broker.client.replies import Listening
from ....broker.client.rpc import Service, call
from ....schemas.agent import EpisodePost, EpisodePosted, EpisodeSecret
from ....schemas.http_server import HttpBounds, HttpServer, listening_socket
from ....schemas.wire.errors import StateError, TinkermqError
from ....schemas.wire.message import Empty
from ....schemas.wire.subjects import JobScope
from ..episode import EpisodeOver, ProgramEpisode
from .calls import (
    KEPT_BYTES,
    CallAsker,
    EpisodeSubjects,
    OpenEpisode,
    OpenEpisodes,
    ProgramCalls,
    ProxyTimes,
    RunningCall,
    bare_key,
)
from .exchange import KeyRefused
from .model_calls import ModelCalls
from .routes import ProxyRoutes, Seen, is_about_episode

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
    """Return the variables that point a program at the proxy; `base_url` has no last slash."""
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
    """Offers OpenAI's and Anthropic's APIs to programs, and calls generators over NATS.

    Use it as an async context manager, in which it listens on 127.0.0.1. The key of an episode is
    valid from `open` to `close`. With the URL of the pool's gateway, programs elsewhere use the
    same keys there.
    """

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        *,
        times: ProxyTimes | None = None,
        bounds: HttpBounds | None = None,
        kept_bytes: int = KEPT_BYTES,
        port: int = 0,
        gateway: str = "",
        seen: Seen | None = None,
    ) -> None:
        """Prepare a proxy of one job; `kept_bytes` bounds the stored answers of each episode.

        `gateway` is the URL of the pool's gateway, if programs elsewhere may use it; `seen` is
        called with each request that was answered here.
        """
        self._broker, self._scope = broker, scope
        self._times = times or ProxyTimes()
        self._kept_bytes = kept_bytes
        self._episodes = OpenEpisodes()
        self._inbox = SharedInbox(broker)
        calls = ModelCalls(CallAsker(broker, self._times, self._inbox))
        routes = ProxyRoutes(self._episodes, calls, seen)
        self._server = HttpServer("proxy", routes, bounds)
        self._gateway = gateway.rstrip("/")
        self._posts = HostPosts(broker, scope, routes) if gateway else None
        self._signer = EpisodeSigner(scope, None)
        self._port = port
        self._is_listening = False
        self._opened = contextlib.AsyncExitStack()
        self._ended: list[RunningCall] = []

    @property
    def base_url(self) -> str:
        """Its URL, `http://127.0.0.1:<port>`. Raises StateError before it listens."""
        if not self._is_listening:
            raise StateError("the proxy does not listen yet", hint="use it with `async with`")
        return f"http://127.0.0.1:{self._port}"

    @property
    def outer_url(self) -> str:
        """The URL for programs elsewhere: the gateway, if there is one; else `base_url`."""
        return self._gateway or self.base_url

    def new_key(self, episode: str) -> str:
        """Return a key for a new episode."""
        return self._signer.key(episode)

    @property
    def num_episodes(self) -> int:
        """Number of open episodes."""
        return len(self._episodes)

    def listen(self, listening: socket.socket) -> contextlib.AbstractAsyncContextManager[None]:
        """Also listen on a socket in a program's own network, while the program runs."""
        return self._server.listening(listening)

    def env_of(self, episode: ProgramEpisode, base_url: str = "") -> dict[str, str]:
        """Return the environment variables that point a program at its model.

        `base_url` is the proxy's URL for the program, if it differs.
        """
        return model_environment(episode, base_url or self.base_url)

    def open(self, episode: ProgramEpisode) -> None:
        """Open an episode for its program; StateError if it is open already."""
        calls = ProgramCalls(self._times.adopt_s)
        subjects = EpisodeSubjects.of(self._scope, episode.episode)
        opened = OpenEpisode(episode, subjects, calls, kept_bytes=self._kept_bytes)
        self._episodes.add(opened)
        if self._posts is not None:
            self._posts.open(opened)

    def close(self, episode: str) -> None:
        """Close an episode and end its calls; does nothing for one that is not open."""
        opened = self._episodes.of(episode)
        if opened is None:
            return
        why = opened.episode.over = opened.episode.over or "it has ended"
        opened.calls.end(EpisodeOver(f"the episode is over: {why}"))
        self._episodes.remove(opened)
        if self._posts is not None:
            self._posts.close(episode)

    async def __aenter__(self) -> "ModelProxy":
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(self._inbox.close)
            opened.push_async_callback(self._end_calls)
            if self._posts is not None:
                self._signer = await EpisodeSigner.of_job(self._broker, self._scope)
                opened.push_async_callback(self._posts.stop)
                await self._posts.start()
            listening = opened.enter_context(listening_socket("127.0.0.1", self._port))
            opened.push_async_callback(self._server.stop)
            await self._server.listen(listening)
            self._port = int(listening.getsockname()[1])
            self._opened = opened.pop_all()
        self._is_listening = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._ended = [call for opened in self._episodes for call in opened.calls]
        for opened in list(self._episodes):
            self.close(opened.episode.episode)
        await self._opened.aclose()
        self._is_listening = False

    async def _end_calls(self) -> None:
        await asyncio.gather(*(call.settle() for call in self._ended))


# Programs elsewhere, which reach their host through a gateway.
#
# This proxy answers their posts. The generator that plays the episode answers their model calls, so
# gateways regularly report the number of open calls to the host, and the answered ones.

LEASE_S = 15.0
"""How long a gateway's last report of open calls is valid."""
_MAX_RUNNING = 64
_MAX_SOURCES = 64
_MAX_PAST = 1024
_PASSED_ON = ("x-", "retry-after")


class HostPosts:
    """Listens for posts of the open episodes of one host, and of recent ones."""

    def __init__(self, broker: Broker, scope: JobScope, routes: ProxyRoutes) -> None:
        """Answer with `routes`, the host's own endpoints."""
        self._broker = broker
        self._scope = scope
        self._routes = routes
        self._service: Service | None = None
        self._parts: PartsService | None = None
        self._open: dict[str, _PostedEpisode] = {}
        self._past: OrderedDict[str, _PostedEpisode] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the service."""
        name, description = "tinkermq-posts", f"posts of programs, job {self._scope.job}"
        self._service = await Service.start(self._broker, name=name, description=description)
        self._parts = PartsService(self._broker, self._service)

    async def stop(self) -> None:
        """Stop listening."""
        every = [*self._open.values(), *self._past.values()]
        self._open.clear()
        self._past.clear()
        for posted in every:
            self._end(posted)
        if self._closing:
            await asyncio.wait(self._closing)
        if self._service is not None:
            await self._service.stop(0)

    def open(self, opened: OpenEpisode) -> None:
        """Listen for the posts of an episode."""
        posted = _PostedEpisode(opened, self._routes)
        name = opened.episode.episode
        posted.listening = asyncio.create_task(self._listen(posted), name=f"posts of {name}")
        self._open[name] = posted

    def close(self, episode: str) -> None:
        """Answer that an episode is over, for the most recent ended episodes."""
        posted = self._open.pop(episode, None)
        if posted is None:
            return
        posted.settle()
        self._past[episode] = posted
        while len(self._past) > _MAX_PAST:
            self._end(self._past.popitem(last=False)[1])

    async def _listen(self, posted: "_PostedEpisode") -> Listening:
        assert self._parts is not None, "start first"
        subject = self._scope.episode(posted.opened.episode.episode, "post")
        return await self._parts.listen(
            subject, EpisodePost, EpisodePosted, posted.answer, max_running=_MAX_RUNNING
        )

    def _end(self, posted: "_PostedEpisode") -> None:
        posted.settle()
        task = asyncio.create_task(posted.stop(), name="end of posts")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(eq=False)
class _PostedEpisode:
    """One episode, and the gateways with open calls of it."""

    opened: OpenEpisode
    routes: ProxyRoutes
    listening: "asyncio.Task[Listening] | None" = None
    sources: "dict[str, tuple[int, asyncio.TimerHandle]]" = field(
        default_factory=dict[str, "tuple[int, asyncio.TimerHandle]"]
    )

    async def answer(self, post: EpisodePost, tell: Tell[EpisodePosted]) -> EpisodePosted:
        """Process a report, and its request if there is one; KeyRefused for another key."""
        del tell
        episode = self.opened.episode
        if not secrets.compare_digest(bare_key(post.key).encode(), episode.key.encode()):
            raise KeyRefused("this is not the key of the episode")
        if not episode.over:
            self._process_report(post)
        posted = await _answered(self.routes, post) if post.method else EpisodePosted()
        end = "its program has posted its end" if episode.said_end.is_set() else ""
        return posted.model_copy(update={"over": episode.over or end})

    def settle(self) -> None:
        """Stop counting calls as open."""
        for source in list(self.sources):
            self._set_open(source, 0)

    async def stop(self) -> None:
        """End the subscription."""
        assert self.listening is not None
        try:
            await (await self.listening).stop()
        except TinkermqError:
            return  # the subscription never started, or the connection was lost

    def _process_report(self, post: EpisodePost) -> None:
        episode = self.opened.episode
        for answered in post.answered:
            if not self.opened.is_answered(answered.calls[0]):
                self.opened.learn(answered.names, answered.calls)
                episode.num_calls += len(answered.calls)
        if post.num_open or post.answered:
            episode.last_call = time.monotonic()
        episode.limit = post.limit
        if post.source in self.sources or len(self.sources) < _MAX_SOURCES:
            self._set_open(post.source, post.num_open)
        episode.changed.set()

    def _set_open(self, source: str, num_open: int) -> None:
        """Set the number of open calls at a gateway, valid for a while."""
        before, timer = self.sources.pop(source, (0, None))
        if timer is not None:
            timer.cancel()
        episode = self.opened.episode
        episode.num_open += num_open - before
        if before and not num_open:
            episode.last_call = time.monotonic()
        if num_open:
            loop = asyncio.get_running_loop()
            lapse = loop.call_later(LEASE_S, self._set_open, source, 0)
            self.sources[source] = num_open, lapse
        episode.changed.set()


async def _answered(routes: ProxyRoutes, post: EpisodePost) -> EpisodePosted:
    """Answer a program's request with the proxy's endpoints."""
    if not is_about_episode(post.method, post.path):
        return EpisodePosted(status=404, body=b"{}")
    sent: list[Mapping[str, Any]] = []
    headers = {"authorization": f"Bearer {post.key}", "idempotency-key": post.name}
    scope = {
        "type": "http",
        "method": post.method,
        "path": post.path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": post.body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    await routes(scope, receive, send)
    headers = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    passed_on = {name: value for name, value in headers.items() if name.startswith(_PASSED_ON)}
    body = b"".join(message.get("body", b"") for message in sent)
    return EpisodePosted(status=sent[0]["status"], headers=passed_on, body=body)


# The keys of a job's episodes, with which programs elsewhere connect to the broker.

_PATIENCE_S = 60.0


class EpisodeSigner:
    """Makes keys that the broker and the host accept."""

    def __init__(self, scope: JobScope, secret: bytes | None) -> None:
        """`secret` is the job's; None: only the host checks keys."""
        self._scope = scope
        self._secret = secret

    @classmethod
    async def of_job(cls, broker: Broker, scope: JobScope) -> Self:
        """Request the secret for signing keys from the auth service, if there is one.

        Raises AuthError for a job that does not run, DeadlineError and NobodyAnswersError if the
        auth service does not answer.
        """
        if not broker.is_guest:
            return cls(scope, None)
        reply = await call(
            broker,
            scope.episode_keys,
            Empty(),
            EpisodeSecret,
            timeout_s=_PATIENCE_S,
            waiting_for="the auth service",
            idempotent=True,
        )
        return cls(scope, reply.secret)

    def key(self, episode: str) -> str:
        """Return the key of an episode."""
        return episode_key(
            EpisodeIdentity(self._scope.user, self._scope.job, episode), self._secret
        )
