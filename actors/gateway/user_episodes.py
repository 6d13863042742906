"""`/v1/episodes`: users take episodes of their jobs, and post their rewards, over HTTP.

The job's host in the pool assigns them. A request with the user's key is relayed as a request with
the episode's own key. Each gateway stores the keys of the episodes that were taken there.
"""

import math
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from cachetools import FIFOCache
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...broker.jobs import JobStore
from ...envs.agents.episode import EpisodeOver, ProgramEpisode
from ...envs.agents.proxy.exchange import KeyRefused
from ...envs.agents.proxy.proxy import model_environment
from ...envs.agents.proxy.remote_episode import RemoteEpisode
from ...schemas.agent import GiveReply, GiveRequest
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.model_apis.request import Fields, RequestError, json_of
from ...schemas.wire import errors
from .openai import BrokerOf, guarded, unless_gone
from .programs import ProgramEpisodes

MAX_WAIT_S = 300.0
_WAIT_S = 60.0
_ASK_S = 5.0
_ANSWER_S = 15.0
_NAME_CHARS = 200
_MAX_KNOWN = 4096
_POSTS = ("reward", "end", "note")


class EpisodeGone(EpisodeOver):
    """A user's episode is over; 401 would be about the user's own key."""

    status = 410


class NoEpisodeYet(errors.TinkermqError):
    """A job has no episode at present; the request may be repeated later."""

    code = "no_episode_yet"
    status = 425


def routes(broker_of: BrokerOf, programs: Callable[[Request], ProgramEpisodes]) -> list[Route]:
    """Return the endpoints, for the gateway's application."""
    api = UserEpisodes(broker_of, programs)
    path = "/v1/episodes/{episode}"
    return [
        Route("/v1/episodes", guarded(api.open), methods=["POST"]),
        Route(path, guarded(api.relay), methods=["GET"]),
        *(Route(f"{path}/{what}", guarded(api.relay), methods=["POST"]) for what in _POSTS),
    ]


class UserEpisodes:
    """The endpoints."""

    def __init__(self, broker_of: BrokerOf, programs: Callable[[Request], ProgramEpisodes]) -> None:
        """`programs` finds episodes by their keys."""
        self._broker_of = broker_of
        self._programs = programs
        self._keys: FIFOCache[tuple[str, str], str] = FIFOCache(_MAX_KNOWN)

    async def open(self, request: Request) -> Response:
        """Take the next episode of a job; answers with its task and the URLs of the model."""
        broker = await self._broker_of(request)
        name, wait_s = _read_request(await request.body())
        record = await JobStore(broker).get(broker.user, name)
        _check(record)
        idempotency = request.headers.get("idempotency-key", "")[:_NAME_CHARS]
        reply = await unless_gone(request, _request_episode(broker, record, idempotency, wait_s))
        self._keys[broker.user, reply.episode] = reply.key
        return JSONResponse(_episode_fields(record, reply, str(request.base_url).rstrip("/")), 201)

    async def relay(self, request: Request) -> Response:
        """Relay a request to the host of an episode as a request of the episode's program."""
        broker = await self._broker_of(request)
        name = str(request.path_params["episode"])
        key = self._keys.get((broker.user, name))
        if key is None:
            raise errors.NotFoundError(
                f"episode {name!r:.80} was not taken at this gateway",
                hint="use the gateway at which it was taken, or the episode's own key",
            )
        try:
            episode = await self._programs(request).of_key(key)
        except KeyRefused as error:
            raise EpisodeGone(
                f"episode {name!r} is over, or was started again at another host"
            ) from error
        what = request.url.path.split("/")[4:]
        return _Relayed(episode, "/".join(("/v1/episode", *what)), key)


class _Relayed(Response):
    """The answer of an episode's own endpoint."""

    def __init__(self, episode: RemoteEpisode, path: str, key: str) -> None:
        super().__init__()
        self._episode = episode
        self._path = path
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the request as the episode's program."""

        async def send_as_user(message: MutableMapping[str, Any]) -> None:
            if message.get("status") == KeyRefused.status:  # the user's own key is good
                message = {**message, "status": EpisodeGone.status}
            await send(message)

        others = ("authorization", "x-api-key", "api-key", "cookie")
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name.decode("latin-1") not in others
        ]
        headers.append((b"authorization", f"Bearer {self._key}".encode()))
        scope = {**scope, "path": self._path, "headers": headers}
        await self._episode(scope, receive, send_as_user)


async def _request_episode(
    broker: Broker, record: JobRecord, name: str, wait_s: float
) -> GiveReply:
    """Request an episode from the job's host until it has one.

    Raises NoEpisodeYet after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    why = "the next tasks wait for the learner or its generators"
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        request = GiveRequest(name=name, wait_s=min(_ASK_S, left_s))
        try:
            reply = await call(
                broker,
                record.scope.env_give,
                request,
                GiveReply,
                timeout_s=request.wait_s + _ANSWER_S,
                waiting_for=f"the host of {record.name}",
            )
            if reply.episode:
                return reply
        except errors.NobodyAnswersError:
            why = "its host has not started yet"
        if time.monotonic() >= deadline:
            raise NoEpisodeYet(
                f"run {record.name} had no episode for {wait_s:g} s: {why}", hint="try again"
            )


def _check(record: JobRecord) -> None:
    if record.state in FINAL_STATES:
        raise errors.StateError(f"run {record.name} is {record.state}: it has no more episodes")
    config: dict[str, dict[str, Any]] = record.config
    if not config.get("agent", {}).get("client") or not config.get("env", {}).get("hosts"):
        raise errors.ConfigError(
            f"run {record.name} does not serve episodes here",
            hint="submit it with agent.client=true and env.hosts=1",
        )


def _read_request(raw: bytes) -> tuple[str, float]:
    """Return the job's name, and how long to wait for an episode."""
    fields = Fields(json_of(raw or b"{}"))
    job, wait_s = fields.text("job"), fields.any("wait_s")
    fields.refuse_unread()
    if not job:
        raise RequestError("job is missing", param="job", hint="name the job: its name or id")
    if wait_s is None:
        return job, _WAIT_S
    is_number = isinstance(wait_s, int | float) and not isinstance(wait_s, bool)
    if not is_number or not 0 <= wait_s <= MAX_WAIT_S:
        raise RequestError(f"wait_s must be between 0 and {MAX_WAIT_S:g} seconds", param="wait_s")
    return job, float(wait_s)


def _episode_fields(record: JobRecord, reply: GiveReply, url: str) -> dict[str, Any]:
    episode = ProgramEpisode(
        reply.episode, reply.task, reply.seed, reply.split, record.job, key=reply.key
    )
    return {
        "id": reply.episode,
        "object": "episode",
        "job": record.job,
        "task": reply.task,
        "prompt": reply.prompt,
        "seed": reply.seed,
        "split": reply.split,
        "api_key": reply.key,
        "openai_base_url": f"{url}/v1",
        "anthropic_base_url": url,
        "variables": model_environment(episode, url),
        "left": {"seconds": round(reply.left_s, 1) if math.isfinite(reply.left_s) else None},
    }
