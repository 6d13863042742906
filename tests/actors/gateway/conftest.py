"""Fixtures: a pool with a gateway in front of it, and a browser."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.actors.gateway.canned import canned
from tests.support.browser import Browser, open_browser
from tests.support.gateway import Gateway, run_gateway
from tests.support.stack import Stack

__all__ = ["canned"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(shared_stack: Stack) -> AsyncIterator[Gateway]:
    """A gateway to the shared stack, which asks for no keys."""
    async with run_gateway(shared_stack.server.url, shared_stack.folder) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """Debian's chromium, without a window."""
    async with open_browser() as opened:
        yield opened
