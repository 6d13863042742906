"""One command's connection to the pool."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...broker.client.connection import connect
from ..home import find_url
from ..pool import Pool
from ..sync.quiet import quiet_logs
from ..sync.single_error import single_errors

T = TypeVar("T")

CONNECT_DEADLINE_S = 5.0


def with_pool(
    nats_url: str | None, work: Callable[[Pool], Awaitable[T]], *, api_key: str | None = None
) -> T:
    """Connect to the named broker, or to that of the local stack, run `work`, and close.

    Without `api_key` that of $TINKERMQ_API_KEY counts. Raises the one TinkermqError inside an
    exception group by itself.
    """

    quiet_logs()

    async def body() -> T:
        url = find_url(nats_url)
        connecting = connect(url, name="tinkermq", api_key=api_key, deadline_s=CONNECT_DEADLINE_S)
        async with await connecting as broker:
            return await work(Pool(broker))

    with single_errors():
        return asyncio.run(body())
