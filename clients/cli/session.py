"""A command's connection to the pool or to a temporary broker, and the options for it."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter

from ...broker.client.connection import Broker, connect
from ..base import quiet_logs, unwrap_error_groups
from ..home import find_url
from ..pool import Pool

T = TypeVar("T")

CONNECT_DEADLINE_S = 5.0


def with_pool(nats_url: str | None, work: Callable[[Pool], Awaitable[T]]) -> T:
    """Connect to the named broker or the local stack's, run `work`, and close.

    A single TinkermqError in an exception group is raised by itself.
    """

    quiet_logs()

    async def body() -> T:
        url = find_url(nats_url)
        connecting = connect(url, name="tinkermq", deadline_s=CONNECT_DEADLINE_S)
        async with await connecting as broker:
            return await work(Pool(broker))

    with unwrap_error_groups():
        return asyncio.run(body())


# Options that most commands have.


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """The pool to use and the format of the output."""

    nats_url: Annotated[
        str | None,
        Parameter(help="The broker; default: $TINKERMQ_NATS_URL, or the local stack."),
    ] = None
    json: Annotated[bool, Parameter(help="Print JSON; a stream is one document a line.")] = False


COMMON = Common()
"""The defaults."""


def positive(_: Any, value: float) -> None:
    """Validate that an option is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError("Must be > 0, and finite.")


# A temporary broker for one command.


def with_private_broker(work: Callable[[Broker], Awaitable[T]]) -> T:
    """Start a broker in a temporary folder, run `work` with it, and stop it."""
    from ...broker.nats_server import NatsServer
    from ...schemas.local.folder import temporary_folder

    quiet_logs()

    async def body(url: str) -> T:
        async with await connect(url, name="tinkermq") as broker:
            return await work(broker)

    with (
        unwrap_error_groups(),
        temporary_folder("trial") as folder,
        NatsServer(folder) as server,
    ):
        return asyncio.run(body(server.url))
