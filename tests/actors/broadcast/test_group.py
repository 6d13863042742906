"""Process groups whose members leave: who still waits for them is told."""

import asyncio

import pytest
import torch
from tinkermq.actors.weights.broadcast_group import (
    ProcessGroup,
    ProcessGroupFailed,
    open_store,
    reach_store,
)

from tests.support.waiting import PATIENCE_S

HOST = "127.0.0.1"
SIZE = 1 << 23


async def test_who_waits_for_a_member_that_has_failed_is_told() -> None:
    store = open_store(HOST)
    stores = [store, *(reach_store(HOST, store.port) for _ in range(2))]
    meetings = [
        asyncio.to_thread(ProcessGroup.meet, one, "one", rank, 3, torch.device("cpu"), HOST)
        for rank, one in enumerate(stores)
    ]
    sender, waiting, gone = await asyncio.gather(*meetings)
    gone.leave()
    payload = torch.zeros(SIZE, dtype=torch.uint8)
    with pytest.raises(ProcessGroupFailed, match="broke") as kept:
        await asyncio.to_thread(sender.send, payload)
    with pytest.raises(ProcessGroupFailed, match=r"broke: .*onnection"):
        async with asyncio.timeout(PATIENCE_S / 2):
            await asyncio.to_thread(waiting.receive, SIZE)
    assert kept.value.hint
