"""Fixtures that all tests share: a real nats-server, connections, and the streams of a job."""

import asyncio
import gc
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    create_shared,
    delete_job_streams,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.measured import measured_s
from tests.support.stack_fixtures import gate, model, shared_stack, stack

__all__ = ["gate", "model", "shared_stack", "stack"]

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A shell's background job ignores it, and so would all that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing asks beyond this machine

_numbers = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from what stays: a quarter of the time would go into it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that is deselected as a whole, by a `not` of one of its `pytestmark`s."""
    if collection_path.suffix != ".py":
        return None
    wanted = config.option.markexpr.split(" and ")
    marked = re.search(r"^pytestmark = .*(?:\n .*)*", collection_path.read_text(), re.M)
    marks = re.findall(r"pytest\.mark\.(\w+)", marked[0]) if marked else []
    return True if any(f"not {mark}" in wanted for mark in marks) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest modules first, so that several workers end at about the same time."""
    seconds = measured_s()
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(config.rootpath).as_posix(), 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the core's modules that share a stack to one process, so that one stack is started."""
    if config.option.dist != "loadfile" or "not full" not in config.option.markexpr.split(" and "):
        return None  # most others need a stack: each process has one
    from xdist.scheduler.loadfile import LoadFileScheduling

    class ByStack(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = super()._split_scope(nodeid)
            text = (config.rootpath / module).read_text()
            has_stack = re.search(r"^from tests\.support\.stack import .*Stack", text, re.M)
            return "stack" if has_stack else module

    return ByStack(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Forget how the last session ended; `make test-again` asks."""
    _remember_end(session.config, None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember that all tests ran, and some failed, for `make test-again`."""
    _remember_end(session.config, int(exitstatus))


def _remember_end(config: pytest.Config, status: int | None) -> None:
    cache: pytest.Cache | None = getattr(config, "cache", None)  # `-p no:cacheprovider`: none
    if cache is not None and not hasattr(config, "workerinput"):
        cache.set("tinkermq/exit_status", status)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for all tests of the session; a test that kills takes `own_server`.

    It has the shared buckets.
    """

    async def make_buckets(url: str) -> None:
        async with await connect(url, name="test") as connection:
            await create_shared(connection)

    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        asyncio.run(make_buckets(server.url))
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may kill and restart."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def broker(nats_server: NatsServer) -> AsyncIterator[Broker]:
    """A connection to the session's server."""
    async with await connect(nats_server.url, name="test") as connection:
        yield connection


@pytest.fixture
async def own_broker(own_server: NatsServer) -> AsyncIterator[Broker]:
    """A connection to the test's own server, with the shared buckets made."""
    async with await connect(own_server.url, name="test") as connection:
        await create_shared(connection)
        yield connection


@pytest.fixture
async def scope(broker: Broker) -> AsyncIterator[JobScope]:
    """A fresh job with its streams on the session's server, deleted afterwards."""
    fresh = JobScope("local", f"job-{next(_numbers)}")
    await create_job_streams(broker, fresh, LimitsConfig())
    yield fresh
    await delete_job_streams(broker, fresh)


@pytest.fixture
async def own_scope(own_broker: Broker) -> JobScope:
    """A fresh job with its streams on the test's own server."""
    fresh = JobScope("local", "job-own")
    await create_job_streams(own_broker, fresh, LimitsConfig())
    return fresh
