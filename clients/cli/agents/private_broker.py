"""A broker of one command's own, on this machine, gone with it."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from ....broker.client.connection import Broker, connect
from ....broker.nats_server import NatsServer
from ....schemas.config.job import JobConfig
from ....schemas.config.load_config import load_config
from ...sync.quiet import quiet_logs
from ...sync.single_error import single_errors

T = TypeVar("T")


def with_private_broker(work: Callable[[Broker], Awaitable[T]]) -> T:
    """Start a broker in a temporary folder, run `work` with it, and stop it."""
    quiet_logs()

    async def body(url: str) -> T:
        async with await connect(url, name="tinkermq") as broker:
            return await work(broker)

    with (
        single_errors(),
        tempfile.TemporaryDirectory(prefix="tinkermq-trial-") as folder,
        NatsServer(Path(folder)) as server,
    ):
        return asyncio.run(body(server.url))


def agent_job(config: Path, overrides: tuple[str, ...]) -> JobConfig:
    """Read the configuration of an agent job; it need not name a model."""
    return load_config(config, ["model.path=none", *overrides])
