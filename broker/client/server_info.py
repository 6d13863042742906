"""The INFO that a NATS server sends on each connection, read without logging in."""

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import urlsplit

from ...schemas.wire import errors
from .faults import server_urls, shown_url

_DEADLINE_S = 5.0


async def read_server_info(url: str) -> dict[str, Any]:
    """Return the INFO of the first NATS server that answers.

    Raises BrokerError.
    """
    *others, last = server_urls(url)
    for other in others:
        with contextlib.suppress(errors.BrokerError):
            return await _read_info(other)
    return await _read_info(last)


async def _read_info(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or 4222, limit=1 << 20
            )
            try:
                line = await reader.readline()
            finally:
                writer.close()
        return dict(json.loads(line.removeprefix(b"INFO ")))
    except (OSError, ValueError, TimeoutError) as error:
        raise errors.BrokerError(
            f"no NATS server answers at {shown_url(url)} ({error or type(error).__name__})",
            hint="start one with `tinkermq up`, or name another: --nats URL",
        ) from error
