"""What the clients share: a connection of their own, and a synchronous twin of each async one."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, Protocol, Self, TypeVar

import structlog

from ..broker.client.connection import Broker, connect
from ..schemas.wire.errors import root_cause
from ..schemas.wire.subjects import DEFAULT_USER
from .pool import Pool

# Logs of a client: warnings and errors on standard error, and nothing on standard output.

LEVEL_VARIABLE = "TINKERMQ_LOG_LEVEL"


def quiet_logs() -> None:
    """Show only warnings and errors of the parts that run in this process, on standard error.

    `TINKERMQ_LOG_LEVEL=info` shows more. A program that has configured structlog itself keeps its
    own configuration.
    """
    if structlog.is_configured():
        return
    name = os.environ.get(LEVEL_VARIABLE, "warning").upper()
    level = logging.getLevelNamesMapping().get(name, logging.WARNING)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=_to_stderr
    )


def _to_stderr(*_: Any) -> structlog.PrintLogger:
    """Return a logger to the present standard error: notebooks and tests exchange it."""
    return structlog.PrintLogger(sys.stderr)


CONNECT_DEADLINE_S = 10.0


class PoolClient:
    """A client with a connection of its own."""

    def __init__(self, broker_url: str, api_key: str | None) -> None:
        """Name the broker; nothing is connected yet."""
        self._broker_url = broker_url
        self.api_key = api_key
        self._pool: Pool | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; jobs go on."""
        if self._pool is not None:
            await self._pool.broker.close()
            self._pool = None

    async def _connected(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(await open_broker(self._broker_url, self.api_key))
        return self._pool


async def open_broker(url: str, api_key: str | None) -> Broker:
    """Connect on behalf of a client, with the API key given or that of $TINKERMQ_API_KEY."""
    quiet_logs()
    return await connect(
        url,
        name="tinkermq-client",
        user=DEFAULT_USER,
        api_key=api_key,
        deadline_s=CONNECT_DEADLINE_S,
    )


# A private event loop in a thread, for the clients that are not async: see `sync_twin`.

T = TypeVar("T")
_CLEANUP_S = 10.0


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

        What the coroutine does at its cancellation is waited for, for a moment.
        """
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
            # a task of a user's function may stop the loop, or end it by SystemExit; who awaits
            # that task gets it as well
            with contextlib.suppress(BaseException):
                self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@cache
def shared_loop() -> LoopThread:
    """Return the loop that all synchronous clients of this process share."""
    return LoopThread()


# What the clients that are not async have in common: each is the twin of an async one.
#
# The async twin does the work, on the loop that all of them share in a thread; so they work
# inside a program that has a loop of its own (a notebook), and give back futures where one does
# not want to wait.


class Closable(Protocol):
    """An async client."""

    async def close(self) -> None:
        """Close its connection."""
        ...


A = TypeVar("A", bound=Closable)


class Detached(KeyboardInterrupt, SystemExit):
    """An interrupt of a wait: what was waited for goes on in the pool.

    Its text says so, and what to do. It is a KeyboardInterrupt to whoever expects one; a program
    that it ends has the exit code of an interrupt and no traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 130


class SyncTwin(Generic[A]):
    """A context manager around an async client."""

    def __init__(self, aio: A) -> None:
        self.aio = aio
        """The async twin that does the work."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what runs in the pool goes on."""
        self._run(self.aio.close())

    def _run(self, work: Coroutine[Any, Any, T], goes_on: Callable[[], str] | None = None) -> T:
        """Wait for the async twin; `goes_on` says what is left running by an interrupt."""
        try:
            return shared_loop().run(work)
        except KeyboardInterrupt:
            text = goes_on() if goes_on is not None else ""
            if not text:
                raise
            sys.stderr.write(f"\n{text}\n")
            raise Detached(text) from None

    def _start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return shared_loop().start(work)


# One error of ours out of the groups that concurrent work wraps around it.


@contextmanager
def single_errors() -> Iterator[None]:
    """Raise the one TinkermqError inside an exception group by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
