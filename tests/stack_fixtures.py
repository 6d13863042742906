"""Fixtures of the tests that run the whole stack; their conftest files import them."""

import hashlib
import inspect
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path

import pytest
import pytest_asyncio
from tinkermq.actors import tiny_model
from tinkermq.actors import warm_start as warm_start_module
from tinkermq.actors.tiny_model import save_tiny_model
from tinkermq.actors.warm_start import warm_start

from tests.stack import REPOSITORY, Stack

WARM_MODELS = REPOSITORY / "outputs" / "test-models"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model, for runs in which learning does not matter."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", width=64, layers=2, seed=1)


def warm_model(game: str) -> Path:
    """Return the warm-started model of a game, made by its recipe unless it is there.

    The folder's name holds a digest of the sources that decide what the model is.
    """
    sources = [import_module(f"tinkermq.envs.games.{game}"), warm_start_module, tiny_model]
    text = "".join(inspect.getsource(module) for module in sources)
    folder = WARM_MODELS / f"{game}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if not (folder / "config.json").is_file():
        warm_start(game, folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One stack for the tests of a module."""
    async with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(module_stack: Stack) -> AsyncIterator[Stack]:
    """Lend the module's stack to a test; its jobs end with it."""
    yield module_stack
    await module_stack.stop_all()
