"""One pool with authentication for the tests of a module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.secured import SecuredPool, secured


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredPool]:
    """A pool that the tests of a module share."""
    async with secured(tmp_path_factory.mktemp("secured")) as made:
        yield made
