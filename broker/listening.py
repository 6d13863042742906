"""What a connection hands out to those who listen: subscriptions, and places among callbacks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription

F = TypeVar("F", bound=Callable[..., None])


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
