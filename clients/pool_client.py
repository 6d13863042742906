"""What the async clients have in common: one connection to the pool, made at first use."""

from typing import Self

from ..broker.client.connection import Broker, connect
from ..schemas.wire.subjects import DEFAULT_USER
from .pool import Pool
from .sync.quiet import quiet_logs

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
