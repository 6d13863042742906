"""Fixtures: a pool with a gateway in front of it, and a browser."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.browser import Browser, open_browser
from tests.gateway import Gateway, run_gateway
from tests.stack import Stack
from tests.stack_fixtures import model, module_stack, stack

__all__ = ["model", "module_stack", "stack"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(module_stack: Stack) -> AsyncIterator[Gateway]:
    """A gateway to the module's stack, which asks for no keys."""
    async with run_gateway(module_stack.server.url, module_stack.folder) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Debian's chromium, without a window."""
    async with open_browser() as opened:
        yield opened
