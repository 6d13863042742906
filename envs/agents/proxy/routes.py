"""The endpoints of a proxy: which request is answered by what, and for whom."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeAlias

import structlog

from ....schemas.wire.errors import BusyError, InternalError, TinkermqError
from ...http_server import Receive, Scope, Send
from ...model_apis.answers import ModelApi
from ...model_apis.chat import CHAT
from ...model_apis.messages import MESSAGES
from ...model_apis.request import RequestError
from ...model_apis.responses import RESPONSES
from ..episode import EpisodeOver
from . import posts
from .exchange import ClientGone, HttpExchange, NoSuchEndpoint
from .model_calls import ModelCalls
from .open_episodes import OpenEpisode, OpenEpisodes

MAX_REQUESTS = 64
"""Of one episode at the same time."""

Endpoint: TypeAlias = Callable[[HttpExchange, OpenEpisode], Awaitable[None]]
Seen: TypeAlias = Callable[[HttpExchange, str], object]
"""Called with each request that was answered, and its path without a key."""

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

    def __init__(
        self,
        episodes: OpenEpisodes,
        calls: ModelCalls,
        seen: Seen | None = None,
        *,
        relay: Endpoint | None = None,
    ) -> None:
        """Serve the programs of `episodes`; `seen` is called with each request.

        `relay` answers what is said of an episode, and not asked of the model, where its host is
        elsewhere.
        """
        self._episodes = episodes
        self._calls = calls
        self._seen = seen
        self._relay = relay

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
            _log.exception("request_failed", path="/".join(split_path(exchange.path)[1]))
            await exchange.fail(InternalError(f"the proxy failed: {type(error).__name__}"))
        finally:
            if self._seen is not None:
                self._seen(exchange, "/".join(split_path(exchange.path)[1]))

    async def _answer(self, exchange: HttpExchange) -> None:
        key, path = split_path(exchange.path)
        exchange.api = api_of(path)
        if not path and exchange.method in ("GET", "HEAD"):
            await exchange.reply({"object": "proxy", "episode": "/v1/episode"})
            return
        opened = self._episodes.find([key] if key else presented_keys(exchange.headers))
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
        if self._relay is not None and _is_posted(method, path):
            return self._relay
        endpoint = self._post(path) if method == "POST" else _get(method, path)
        if endpoint is None:
            raise NoSuchEndpoint(
                f"there is no {method} /v1/{'/'.join(path)}"[:200],
                hint="there are POST chat/completions, responses, messages, messages/count_tokens, "
                "episode/reward, episode/end, episode/note, and GET models, episode",
            )
        return endpoint

    def _post(self, path: tuple[str, ...]) -> Endpoint | None:
        if path in _APIS:
            return self._call(_APIS[path])
        if path == ("messages", "count_tokens"):
            return _open(self._calls.count)
        if len(path) == 3 and path[0] == "responses" and path[2] == "cancel":
            return lambda exchange, opened: _cancel(exchange, opened, path[1])
        post = _post_of(path)
        return None if post is None else _posting(post)

    def _call(self, api: ModelApi) -> Endpoint:
        return _open(lambda exchange, opened: self._calls.answer(exchange, opened, api))


def api_of(path: tuple[str, ...]) -> ModelApi:
    """Return the API in whose words errors come under a path."""
    return {"messages": MESSAGES, "responses": RESPONSES}.get(path[0] if path else "", CHAT)


def is_posted(method: str, path: str) -> bool:
    """Whether a request is about an episode itself, and names it by no key in its path."""
    key, parts = split_path(path)
    return not key and _is_posted(method, parts)


def _is_posted(method: str, path: tuple[str, ...]) -> bool:
    if method == "POST":
        return path not in _APIS and _post_of(path) is not None
    return method == "GET" and path[:1] == ("episode",)


def _post_of(path: tuple[str, ...]) -> posts.Post | None:
    return _POSTS.get(path) or (_ENDINGS.get(path[-1]) if len(path) > 1 else None)


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
        return lambda exchange, opened: exchange.reply(
            posts.episode_status(opened, time.monotonic())
        )
    if method == "GET" and path[:2] == ("episode", "calls") and len(path) == 3:
        return lambda exchange, opened: exchange.reply({"call": opened.call_number(path[2])})
    if method == "GET" and path[:1] == ("models",):
        return lambda exchange, _: exchange.reply(_models("/".join(path[1:])))
    if method == "GET" and len(path) == 3 and (path[0], path[2]) == ("responses", "input_items"):
        return lambda exchange, opened: _inputs(exchange, opened, path[1])
    if len(path) == 2 and path[0] == "responses" and method in ("GET", "DELETE"):
        take = _kept if method == "GET" else _delete
        return lambda exchange, opened: take(exchange, opened, path[1])
    return None


async def _kept(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    await exchange.reply(opened.answers.find(name).make())


async def _inputs(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    """List what an answer was asked with, the newest first unless `order` is asc."""
    items: list[dict[str, Any]] = opened.inputs.find(name).make()["data"]
    if exchange.asked("order") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = exchange.asked("after")
    if after and after not in ids:
        raise RequestError(f"no item {after!r:.80} is among them", param="after")
    limit = exchange.asked("limit") or "20"
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise RequestError(f"limit is {limit!r:.40}, not 1 to 100", param="limit")
    first = ids.index(after) + 1 if after else 0
    shown = items[first : first + int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = first + len(shown) < len(items)
    await exchange.reply({"object": "list", "data": shown, **ends, "has_more": more})


async def _delete(exchange: HttpExchange, opened: OpenEpisode, name: str) -> None:
    opened.answers.find(name)
    opened.answers.forget(name)
    opened.inputs.forget(name)
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


def split_path(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the key in a path, if it has one, and what follows, without the version."""
    parts = [part for part in path.split("/") if part]
    key = ""
    if len(parts) >= 2 and parts[0] == "e":
        key, parts = parts[1], parts[2:]
    while parts and parts[0] == "v1":
        parts = parts[1:]
    return key, tuple(parts)


def path_of(exchange: HttpExchange) -> str:
    """Return the path of a request without the key that it may hold."""
    return "/v1/" + "/".join(split_path(exchange.path)[1])


def presented_keys(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield what may be a key in the headers of a request."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    yield headers.get("x-api-key", "").strip()
    yield headers.get("api-key", "").strip()
