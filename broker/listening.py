"""What a connection hands out to those who listen: subscriptions, and places among callbacks."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

F = TypeVar("F", bound=Callable[..., None])
_YIELD_EVERY = 64


class Listening:
    """A subscription; `stop` ends it."""

    def __init__(self, client: Client, subscription: Subscription) -> None:
        """Wrap a subscription of `Broker.listen`."""
        self._client = client
        self._subscription = subscription

    async def stop(self) -> None:
        """Unsubscribe; harmless on a connection that is closed."""
        if not self._client.is_closed:
            with contextlib.suppress(nats.errors.BadSubscriptionError):  # stopped already
                await self._subscription.unsubscribe()


def giving_way(take: Callable[[Msg], None]) -> Callable[[Msg], Awaitable[None]]:
    """Return a callback for nats-py that lets other tasks run now and then.

    nats-py itself goes on for as long as messages wait, however many there are.
    """
    taken = itertools.count(1)

    async def on_message(message: Msg) -> None:
        take(message)
        if next(taken) % _YIELD_EVERY == 0:
            await asyncio.sleep(0)

    return on_message


class Callbacks(Generic[F]):
    """Functions to call when something happens; one may add or remove others."""

    def __init__(self) -> None:
        """Start with none."""
        self._callbacks: list[F] = []

    def add(self, callback: F) -> Callable[[], None]:
        """Add a function; return what removes it, harmless when it is gone."""
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def __iter__(self) -> Iterator[F]:
        """Yield those that are there now."""
        return iter(list(self._callbacks))
