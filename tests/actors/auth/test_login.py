"""Who is let in, and who is not."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tinkermq.schemas.message import Empty
from tinkermq.schemas.user import UserReply

from tests.secured import SecuredPool, ask, secured


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[SecuredPool]:
    async with secured(tmp_path) as made:
        yield made


async def test_a_user_gets_in_with_the_own_key_and_learns_who_he_is(pool: SecuredPool) -> None:
    ada = await pool.user("ada")
    told = (await ask(ada, "me", Empty(), UserReply)).user
    assert (told.user, told.role, told.revoked) == ("ada", "user", None)
    assert told.expires > time.time()
