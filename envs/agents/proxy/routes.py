"""The endpoints of a proxy: which request is answered by what, and for whom."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias

import structlog

from ....schemas.wire.errors import BusyError, InternalError, TinkermqError
from ..episode import EpisodeOver
from . import posts
from .errors import NoSuchEndpoint
from .exchange import ClientGone, HttpExchange, Receive, Scope, Send
from .model_calls import ModelCalls
from .open_episodes import OpenEpisode, OpenEpisodes
from .wording import CHAT, MESSAGES, RESPONSES, ModelApi

MAX_REQUESTS = 64
"""Of one episode at the same time."""

Endpoint: TypeAlias = Callable[[HttpExchange, OpenEpisode], Awaitable[None]]
Seen: TypeAlias = Callable[[HttpExchange, str], object]
"""Is told of each request that was answered, and of its path without a key."""

_APIS: Mapping[tuple[str, ...], ModelApi] = {
    ("chat", "completions"): CHAT,
    ("responses",): RESPONSES,
    ("messages",): MESSAGES,
}
_POSTS: Mapping[tuple[str, ...], posts.Post] = {
    ("episode", "reward"): posts.post_reward,
    ("episode", "end"): posts.post_end,
    ("episode", "note"): posts.post_note,
    ("rl", "set_reward"): posts.post_interaction_reward,
    ("rl", "end_session"): posts.post_session_end,
}
_ENDINGS: Mapping[str, posts.Post] = {
    "reward_info": posts.post_reward_info,
    "events": posts.post_event,
}
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ProxyRoutes:
    """The ASGI application."""

    def __init__(self, episodes: OpenEpisodes, calls: ModelCalls, seen: Seen | None = None) -> None:
        """Serve the programs of `episodes`; `seen` is told of all they ask for."""
        self._episodes = episodes
        self._calls = calls
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; no error comes out of here."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGone:
            return
        except TinkermqError as error:
            await exchange.fail(error)
        except Exception as error:  # noqa: BLE001  the server's boundary: record, tell no insides
            _log.exception("request_failed", path="/".join(_split(exchange.path)[1]))
            await exchange.fail(InternalError(f"the proxy failed: {type(error).__name__}"))
        finally:
            if self._seen is not None:
                self._seen(exchange, "/".join(_split(exchange.path)[1]))

    async def _answer(self, exchange: HttpExchange) -> None:
        key, path = _split(exchange.path)
        if path in _APIS or path[:1] == ("messages",):
            exchange.api = _APIS[path].api if path in _APIS else "messages"
        elif path[:1] == ("responses",):
            exchange.api = "responses"
        if not path and exchange.method in ("GET", "HEAD"):
            await exchange.reply({"object": "proxy", "episode": "/v1/episode"})
            return
        opened = self._episodes.find([key] if key else _keys(exchange.headers))
        endpoint = self._endpoint(exchange.method, path)
        if opened.num_requests >= MAX_REQUESTS:
            raise BusyError(
                f"{MAX_REQUESTS} requests of this episode are open", hint="wait for some to end"
            )
        opened.num_requests += 1
        try:
            await endpoint(exchange, opened)
        finally:
            opened.num_requests -= 1

    def _endpoint(self, method: str, path: tuple[str, ...]) -> Endpoint:
        endpoint = self._post(path) if method == "POST" else _get(method, path)
        if endpoint is None:
            raise NoSuchEndpoint(
                f"there is no {method} /v1/{'/'.join(path)}"[:200],
                hint="see docs/agents.md for the endpoints of an episode",
            )
        return endpoint

    def _post(self, path: tuple[str, ...]) -> Endpoint | None:
        if path in _APIS:
            return self._call(_APIS[path])
        if path == ("messages", "count_tokens"):
            return _open(self._calls.count)
        if len(path) == 3 and path[0] == "responses" and path[2] == "cancel":
            return lambda exchange, opened: _cancel(exchange, opened, path[1])
        post = _POSTS.get(path) or (_ENDINGS.get(path[-1]) if len(path) > 1 else None)
        return None if post is None else _posting(post)

    def _call(self, api: ModelApi) -> Endpoint:
        return _open(lambda exchange, opened: self._calls.answer(exchange, opened, api))


def _open(call: Endpoint) -> Endpoint:
    """Count a call of the model as open while it is."""

    async def counted(exchange: HttpExchange, opened: OpenEpisode) -> None:
        episode = opened.episode
        if episode.over or episode.said_end.is_set():
            raise EpisodeOver(f"the episode is over: {episode.over or 'its program has said so'}")
        episode.num_open += 1
        episode.last_call = time.monotonic()
        episode.changed.set()
        try:
            await call(exchange, opened)
        finally:
            episode.num_open -= 1
            episode.last_call = time.monotonic()
            episode.changed.set()

    return counted


def _posting(post: posts.Post) -> Endpoint:
    async def take(exchange: HttpExchange, opened: OpenEpisode) -> None:
        raw = await exchange.body(posts.MAX_POST_BYTES)
        name = exchange.headers.get("idempotency-key", "")
        await exchange.reply(post(opened, raw, name))

    return take


def _get(method: str, path: tuple[str, ...]) -> Endpoint | None:
    if method == "GET" and path == ("episode",):
        return lambda exchange, opened: exchange.reply(posts.told_of(opened, time.monotonic()))
    if method == "GET" and path[:1] == ("models",):
        return lambda exchange, _: exchange.reply(_models("/".join(path[1:])))
    if len(path) == 2 and path[0] == "responses" and method in ("GET", "DELETE"):
        take = _kept if method == "GET" else _delete
        return lambda exchange, opened: take(exchange, opened, path[1])
    return None


async def _kept(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    await exchange.reply(opened.kept(name).make())


async def _delete(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    opened.kept(name)
    opened.forget(name)
    await exchange.reply({"id": name, "object": "response", "deleted": True})


async def _cancel(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    for call in opened.calls:
        head = call.answer.head
        if head is not None and head.names and RESPONSES.id_of(head.names[0]) == name:
            call.end(EpisodeOver("the program has cancelled this answer"))
            await exchange.reply({"id": name, "object": "response", "status": "cancelled"})
            return
    await _kept(exchange, opened, name)


def _models(name: str) -> dict[str, Any]:
    model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "tinkermq"}
    shown = {**model, "type": "model", "display_name": model["id"]}
    if name:
        return shown
    return {"object": "list", "data": [shown], "has_more": False}


def _split(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the key in a path, if it has one, and what follows, without the version."""
    parts = [part for part in path.split("/") if part]
    key = ""
    if len(parts) >= 2 and parts[0] == "e":
        key, parts = parts[1], parts[2:]
    while parts and parts[0] == "v1":
        parts = parts[1:]
    return key, tuple(parts)


def _keys(headers: Mapping[str, str]) -> Iterator[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    yield headers.get("x-api-key", "").strip()
    yield headers.get("api-key", "").strip()
