"""The host's side of programs elsewhere: it hears what gateways post for them, and how calls go.

What a program posts is answered by the endpoints of the host's own proxy. Its calls are answered by
who plays the episode, so the host is told of them: of those that are open, as long as it is told so
again and again, and of the numbers of those that were answered.
"""

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....broker.client.connection import Broker
from ....broker.client.parts import PartsService, Tell
from ....broker.client.replies import Listening
from ....broker.client.rpc import Service
from ....schemas.agent import EpisodePost, EpisodePosted, ReportedCall
from ....schemas.wire.errors import TinkermqError
from ....schemas.wire.subjects import JobScope
from ..proxy.exchange import KeyRefused
from ..proxy.open_episodes import OpenEpisode, bare_key
from ..proxy.routes import ProxyRoutes, is_posted

LEASE_S = 15.0
"""Calls that a gateway said were open are taken for open so long without a further word."""
_MAX_RUNNING = 64
_MAX_SOURCES = 64
_MAX_PAST = 1024
_PASSED_ON = ("x-", "retry-after")


class HostPosts:
    """Listens for the posts of the episodes that are open at one host, and of the last ones."""

    def __init__(self, broker: Broker, scope: JobScope, routes: ProxyRoutes) -> None:
        """Answer by `routes`, the host's own endpoints."""
        self._broker = broker
        self._scope = scope
        self._routes = routes
        self._service: Service | None = None
        self._parts: PartsService | None = None
        self._open: dict[str, _PostedEpisode] = {}
        self._past: OrderedDict[str, _PostedEpisode] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Get ready to listen."""
        name, description = "tinkermq-posts", f"posts of programs, job {self._scope.job}"
        self._service = await Service.start(self._broker, name=name, description=description)
        self._parts = PartsService(self._broker, self._service)

    async def stop(self) -> None:
        """Listen no more."""
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
        """Say of an episode from now on that it is over, until many others are."""
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
    """One episode, and which gateways have calls of it open."""

    opened: OpenEpisode
    routes: ProxyRoutes
    listening: "asyncio.Task[Listening] | None" = None
    sources: "dict[str, tuple[int, asyncio.TimerHandle]]" = field(
        default_factory=dict[str, "tuple[int, asyncio.TimerHandle]"]
    )

    async def answer(self, post: EpisodePost, tell: Tell[EpisodePosted]) -> EpisodePosted:
        """Take a report, and a request if there is one; KeyRefused for another key."""
        del tell
        episode = self.opened.episode
        if not secrets.compare_digest(bare_key(post.key).encode(), episode.key.encode()):
            raise KeyRefused("this is not the key of the episode")
        if not episode.over:
            self._take(post)
        told = await _answered(self.routes, post) if post.method else EpisodePosted()
        said = "its program has said that it has ended" if episode.said_end.is_set() else ""
        return told.model_copy(update={"over": episode.over or said})

    def settle(self) -> None:
        """Take no call for open any more."""
        for source in list(self.sources):
            self._set_open(source, 0)

    async def stop(self) -> None:
        """End the subscription."""
        assert self.listening is not None
        try:
            await (await self.listening).stop()
        except TinkermqError:
            return  # it never began, or the connection is gone

    def _take(self, post: EpisodePost) -> None:
        episode = self.opened.episode
        for call in post.answered:
            self._learn(call)
        if post.num_open or post.answered:
            episode.last_call = time.monotonic()
        episode.limit = post.limit
        if post.source in self.sources or len(self.sources) < _MAX_SOURCES:
            self._set_open(post.source, post.num_open)
        episode.changed.set()

    def _learn(self, call: ReportedCall) -> None:
        if not self.opened.is_answered(call.calls[0]):
            self.opened.learn(call.names, call.calls)
            self.opened.episode.num_calls += len(call.calls)

    def _set_open(self, source: str, num_open: int) -> None:
        """Take so many calls of a gateway for open, for a while."""
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
    """Let the proxy's endpoints answer a program's request."""
    if not is_posted(post.method, post.path):
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
    told = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    passed_on = {name: value for name, value in told.items() if name.startswith(_PASSED_ON)}
    body = b"".join(message.get("body", b"") for message in sent)
    return EpisodePosted(status=sent[0]["status"], headers=passed_on, body=body)
