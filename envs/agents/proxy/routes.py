"""The endpoints of the proxy: posts about an episode, and the routes."""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, cast

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from ....schemas.http_server import Application, Message, Receive, Scope, Send
from ....schemas.model_apis.answers import ModelApi
from ....schemas.model_apis.chat import CHAT
from ....schemas.model_apis.messages import MESSAGES
from ....schemas.model_apis.request import Fields, RequestError, json_of
from ....schemas.model_apis.responses import RESPONSES
from ....schemas.wire.errors import BusyError, InternalError, MessageError, TinkermqError
from ....schemas.wire.foreign import plain_value
from ..episode import EpisodeLimit, EpisodeOver, ProgramEpisode
from .calls import OpenEpisode, OpenEpisodes
from .exchange import JsonAnswer, NoSuchEndpoint, dumped, error_answer, read_body
from .model_calls import ModelCalls

# Posts of a program about its own episode: rewards, its end, notes about calls.

Post: TypeAlias = Callable[[OpenEpisode, bytes, str], dict[str, Any]]
"""`post(episode, body, idempotency_key)` processes a post and returns the reply."""

MAX_POST_BYTES = 1 << 20
_MOST_POSTS = 1 << 16
_MOST_INFO_BYTES = 256 << 10
_ROLE_CHARS = 100


def post_reward(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Read `{reward, call? | branch?, info?, mode?}`: of the episode, a call or a branch."""
    fields = _fields(raw)
    reward = _reward(fields, "reward")
    mode = fields.text("mode", "set")
    call = _call(opened, fields.any("call"))
    branch = _call(opened, fields.any("branch"), "branch")
    _take_info(opened.episode, fields.any("info"))
    fields.refuse_unread()
    if mode not in ("set", "add"):
        raise RequestError(f"mode is {mode!r:.40}", param="mode", hint="use set or add")
    if branch is not None and call is not None:
        raise RequestError(
            "a reward is for a call or for a branch, not both", param="branch", hint="post two"
        )
    what = name.encode() or raw
    return _give(opened, reward, call, cast("Any", mode), what, branch=branch)


def post_end(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Read `{status, reward?, success?, info?, message?}`; the first post counts."""
    del name
    fields, episode = _fields(raw), opened.episode
    status = fields.text("status", "done")
    if status not in ("done", "failed"):
        raise RequestError(f"status is {status!r:.40}", param="status", hint="use done or failed")
    reward = None if fields.any("reward") is None else _reward(fields, "reward")
    posted: dict[str, Any] = {
        key: value for key in ("success", "message") if (value := fields.any(key)) is not None
    }
    if not isinstance(posted.get("success", False), bool):
        raise RequestError("success must be true or false", param="success")
    if not isinstance(posted.get("message", ""), str):
        raise RequestError("message must be a text", param="message")
    info = fields.any("info")
    fields.refuse_unread()
    if not episode.status:
        _take_info(episode, info)
        _take_info(episode, posted)
        episode.reward = episode.reward if reward is None else reward
        episode.status = status
        episode.said_end.set()
        episode.changed.set()
        for call in opened.calls:
            call.end(EpisodeOver("the program has posted the end of its episode"))
    return {"status": episode.status, "reward": episode.reward}


def post_note(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Read `{call | branch, role?, train?}`: a branch's name, and whether a call is trained."""
    del name
    fields, episode = _fields(raw), opened.episode
    call, branch = _call(opened, fields.any("call")), _call(opened, fields.any("branch"), "branch")
    call = branch if call is None else call
    if call is None:
        raise RequestError("call is missing", param="call", hint="name the call: its number or id")
    role, train = fields.text("role"), fields.any("train")
    if not isinstance(train, bool | None):
        raise RequestError("train must be true or false", param="train")
    fields.refuse_unread()
    if role:
        episode.notes[call] = role[:_ROLE_CHARS]
    if train is not None:
        (episode.untrained.discard if train else episode.untrained.add)(call)
    episode.changed.set()
    return {"call": call, "role": episode.notes.get(call), "train": call not in episode.untrained}


def episode_status(opened: OpenEpisode, now: float) -> dict[str, Any]:
    """Return a program's view of its own episode."""
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
    """Set or add a reward of the episode, a call or a branch; a repeated addition counts once."""
    episode = opened.episode
    if episode.said_end.is_set():
        raise EpisodeOver(
            "the program has posted the end of its episode",
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
    return Fields(json_of(raw) if raw.strip() else {})


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


# -- the application -------------------------------------------------------------------------------

MAX_REQUESTS = 64
"""Requests of one episode at the same time."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Seen: TypeAlias = Callable[[str, str, int], object]
"""Called with the method, the path without a key, and the status of each request."""

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

        `relay` answers requests about the episode itself if its host is elsewhere.
        """
        self.calls = calls
        self.relay = relay
        self._episodes = episodes
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises no error."""
        key, parts = split_path(scope["path"])
        path, status = "/".join(parts), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, send_noting, key, f"/{path}")
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  the server's boundary: record, reveal no details
            if not isinstance(error, TinkermqError):
                _log.exception("request_failed", path=path)
                error = InternalError(f"the proxy failed: {type(error).__name__}")
            if not status:
                await error_answer(error, api_of(parts))(scope, receive, send_noting)
        if self._seen is not None:
            self._seen(scope["method"], path, status)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, key: str, path: str
    ) -> None:
        """Find the episode, and let the router answer."""
        if path == "/" and scope["method"] in ("GET", "HEAD"):
            await JsonAnswer({"object": "proxy", "episode": "/v1/episode"})(scope, receive, send)
            return
        opened = self._episodes.find([key] if key else presented_keys(Headers(scope=scope)))
        if opened.num_requests >= MAX_REQUESTS:
            raise BusyError(
                f"{MAX_REQUESTS} requests of this episode are open", hint="wait for some to end"
            )
        opened.num_requests += 1
        try:
            await _ROUTER({**scope, "path": path, "app": self, _OPENED: opened}, receive, send)
        except HTTPException as error:
            raise NoSuchEndpoint(
                f"{scope['method']} /v1{path} does not exist"[:200],
                hint="there are POST chat/completions, responses, messages, messages/count_tokens, "
                "episode/reward, episode/end, episode/note, and GET models, episode",
            ) from error
        finally:
            opened.num_requests -= 1


def api_of(path: tuple[str, ...]) -> ModelApi:
    """Return the API whose form errors have under a path."""
    return {"messages": MESSAGES, "responses": RESPONSES}.get(path[0] if path else "", CHAT)


_OPENED = "tinkermq.opened"
"""Key in a request's scope: its open episode."""


def _proxy(request: Request) -> ProxyRoutes:
    return cast("ProxyRoutes", request.app)


def _opened(request: Request) -> OpenEpisode:
    return cast("OpenEpisode", request.scope[_OPENED])


# -- the endpoints of the model --------------------------------------------------------------------


class _CountOpen:
    """Middleware that counts a call of the model as open while it is answered."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        episode = cast("OpenEpisode", scope[_OPENED]).episode
        if episode.over or episode.said_end.is_set():
            raise EpisodeOver(
                f"the episode is over: {episode.over or 'its program has posted its end'}"
            )
        episode.num_open += 1
        episode.last_call = time.monotonic()
        episode.changed.set()
        try:
            await self._app(scope, receive, send)
        finally:
            episode.num_open -= 1
            episode.last_call = time.monotonic()
            episode.changed.set()


def _model_route(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"], middleware=[Middleware(_CountOpen)])


def _call_of(api: ModelApi) -> Endpoint:
    async def call(request: Request) -> Response:
        return await _proxy(request).calls.answer(request, _opened(request), api)

    return call


async def _count_tokens(request: Request) -> Response:
    return await _proxy(request).calls.count(request, _opened(request))


async def _kept(request: Request) -> Response:
    return JsonAnswer(_opened(request).answers.find(request.path_params["name"]).make())


async def _inputs(request: Request) -> Response:
    """List the input messages of an answer, the newest first unless `order` is asc."""
    inputs = _opened(request).inputs.find(request.path_params["name"])
    items: list[dict[str, Any]] = inputs.make()["data"]
    if request.query_params.get("order") != "asc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = request.query_params.get("after")
    if after and after not in ids:
        raise RequestError(f"no item {after!r:.80} is among them", param="after")
    limit = request.query_params.get("limit") or "20"
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise RequestError(f"limit must be 1 to 100, and is {limit!r:.40}", param="limit")
    first = ids.index(after) + 1 if after else 0
    shown = items[first : first + int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    more = first + len(shown) < len(items)
    return JsonAnswer({"object": "list", "data": shown, **ends, "has_more": more})


async def _delete(request: Request) -> Response:
    opened, name = _opened(request), request.path_params["name"]
    opened.answers.find(name)
    opened.answers.forget(name)
    opened.inputs.forget(name)
    return JsonAnswer({"id": name, "object": "response", "deleted": True})


async def _cancel(request: Request) -> Response:
    name = request.path_params["name"]
    for call in _opened(request).calls:
        head = call.answer.head
        if head is not None and head.names and RESPONSES.id_of(head.names[0]) == name:
            call.end(EpisodeOver("the program has cancelled this answer"))
            return JsonAnswer({"id": name, "object": "response", "status": "cancelled"})
    return await _kept(request)


async def _models(request: Request) -> Response:
    name = request.path_params.get("name")
    model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "tinkermq"}
    shown = {**model, "type": "model", "display_name": model["id"]}
    return JsonAnswer(shown if name else {"object": "list", "data": [shown], "has_more": False})


# -- the endpoints of the episode ------------------------------------------------------------------


def _posted(post: Post) -> Endpoint:
    async def take(request: Request) -> Response:
        raw = await read_body(request, MAX_POST_BYTES)
        name = request.headers.get("idempotency-key", "")
        return JsonAnswer(post(_opened(request), raw, name))

    return take


async def _status(request: Request) -> Response:
    return JsonAnswer(episode_status(_opened(request), time.monotonic()))


async def _call_number(request: Request) -> Response:
    return JsonAnswer({"call": _opened(request).call_number(request.path_params["name"])})


def _episode_route(method: str, path: str, answer: Endpoint) -> Route:
    """Return a route that the host of the episode answers, wherever it is."""

    async def answer_or_relay(request: Request) -> Response:
        return await (_proxy(request).relay or answer)(request)

    return Route(path, answer_or_relay, methods=[method])


_EPISODE_ROUTES = [
    _episode_route("POST", "/episode/reward", _posted(post_reward)),
    _episode_route("POST", "/episode/end", _posted(post_end)),
    _episode_route("POST", "/episode/note", _posted(post_note)),
    _episode_route("GET", "/episode", _status),
    _episode_route("GET", "/episode/calls/{name}", _call_number),
]
_ROUTER = Router(
    [
        _model_route("/chat/completions", _call_of(CHAT)),
        _model_route("/messages", _call_of(MESSAGES)),
        _model_route("/responses", _call_of(RESPONSES)),
        _model_route("/messages/count_tokens", _count_tokens),
        Route("/responses/{name}", _kept, methods=["GET"]),
        Route("/responses/{name}", _delete, methods=["DELETE"]),
        Route("/responses/{name}/input_items", _inputs, methods=["GET"]),
        Route("/responses/{name}/cancel", _cancel, methods=["POST"]),
        Route("/models", _models, methods=["GET"]),
        Route("/models/{name:path}", _models, methods=["GET"]),
        *_EPISODE_ROUTES,
    ],
    redirect_slashes=False,
)


def is_about_episode(method: str, path: str) -> bool:
    """Return whether a request is about an episode itself; its path has no key."""
    key, parts = split_path(path)
    scope = {"type": "http", "method": method, "path": f"/{'/'.join(parts)}"}
    return not key and any(route.matches(scope)[0] is Match.FULL for route in _EPISODE_ROUTES)


def split_path(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the key in a path, if there is one, and the rest without the version."""
    parts = [part for part in path.split("/") if part]
    key = ""
    if len(parts) >= 2 and parts[0] == "e":
        key, parts = parts[1], parts[2:]
    while parts and parts[0] == "v1":
        parts = parts[1:]
    return key, tuple(parts)


def presented_keys(headers: Mapping[str, str]) -> Iterator[str]:
    """Yield possible keys in the headers of a request."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    yield headers.get("x-api-key", "").strip()
    yield headers.get("api-key", "").strip()
