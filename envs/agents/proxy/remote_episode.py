"""The gateway's part of an episode whose program runs elsewhere: requests, and reports to its host.

Model calls go to the episode's generator, as in the host's own proxy; the host answers all other
requests, so any gateway can serve any request of it. A gateway stores only open calls and its own
earlier answers.
"""

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ....broker.client.connection import Broker
from ....broker.client.keys import EpisodeIdentity
from ....broker.client.parts import SharedInbox, ask_parts, last_part
from ....schemas.agent import EpisodePost, EpisodePosted, ReportedCall
from ....schemas.http_server import Receive, Scope, Send
from ....schemas.wire import errors
from ....schemas.wire.codec import read_json
from ..episode import EpisodeOver, ProgramEpisode
from .calls import CallAsker, EpisodeSubjects, OpenEpisode, OpenEpisodes, ProgramCalls, ProxyTimes
from .exchange import BodyRoom, JsonAnswer, KeyRefused, NobodyPlays, read_body
from .model_calls import ModelCalls
from .routes import MAX_POST_BYTES, ProxyRoutes

KEPT_BYTES = 256 << 10
"""Bound on the stored answers of each episode at one gateway."""
_MAX_UNREPORTED = 1024
_PAUSE_S = 0.2
_ANSWERED_S = 2.0
"""How long the end of an answer waits for the report to the host."""


@dataclass(frozen=True)
class HostTimes:
    """Times and limits of a gateway's messages to the hosts of episodes."""

    report_s: float = 2.0
    """Interval of reports while calls are open."""
    silence_s: float = 10.0
    """Time limit of a host's answer."""
    away_s: float = 10.0
    """Time without the host after which its episode counts as over."""
    first_s: float = 5.0
    """The same limit before the host's first answer."""
    patience_s: float = 120.0
    """Time limit of an answer while the broker may be away."""


class RemoteEpisode:
    """Answers the requests of one episode's program, over the program's own connection."""

    def __init__(
        self,
        broker: Broker,
        identity: EpisodeIdentity,
        key: str,
        room: BodyRoom,
        *,
        times: ProxyTimes | None = None,
        host_times: HostTimes | None = None,
    ) -> None:
        """`broker` is connected with `key`; `room` is the memory for the bodies of all programs."""
        self.used = time.monotonic()
        """When its last request ended."""
        self.num_requests = 0
        """Number of requests that are being answered."""
        self.broker = broker
        self.user = identity.user
        times = times or ProxyTimes()
        self._times = host_times or HostTimes()
        self._scope = identity.scope
        self._room = room
        self._source = uuid.uuid4().hex
        self._episode = ProgramEpisode(identity.episode, {}, job=identity.job, key=key)
        calls = ProgramCalls(times.adopt_s)
        subjects = EpisodeSubjects.of(identity.scope, identity.episode)
        self._opened = OpenEpisode(self._episode, subjects, calls, kept_bytes=KEPT_BYTES)
        episodes = OpenEpisodes()
        episodes.add(self._opened)
        self._inbox = SharedInbox(broker)
        asker = _RemoteAsker(broker, times, self._inbox, self)
        self._routes = ProxyRoutes(episodes, ModelCalls(asker, room), relay=self._relay)
        self._unreported: list[ReportedCall] = []
        self._reported: tuple[int, str] = (0, "")
        self._away_since: float | None = None
        self._away_s = self._times.first_s
        self._reporting: asyncio.Task[None] | None = None

    @property
    def over(self) -> str:
        """Why its program's calls are not answered any more; empty: they are answered."""
        return self._episode.over

    async def check(self) -> None:
        """Check that the host accepts the key.

        Raises KeyRefused if it does not, or if there is no host; NobodyPlays if that is unknown.
        """
        try:
            await self._send_patiently(self._post())
        except NobodyPlays as error:
            if not self.over:
                raise
            raise KeyRefused(
                "no host has the episode of this key: it is over, or its host is away",
                hint="each try of an episode has its own key; stop calling",
            ) from error
        self._reporting = asyncio.create_task(self._report_changes(), name="report to a host")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises no error."""
        self.num_requests += 1
        try:
            await self._routes(scope, receive, send)
        finally:
            self.num_requests -= 1
            self.used = time.monotonic()

    async def close(self) -> None:
        """End open calls, report to the host, and disconnect."""
        if self._reporting is not None:
            self._reporting.cancel()
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(self.broker.close)
            for call in self._opened.calls.end(EpisodeOver("the gateway ends")):
                await call.settle()
            if self._reported[0] and not self.over:
                self._episode.num_open = 0
                with contextlib.suppress(errors.TinkermqError, TimeoutError):
                    async with asyncio.timeout(_ANSWERED_S):
                        await self._send(self._post())

    async def note_answered(self, names: list[str], calls: list[int]) -> None:
        """Report an answered call to the host before the program gets the end of the answer."""
        self._unreported.append(ReportedCall(names=names, calls=calls))
        del self._unreported[:-_MAX_UNREPORTED]
        with contextlib.suppress(errors.TinkermqError, TimeoutError):  # the next report has it
            async with asyncio.timeout(_ANSWERED_S):
                await self._send(self._post())

    async def look_up(self, name: str) -> None:
        """Find the call with an id, which another gateway may have answered."""
        try:
            self._opened.call_number(name)
        except errors.NotFoundError:
            posted = await self._send_patiently(
                self._post(method="GET", path=f"/v1/episode/calls/{name[:512]}")
            )
            if posted.status == 200:
                value: Any = read_json(posted.body)
                self._opened.learn([name], [int(value["call"])])

    async def _relay(self, request: Request) -> Response:
        """Relay a request to the host."""
        raw = b""
        if request.method == "POST":
            raw = await read_body(request, MAX_POST_BYTES, self._room)
        name = request.headers.get("idempotency-key", "")[:256]
        path = f"/v1{request.scope['path']}"[:1024]
        post = self._post(method=request.method, path=path, name=name, body=raw)
        posted = await self._send_patiently(post)
        return JsonAnswer(posted.body, posted.status, posted.headers)

    def _post(self, **request: Any) -> EpisodePost:
        episode = self._episode
        return EpisodePost(
            request=uuid.uuid4().hex,
            key=episode.key,
            source=self._source,
            num_open=episode.num_open,
            answered=list(self._unreported),
            limit=episode.limit,  # pyright: ignore[reportArgumentType]
            **request,
        )

    async def _send_patiently(self, post: EpisodePost) -> EpisodePosted:
        """Send a post to the host, repeatedly while it is away; NobodyPlays after a while."""
        deadline = time.monotonic() + self._times.patience_s
        while True:
            try:
                return await self._send(post)
            except (errors.DeniedError, errors.LogInRefusedError):
                raise
            except (errors.NobodyAnswersError, errors.DeadlineError, errors.BrokerError) as error:
                if self.over or time.monotonic() > deadline:
                    raise NobodyPlays(
                        f"the host of the episode does not answer: {self.over or error.message}",
                        hint="try again: it may come back",
                    ) from error
            await asyncio.sleep(_PAUSE_S)
            post = post.model_copy(update={"request": uuid.uuid4().hex})

    async def _send(self, post: EpisodePost) -> EpisodePosted:
        """Send a post to the host once; KeyRefused if it refuses the key."""
        parts = ask_parts(
            self.broker,
            self._scope.episode(self._episode.episode, "post"),
            post,
            EpisodePosted,
            waiting_for=f"the host of episode {self._episode.episode}",
            silence_s=self._times.silence_s,
            shared=self._inbox,
        )
        try:
            posted = await last_part(parts)
        except (errors.NobodyAnswersError, errors.DeadlineError):
            self._miss()
            raise
        except errors.AuthError as error:
            self._end(error.message)
            raise KeyRefused(error.message, hint=error.hint) from error
        self._away_since, self._away_s = None, self._times.away_s
        self._reported = post.num_open, post.limit
        reported = {call.calls[0] for call in post.answered}
        self._unreported = [call for call in self._unreported if call.calls[0] not in reported]
        if posted.over:
            self._end(posted.over)
        return posted

    async def _report_changes(self) -> None:
        """Report while calls are open, and when they end, until the episode is over."""
        episode = self._episode
        while not self.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._times.report_s if self._reported[0] else None):
                    await episode.changed.wait()
            episode.changed.clear()
            if episode.num_open or self._reported != (episode.num_open, episode.limit):
                with contextlib.suppress(errors.TinkermqError):  # the next report has it
                    await self._send(self._post())
            await asyncio.sleep(_PAUSE_S)

    def _miss(self) -> None:
        """Count the host as away; the episode is over after a while.

        The host is not counted as away while the broker is away or has just come back.
        """
        now = time.monotonic()
        if not self.broker.settled:
            self._away_since = None
            return
        self._away_since = self._away_since or now
        if now - self._away_since >= self._away_s:
            self._end("its host is away")

    def _end(self, why: str) -> None:
        self._episode.over = self._episode.over or why
        self._opened.calls.end(EpisodeOver(f"the episode is over: {why}"))


@dataclass(frozen=True)
class _RemoteAsker(CallAsker):
    """Makes the calls of a program elsewhere, and reports to its host."""

    remote: RemoteEpisode

    async def note_answered(self, names: list[str], calls: list[int]) -> None:
        await self.remote.note_answered(names, calls)

    async def look_up(self, name: str) -> None:
        await self.remote.look_up(name)
