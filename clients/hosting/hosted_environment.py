"""Episodes that run inside the user's own process, and reach the pool through one connection.

The host is the one that the pool's environment actors run. It lives in a thread with an event loop
of its own, so that it serves whatever the user's program does meanwhile.
"""

import asyncio
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, Self

from ...schemas.wire.errors import ConfigError
from ..address import JobAddress, parse_server_url
from ..pool_client import open_broker
from ..sync.loop_thread import LoopThread
from ..sync.single_error import single_errors
from .host import hosted

if TYPE_CHECKING:
    from ...broker.client.connection import Broker
    from ...envs.host import EnvironmentHost

_STOP_DEADLINE_S = 40.0


class HasServerUrl(Protocol):
    """A client of one job, such as `ServiceClient`."""

    @property
    def server_url(self) -> str:
        """The job's URL."""
        ...


class HostedEnvironment(ABC):
    """What this process hosts for one job: use it as a context manager, or call `cleanup`."""

    def __init__(self, job_id: str | None, api_key: str | None) -> None:
        """Prepare to host; without `api_key` that of $TINKERMQ_API_KEY counts."""
        self.job_id = job_id
        self._api_key = api_key
        self._loop: LoopThread | None = None
        self._stopping: asyncio.Event | None = None
        self._hosting: Future[None] | None = None

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the part of the job's configuration that this environment decides."""

    @abstractmethod
    async def make_host(self, broker: "Broker", address: JobAddress) -> "EnvironmentHost":
        """Return the host; called in its own thread."""

    async def until_over(
        self, broker: "Broker", address: JobAddress, stopping: asyncio.Event
    ) -> None:
        """Wait for as long as is hosted."""
        del broker, address
        await stopping.wait()

    def setup(self, client: "HasServerUrl | str") -> None:
        """Start hosting for the job of `client` (or of a server_url); harmless when it runs.

        Raises GameError or DataError when the game cannot be played, BrokerError.
        """
        self.check()
        if self._hosting is not None:
            return
        url = client if isinstance(client, str) else client.server_url
        address = parse_server_url(url)
        if self.job_id not in (None, address.scope.job):
            raise ConfigError(
                f"this environment was made for job {self.job_id}, the client is that of job "
                f"{address.scope.job}",
                hint="give both the job_id that submit_job returned",
            )
        self._loop = LoopThread("tinkermq-games")
        ready: Future[None] = Future()
        self._hosting = self._loop.start(self._host(address, ready))
        try:
            _first_of(ready, self._hosting)
        except BaseException:
            self.cleanup()
            raise

    def check(self) -> None:
        """Raise what ended the host, if it has ended by itself."""
        if self._hosting is not None and self._hosting.done():
            hosting, self._hosting = self._hosting, None
            hosting.result()

    @property
    def hosting(self) -> "Future[None] | None":
        """The host's end: a future that is done when it stopped or failed."""
        return self._hosting

    def cleanup(self) -> None:
        """Stop hosting, after the episodes that run have ended; harmless when nothing runs."""
        hosting, self._hosting = self._hosting, None
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if hosting is not None and not hosting.done():
            loop.call(self._stop)
            try:
                hosting.result(_STOP_DEADLINE_S)
            except TimeoutError:
                hosting.cancel()
        loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    async def _host(self, address: JobAddress, ready: "Future[None]") -> None:
        self._stopping = asyncio.Event()
        async with (
            await open_broker(address.broker_url, self._api_key) as broker,
            hosted(await self.make_host(broker, address)),
        ):
            ready.set_result(None)
            await self.until_over(broker, address, self._stopping)


def _first_of(ready: "Future[None]", hosting: "Future[None]") -> None:
    """Wait until the host serves; raise what it raised instead."""
    hosting.add_done_callback(lambda _: ready.done() or ready.set_result(None))
    ready.result()
    if hosting.done():
        with single_errors():
            hosting.result()
