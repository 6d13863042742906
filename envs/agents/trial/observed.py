"""A proxy that takes note of what a program asks for, and of when it runs."""

import contextlib
import socket
import time
from dataclasses import dataclass, field

from ....broker.client.connection import Broker
from ....schemas.wire.subjects import JobScope
from ..episode import ProgramEpisode
from ..proxy.exchange import HttpExchange
from ..proxy.proxy import ModelProxy

MAX_REQUESTS = 4096


@dataclass(frozen=True)
class SeenRequest:
    """One HTTP request of a program."""

    what: str
    """Its method and path, without a key: `POST /v1/responses`."""
    client: str
    """How its client names itself."""
    status: int
    """What it was answered; 0: it had gone."""


@dataclass(eq=False)
class Observed:
    """What is known of one program from outside."""

    episode: ProgramEpisode
    requests: list[SeenRequest] = field(default_factory=list[SeenRequest])
    """What it asked for, in the order of the answers; the first ones of very many."""
    began_s: float = field(default_factory=time.monotonic)
    """Monotonic time of its start."""
    ended_s: float = 0.0
    """Monotonic time of its end; 0: it has not ended."""


class ObservedProxy:
    """The proxy of one program at a time."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Prepare it; use it as the proxy that it stands for."""
        self.now: Observed | None = None
        """The program that runs, or was the last."""
        self._proxy = ModelProxy(broker, scope, seen=self._see)

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return self._proxy.base_url

    def open(self, episode: ProgramEpisode) -> None:
        """Begin to take note of an episode's program."""
        self.now = Observed(episode)
        self._proxy.open(episode)

    def close(self, episode: str) -> None:
        """Take note of its end."""
        if self.now is not None and self.now.episode.episode == episode:
            self.now.ended_s = self.now.ended_s or time.monotonic()
        self._proxy.close(episode)

    def env_of(self, episode: ProgramEpisode, base_url: str) -> dict[str, str]:
        """Return the variables by which a program finds the model."""
        return self._proxy.env_of(episode, base_url)

    def listen(self, listening: socket.socket) -> contextlib.AbstractAsyncContextManager[None]:
        """Listen at a program's socket, too."""
        return self._proxy.listen(listening)

    async def __aenter__(self) -> "ObservedProxy":
        await self._proxy.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._proxy.__aexit__(*exc_info)

    def _see(self, exchange: HttpExchange, path: str) -> None:
        if self.now is None or len(self.now.requests) >= MAX_REQUESTS:
            return
        client = exchange.headers.get("user-agent", "")[:100]
        what = f"{exchange.method} /v1/{path}"[:200] if path else f"{exchange.method} /"
        self.now.requests.append(SeenRequest(what, client, exchange.status))
