"""OpenAI's endpoints on a real port, asked with the official client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from tinkermq.actors.gateway.openai import routes
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.broker.client.connection import Broker

from tests.support.waiting import PATIENCE_S, until


@asynccontextmanager
async def serving(broker: Broker, **options: float) -> AsyncIterator[str]:
    """Yield the base URL of a gateway that has nothing but OpenAI's endpoints."""

    async def of_everybody(_: Request) -> Broker:
        return broker

    app = Starlette(routes=routes(of_everybody, Trainers(), **options))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve(), name="gateway")
    try:
        await until(lambda: server.started or running.done(), "the gateway to listen")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        await running


@asynccontextmanager
async def openai_client(broker: Broker) -> AsyncIterator[AsyncOpenAI]:
    """Yield the official client of such a gateway; it never tries again by itself."""
    async with serving(broker) as url:
        client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=PATIENCE_S)
        try:
            yield client
        finally:
            await client.close()
