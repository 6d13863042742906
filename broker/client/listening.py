"""What a connection hands out to those who listen: subscriptions, and places among callbacks."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

F = TypeVar("F", bound=Callable[..., None])
_YIELD_EVERY = 64
_BEHIND, _BEHIND_BYTES = 4096, 16 << 20
"""With the most that one read of the socket brings, less than any bound: nothing is dropped."""


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


async def listen(
    client: Client, subject: str, take: Callable[[Msg], None], *, queue: str = ""
) -> Listening:
    """Call `take` with each message on `subject`, and let other tasks run now and then.

    nats-py itself goes on for as long as messages wait, however many there are.
    """
    subscription: Subscription | None = None
    taken = itertools.count(1)

    async def on_message(message: Msg) -> None:
        take(message)
        if next(taken) % _YIELD_EVERY == 0 and not is_behind(subscription):
            await asyncio.sleep(0)

    subscription = await cast("Any", client).subscribe(subject, queue=queue, cb=on_message)
    assert subscription is not None
    return Listening(client, subscription)


def is_behind(subscription: Subscription | None) -> bool:
    """Whether so much waits that nats-py would drop some if it read on before it is taken."""
    return subscription is not None and (
        subscription.pending_msgs > _BEHIND or subscription.pending_bytes > _BEHIND_BYTES
    )


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
