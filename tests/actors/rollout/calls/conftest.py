"""Calls are answered by both engines, in whose event loop their tests run."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.engine.conftest import EngineKind, StartEngine
from tests.actors.rollout.calls.asking import Asking

TOOLS_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest_asyncio.fixture(loop_scope="package")
async def asking(start: StartEngine, folder: Path, engine_kind: EngineKind) -> Asking:
    """Each engine with a tiny model, whose template names tools."""
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = TOOLS_TEMPLATE + tokenizer.chat_template
    return Asking(await start(folder), ChatTokenizer(tokenizer), folder, engine_kind)


@pytest_asyncio.fixture(loop_scope="package")
async def broker(nats_server: NatsServer) -> AsyncIterator[Broker]:
    """A connection to the session's server, in the engines' event loop."""
    async with await connect(nats_server.url, name="test") as connection:
        yield connection


@pytest_asyncio.fixture(loop_scope="package")
async def recorded(broker: Broker) -> AsyncIterator[JobScope]:
    """A job whose running episodes are written down."""
    scope = JobScope("local", f"job-calls-{uuid.uuid4().hex[:8]}")
    await create_job_streams(broker, scope, LimitsConfig(), segments=True)
    yield scope
    await delete_job_streams(broker, scope)
