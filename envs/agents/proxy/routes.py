"""The endpoints of a proxy: which request is answered by what, and for whom."""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, cast

import structlog

from ....schemas.model_apis.answers import ModelApi
from ....schemas.model_apis.chat import CHAT
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.request import Fields, RequestError
from ....schemas.model_apis.responses import RESPONSES
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import BusyError, InternalError, MessageError, TinkermqError
from ....schemas.wire.foreign import plain_value
from ...http_server import Receive, Scope, Send
from ..episode import EpisodeLimit, EpisodeOver, ProgramEpisode
from .calls import OpenEpisode, OpenEpisodes
from .exchange import ClientGone, HttpExchange, NoSuchEndpoint, dumped
from .model_calls import ModelCalls

# Posts of a program about its own episode: rewards, its end, notes about calls.

Post: TypeAlias = Callable[[OpenEpisode, bytes, str], dict[str, Any]]
"""`post(episode, body, idempotency_key)` takes what was said and returns the reply."""

MAX_POST_BYTES = 1 << 20
_MOST_POSTS = 1 << 16
_MOST_INFO_BYTES = 256 << 10
_ROLE_CHARS = 100


def post_reward(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{reward, call? | branch?, info?, mode?}`: of the episode, a call or a branch."""
    fields = _fields(raw)
    reward = _reward(fields, "reward")
    mode = fields.text("mode", "set")
    call = _call(opened, fields.any("call"))
    branch = _call(opened, fields.any("branch"), "branch")
    _take_info(opened.episode, fields.any("info"))
    _nothing_else(fields)
    if mode not in ("set", "add"):
        raise RequestError(f"mode is {mode!r:.40}", param="mode", hint="give set or add")
    if branch is not None and call is not None:
        raise RequestError(
            "a reward is that of a call or of a branch", param="branch", hint="post two"
        )
    what = name.encode() or raw
    return _give(opened, reward, call, cast("Any", mode), what, branch=branch)


def post_end(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{status, reward?, success?, info?, message?}`; what was said first stands."""
    del name
    fields, episode = _fields(raw), opened.episode
    status = fields.text("status", "done")
    if status not in ("done", "failed"):
        raise RequestError(f"status is {status!r:.40}", param="status", hint="give done or failed")
    reward = None if fields.any("reward") is None else _reward(fields, "reward")
    said: dict[str, Any] = {
        key: value for key in ("success", "message") if (value := fields.any(key)) is not None
    }
    if not isinstance(said.get("success", False), bool):
        raise RequestError("success must be true or false", param="success")
    if not isinstance(said.get("message", ""), str):
        raise RequestError("message must be a text", param="message")
    info = fields.any("info")
    _nothing_else(fields)
    if not episode.status:
        _take_info(episode, info)
        _take_info(episode, said)
        episode.reward = episode.reward if reward is None else reward
        episode.status = status
        episode.said_end.set()
        episode.changed.set()
        for call in opened.calls:
            call.end(EpisodeOver("the program has said that its episode has ended"))
    return {"status": episode.status, "reward": episode.reward}


def post_note(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{call | branch, role?, train?}`: the name of a branch, whether a call is trained."""
    del name
    fields, episode = _fields(raw), opened.episode
    call, branch = _call(opened, fields.any("call")), _call(opened, fields.any("branch"), "branch")
    call = branch if call is None else call
    if call is None:
        raise RequestError("call is missing", param="call", hint="name the call: its number or id")
    role, train = fields.text("role"), fields.any("train")
    if not isinstance(train, bool | None):
        raise RequestError("train must be true or false", param="train")
    _nothing_else(fields)
    if role:
        episode.notes[call] = role[:_ROLE_CHARS]
    if train is not None:
        (episode.untrained.discard if train else episode.untrained.add)(call)
    episode.changed.set()
    return {"call": call, "role": episode.notes.get(call), "train": call not in episode.untrained}


def episode_status(opened: OpenEpisode, now: float) -> dict[str, Any]:
    """Return what a program may know of its own episode."""
    episode = opened.episode
    left_s = episode.deadline - now
    return {
        "job": episode.job,
        "episode": episode.episode,
        "split": episode.split,
        "seed": episode.seed,
        "input": episode.task_input,
        "calls": episode.num_calls,
        "open": episode.num_open,
        "reward": episode.reward,
        "status": episode.status,
        "over": episode.over,
        "left": {"seconds": round(left_s, 3) if math.isfinite(left_s) else None},
    }


def _give(
    opened: OpenEpisode,
    reward: float,
    call: int | None,
    mode: Literal["set", "add"],
    what: bytes,
    branch: int | None = None,
) -> dict[str, Any]:
    """Give the episode, a call or a branch a reward; an addition that was posted counts once."""
    episode = opened.episode
    if episode.said_end.is_set():
        raise EpisodeOver(
            "the program has said that its episode has ended",
            hint="post rewards before the end, or with it",
        )
    number = call if branch is None else branch
    rewards = episode.call_rewards if branch is None else episode.branch_rewards
    before = episode.reward if number is None else rewards.get(number)
    if mode == "add":
        reward = (before or 0.0) if _is_known(opened, what) else (before or 0.0) + reward
    if number is None:
        episode.reward = reward
    else:
        rewards[number] = reward
    episode.changed.set()
    return {"reward": reward, "call": call, **({} if branch is None else {"branch": branch})}


def _is_known(opened: OpenEpisode, what: bytes) -> bool:
    digest = blake2b(what, digest_size=16).digest()
    is_repeated = digest in opened.posted
    opened.posted.add(digest)
    if len(opened.posted) > _MOST_POSTS:
        raise EpisodeLimit(f"more than {_MOST_POSTS:,} rewards were posted")
    return is_repeated


def _fields(raw: bytes) -> Fields:
    try:
        return Fields(read_json(raw) if raw.strip() else {})
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error


def _reward(fields: Fields, key: str) -> float:
    value = fields.any(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        place = fields.name(key)
        raise RequestError(f"{place} must be a finite number, and is {value!r:.60}", param=place)
    return float(value)


def _call(opened: OpenEpisode, value: Any, name: str = "call") -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise RequestError(f"{name} must be a number or an id, and is {value!r:.60}", param=name)
    return opened.call_number(value)


def _take_info(episode: ProgramEpisode, info: Any) -> None:
    if info is None:
        return
    if not isinstance(info, Mapping):
        raise RequestError("info must be an object", param="info")
    try:
        added = plain_value(dict(cast("Mapping[str, Any]", info)), "info")
    except MessageError as error:
        raise RequestError(error.message, param="info", hint=error.hint) from error
    together = {**episode.info, **added}
    if len(dumped(together)) > _MOST_INFO_BYTES:
        raise EpisodeLimit(f"info is over {_MOST_INFO_BYTES:,} bytes for one episode")
    episode.info = together


def _nothing_else(fields: Fields) -> None:
    for name in fields.unread():
        raise RequestError(f"there is no field {name!r:.60} here", param=name)


# The routes.

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
_POSTS: Mapping[tuple[str, ...], Post] = {
    ("episode", "reward"): post_reward,
    ("episode", "end"): post_end,
    ("episode", "note"): post_note,
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
        except Exception as error:  # noqa: BLE001  the server's boundary: record, reveal no details
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
        post = _POSTS.get(path)
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
        return path in _POSTS
    return method == "GET" and path[:1] == ("episode",)


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


def _posting(post: Post) -> Endpoint:
    async def take(exchange: HttpExchange, opened: OpenEpisode) -> None:
        raw = await exchange.body(MAX_POST_BYTES)
        name = exchange.headers.get("idempotency-key", "")
        await exchange.reply(post(opened, raw, name))

    return take


def _get(method: str, path: tuple[str, ...]) -> Endpoint | None:
    if method == "GET" and path == ("episode",):
        return lambda exchange, opened: exchange.reply(episode_status(opened, time.monotonic()))
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
