"""Fixtures of the tests that run the whole stack; tests/conftest.py imports them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tinkermq.actors.policy.tiny_models import TinyKind, save_tiny_model
from tinkermq.schemas.node import NodeList
from tinkermq.schemas.wire.message import Empty

from tests.support.configs import REPOSITORY
from tests.support.gate import Gate
from tests.support.stack import Stack

WARM_MODELS = REPOSITORY / "outputs" / "models"
"""Where the examples expect them; made once, by whoever comes first."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model, for runs in which learning does not matter."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", width=64, layers=2, seed=1)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a gate of the test's own, which is open at the end."""
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


def warm_model(game: str, kind: TinyKind = "qwen3") -> Path:
    """Return the warm-started model of a game, made by its recipe unless it is there."""
    from tinkermq.actors.warm_start import warm_start

    folder = WARM_MODELS / (game if kind == "qwen3" else f"{game}-{kind}")
    warm_start(game, folder, kind=kind)
    return folder


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One stack for all tests of this process: its fork server imports torch once."""
    async with Stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared_stack: Stack) -> AsyncIterator[Stack]:
    """Lend the shared stack to a test; its jobs end with it.

    The loop of its connection stands still while tests with loops of their own run. So the server
    may have ended the connection; the stack's answer shows that there is one again.
    """
    await shared_stack.ask("nodes", Empty(), NodeList)
    yield shared_stack
    await shared_stack.stop_all()
