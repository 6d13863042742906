"""What the clients that are not async have in common: each is the twin of an async one.

The async twin does the work, on the loop that all of them share in a thread; so they work inside a
program that has a loop of its own (a notebook), and give back futures where one does not want to
wait.
"""

from collections.abc import Coroutine
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

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return shared_loop().run(work)

    def _start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return shared_loop().start(work)
