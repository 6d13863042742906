"""Files that users name are looked at in threads that nobody else needs."""

import asyncio
import threading

import pytest
from tinkermq.broker.disk import DiskThreads

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually


async def test_a_disk_that_hangs_holds_up_nobody_but_who_named_it() -> None:
    released = threading.Event()
    threads = DiskThreads(most=2, deadline_s=0.05)
    for _ in range(3):  # two threads hang, and the third look waits for one of them
        with pytest.raises(TimeoutError):
            await threads.look("eve", released.wait, AFTER_PATIENCE_S)
    patient = DiskThreads(most=2, deadline_s=PATIENCE_S)
    assert await patient.look("ada", sorted, [2, 1]) == [1, 2]
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(sorted, [2, 1]) == [1, 2]
    released.set()

    async def is_free() -> bool:
        try:
            return await threads.look("eve", bool, 1)
        except TimeoutError:
            return False

    await eventually(is_free, "a thread of the user to be free again")


async def test_what_a_look_raises_is_raised() -> None:
    threads = DiskThreads(most=1, deadline_s=PATIENCE_S)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.look("ada", divmod, 1, 0)
