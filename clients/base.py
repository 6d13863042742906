"""Shared by the clients: the connection to the pool, URLs, and twins of the async clients.

The async client does the work. Its synchronous twin runs it on an event loop in a thread, which all
twins of the process share. So a twin also works in a program with its own event loop (a notebook),
and can return futures.
"""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar
from urllib.parse import SplitResult

import structlog

from ..broker.client.connection import Broker, connect
from ..broker.client.faults import shown_url, split_servers
from ..schemas.wire.errors import ConfigError, NotFoundError, StateError, root_cause
from ..schemas.wire.subjects import DEFAULT_USER, JobScope
from .pool import Pool

CONNECT_DEADLINE_S = 10.0
LEVEL_VARIABLE = "TINKERMQ_LOG_LEVEL"
_CLEANUP_S = 10.0


class PoolClient:
    """An async client with a connection of its own, which is opened at its first use.

    A connection belongs to the event loop that opened it. In another event loop (a second
    `asyncio.run`, the child of a fork) the client opens a new connection and does not touch the old
    one.
    """

    def __init__(self, broker_url: str, api_key: str | None, owner: str | None = None) -> None:
        """Name the broker; nothing is connected yet. `owner` is the owner of the client's job."""
        self._broker_url, self._owner = broker_url, owner
        self.api_key = api_key
        self._pool: Pool | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown_url(self._broker_url)!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; jobs keep running."""
        self._enter_loop()
        if self._pool is not None:
            await self._pool.broker.close()
            self._pool = None

    async def _connected(self) -> Pool:
        self._enter_loop()
        async with self._opening:
            if self._pool is None:
                self._pool = Pool(await open_broker(self._broker_url, self.api_key, self._owner))
            return self._pool

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._opening, self._pool = loop, asyncio.Lock(), None


async def open_broker(url: str, api_key: str | None, owner: str | None = None) -> Broker:
    """Connect for a client, with `api_key` or that of $TINKERMQ_API_KEY.

    Raises NotFoundError if the user does not own the client's job.
    """
    quiet_logs()
    broker = await connect(
        url,
        name="tinkermq-client",
        user=DEFAULT_USER,
        api_key=api_key,
        deadline_s=CONNECT_DEADLINE_S,
    )
    if owner not in (None, broker.user):
        await broker.close()
        raise NotFoundError(
            f"the job belongs to user {owner!r}, and you are {broker.user!r}",
            hint=f"name a job of your own, or give the key of {owner}: api_key, $TINKERMQ_API_KEY",
        )
    return broker


def quiet_logs() -> None:
    """Log only warnings and errors of the parts that run in this process, to standard error.

    `TINKERMQ_LOG_LEVEL=info` shows more. A program that has configured structlog itself keeps its
    own configuration.
    """
    if structlog.is_configured():
        return
    name = os.environ.get(LEVEL_VARIABLE, "").upper()
    level = logging.getLevelNamesMapping().get(name, logging.WARNING)
    structlog.configure(
        processors=None if name else [structlog.processors.format_exc_info, _plain],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_stderr_logger,
    )


def _plain(_logger: Any, level: str, entry: MutableMapping[str, Any]) -> str:
    """Return an entry as a line for people: its words, its values, and the hint."""
    words, hint = str(entry.pop("event")).replace("_", " "), entry.pop("hint", "")
    values = ", ".join(f"{key}={value}" for key, value in entry.items())
    return f"{level}: {words} ({values})" + (f"; {hint}" if hint else "")


def _stderr_logger(*_: Any) -> structlog.PrintLogger:
    """Return a logger to the current standard error: notebooks and tests replace it."""
    return structlog.PrintLogger(sys.stderr)


def listed(texts: str | Sequence[str]) -> list[str]:
    """Return texts as a list; a single text becomes a list of one."""
    return [texts] if isinstance(texts, str) else list(texts)


@contextlib.contextmanager
def unwrap_error_groups() -> Iterator[None]:
    """Raise the first TinkermqError of an exception group in place of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


# -- synchronous twins -----------------------------------------------------------------------------

A = TypeVar("A", bound=PoolClient)
P = ParamSpec("P")
T = TypeVar("T")


class Detached(KeyboardInterrupt, SystemExit):
    """A wait was interrupted, and the work continues in the pool.

    Its text names the work, and the commands to attach to it or stop it. It is a KeyboardInterrupt;
    a program that it ends has the exit code of an interrupt and no traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 130


class SyncTwin(Generic[A]):
    """A synchronous client: a context manager around the async client that does the work.

    `make_sync` and `make_future` make its methods from those of the async client, with the same
    signatures and docstrings.
    """

    def __init__(self, aio: A) -> None:
        self.aio = aio
        """The async client."""

    def __repr__(self) -> str:
        return repr(self.aio).removeprefix("Async")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; jobs keep running."""
        shared_loop().run(self.aio.close())


def make_sync(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
    describe_detached: Callable[[A], str] | None = None,
) -> Callable[Concatenate[SyncTwin[A], P], T]:
    """Return the method of a synchronous client that waits for `method` of the async one.

    `describe_detached` returns a text on the work that an interrupt leaves in the pool, or an empty
    text. The text is printed and raised in Detached.
    """

    @functools.wraps(method)
    def wait(twin: SyncTwin[A], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return shared_loop().run(method(twin.aio, *args, **kwargs))
        except KeyboardInterrupt:
            text = describe_detached(twin.aio) if describe_detached is not None else ""
            if not text:
                raise
            sys.stderr.write(f"\n{text}\n")
            raise Detached(text) from None

    return wait


def make_future(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncTwin[A], P], "Future[T]"]:
    """Return the method of a synchronous client that starts `method` of the async one.

    It returns a future at once; `.result()` waits.
    """

    @functools.wraps(method)
    def start_it(twin: SyncTwin[A], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return shared_loop().start(method(twin.aio, *args, **kwargs))

    start_it.__doc__ = f"Start `{method.__name__}` and return a future; `.result()` waits."
    return start_it


def make_blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the function that waits for a `…_async` one, with its signature and docstring."""

    @functools.wraps(function)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return shared_loop().run(function(*args, **kwargs))

    wait.__name__ = wait.__qualname__ = function.__name__.removesuffix("_async")
    return wait


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self, name: str = "tinkermq") -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; `.result()` of the future waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt of the caller cancels it.

        The cancelled coroutine has ten seconds to clean up. Raises StateError in the loop's own
        thread, which would deadlock.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise StateError(
                "a callback of a client cannot wait for a synchronous client: both would wait for "
                "each other",
                hint="take a …_future method there, or a thread of your own",
            )
        began, ended = threading.Event(), threading.Event()

        async def whole() -> T:
            began.set()
            try:
                return await work
            finally:
                ended.set()

        future = self.start(whole())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            if began.is_set():
                ended.wait(_CLEANUP_S)
            else:
                work.close()
            raise

    def call(self, callback: Callable[[], object]) -> None:
        """Call a plain function in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Stop the loop and end the thread."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # a task of a user's function may stop the loop, or end it with SystemExit, which the
            # task's awaiter gets as well
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Shared:
    """The shared loop of this process, once it is used."""

    loop: LoopThread | None = None
    starting = threading.Lock()


def shared_loop() -> LoopThread:
    """Return the loop that all synchronous clients of this process share."""
    with _Shared.starting:
        if _Shared.loop is None:
            _Shared.loop = LoopThread()
        return _Shared.loop


def _forget_loop() -> None:
    """Forget the loop in the child of a fork, which has none of its parent's threads."""
    _Shared.loop, _Shared.starting = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_loop)


# -- URLs ------------------------------------------------------------------------------------------
#
# A broker has `nats://host:port`, a job `nats://host:port/<user>/<job>`. The servers of a cluster
# are separated by commas: `tls://a:4222,b:4222,c:4222/<user>/<job>`.

_SCHEMES = frozenset({"nats", "tls", "ws", "wss"})


@dataclass(frozen=True)
class JobAddress:
    """Address of a job: broker, user and job id."""

    broker_url: str
    """URL of the broker."""
    scope: JobScope
    """The job's names."""

    @property
    def server_url(self) -> str:
        """URL of the job: broker, user and job id."""
        return f"{self.broker_url}/{self.scope.user}/{self.scope.job}"


def parse_broker_url(url: str) -> str:
    """Return the URL of a broker without a path.

    Raises ConfigError for another kind of URL, such as `http://…`.
    """
    servers = _split_url(url)
    return f"{servers[0].scheme}://{','.join(server.netloc for server in servers)}"


def parse_server_url(url: str) -> JobAddress:
    """Read a job's URL.

    Raises ConfigError when it names no job.
    """
    broker_url = parse_broker_url(url)
    tokens = [part for part in _split_url(url)[-1].path.split("/") if part]
    if len(tokens) != 2:
        raise ConfigError(
            f"{shown_url(url)!r} does not name a job",
            hint="use the server_url that submit_job returned: nats://host:port/<user>/<job>",
        )
    return JobAddress(broker_url, JobScope(*tokens))


def _split_url(url: str) -> list[SplitResult]:
    try:
        return split_servers(url if "//" in url else f"nats://{url}", _SCHEMES)
    except ValueError as error:
        raise ConfigError(
            f"{shown_url(url)!r} is not the URL of a broker",
            hint="write nats://host:port; `tinkermq up` prints it",
        ) from error
