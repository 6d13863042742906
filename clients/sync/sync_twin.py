"""What the clients that are not async have in common: each is the twin of an async one.

The async twin does the work, on the loop that all of them share in a thread; so they work inside a
program that has a loop of its own (a notebook), and give back futures where one does not want to
wait.
"""

import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

from .loop_thread import shared_loop


class Closable(Protocol):
    """An async client."""

    async def close(self) -> None:
        """Close its connection."""
        ...


A = TypeVar("A", bound=Closable)
T = TypeVar("T")


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
