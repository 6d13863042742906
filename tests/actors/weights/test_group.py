"""Process groups whose members leave: who still waits for them is told."""

import asyncio
import contextlib
import inspect
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tinkermq.actors.weights import broadcast_group
from tinkermq.actors.weights.broadcast import _apart, _Asker, _held_or_copied, route
from tinkermq.actors.weights.broadcast_group import (
    ProcessGroup,
    ProcessGroupFailed,
    SharedBufferGroup,
    open_store,
    reach_store,
)
from tinkermq.schemas.weights import JoinRound, Round
from torch.multiprocessing import reductions

from tests.support.waiting import PATIENCE_S

HOST = "127.0.0.1"
CPU = torch.device("cpu")
_LOOPBACK = socket.inet_aton(HOST)
_SOCKET_ADDRESS = re.compile(
    re.escape(socket.AF_INET.to_bytes(2, "little")) + b".." + re.escape(_LOOPBACK), re.DOTALL
)
"""An address of IPv4 with its port, as gloo tells it to the others."""
SIZE = 1 << 23
SMALL = 1 << 12


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


class _Elsewhere(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """Gives the others, for a member's address, one that does not answer: there is no route."""

    def __init__(self, store: Any, port: int) -> None:
        super().__init__()
        self._store = store
        self._port = port

    def set(self, key: str, value: Any) -> None:
        told = value.encode() if isinstance(value, str) else bytes(value)
        silent = socket.AF_INET.to_bytes(2, "little") + self._port.to_bytes(2, "big")
        self._store.set(key, _SOCKET_ADDRESS.sub(silent + _LOOPBACK, told))  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=5)) -> None:
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that answers no one: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_members_without_a_route_to_each_other_say_from_which_address_and_what_to_set(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They met at the learner's store, and connect to each other in vain."""
    monkeypatch.setattr(broadcast_group, "BUCKET_S", 0.3)
    store = open_store(HOST)
    # Which of two members connects to the other follows from their ports: neither can.
    stores = [_Elsewhere(one, silent_port) for one in (store, reach_store(HOST, store.port))]
    with ThreadPoolExecutor(2) as threads:
        meetings = [
            threads.submit(ProcessGroup.meet, cast(Any, one), "one", rank, 2, CPU, HOST)
            for rank, one in enumerate(stores)
        ]
        errors = {rank: meeting.exception(PATIENCE_S) for rank, meeting in enumerate(meetings)}
    # Who connects to a full queue may believe for a while that it is connected; who waits does not.
    told = {rank: error for rank, error in errors.items() if error is not None}
    assert told
    for rank, error in told.items():
        assert isinstance(error, ProcessGroupFailed)
        assert error.message.startswith(
            f"member {rank} of group one, at 127.0.0.1 (lo), cannot connect to the others: "
        )
        assert "let the machines reach each other" in error.hint
        assert "NCCL_SOCKET_IFNAME" in error.hint


async def test_a_group_that_never_forms_has_a_deadline_and_names_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL itself would wait for ever."""
    monkeypatch.setattr(broadcast_group, "FORM_S", 0.2)
    store = open_store(HOST)
    member = broadcast_group.LocalMember(CPU)
    await member.connect(HOST, store.port)
    place = Round(
        answer="place", group="one", rank=1, size=2, address=HOST, port=store.port, device="cpu"
    )
    with pytest.raises(ProcessGroupFailed, match=r"at 127\.0\.0\.1 \(lo\).*nothing came in 0.2 s"):
        await member.join(place)


def _pair(size: int) -> list[SharedBufferGroup]:
    """Return the groups of a learner and its receivers, formed as `ipc` is, in main memory."""
    store = open_store(HOST)
    stores = [store, *(reach_store(HOST, store.port) for _ in range(size - 1))]
    device = torch.device("cpu")
    with ThreadPoolExecutor(size) as threads:
        meetings = [
            threads.submit(SharedBufferGroup.meet, one, "one", rank, size, device)
            for rank, one in enumerate(stores)
        ]
        return [meeting.result() for meeting in meetings]


async def test_a_shared_buffer_gives_all_receivers_the_same_bits_time_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", SMALL)
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", SMALL)
    sender, *receivers = await asyncio.to_thread(_pair, 3)
    for size in (0, 1, SMALL, 5 * SMALL + 7):
        payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
        whole, streamed = receivers[0], receivers[1]
        _, first, second = await asyncio.gather(
            asyncio.to_thread(sender.send, payload),
            asyncio.to_thread(whole.receive, size),
            asyncio.to_thread(lambda n=size, g=streamed: [one.clone() for one in g.stream(n)]),
        )
        assert torch.equal(first, payload)
        assert torch.equal(torch.cat([payload[:0], *second]), payload)


async def test_a_receiver_that_has_left_a_shared_buffer_costs_the_learner_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_group, "BUCKET_S", 0.2)
    sender, receiver = await asyncio.to_thread(_pair, 2)
    receiver.leave()
    with pytest.raises(ProcessGroupFailed, match=r"broke: a receiver took longer than 0\.2 s"):
        await asyncio.to_thread(sender.send, torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ProcessGroupFailed, match="was left"):
        await asyncio.to_thread(sender.send, torch.zeros(9, dtype=torch.uint8))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shared_buffer_with_a_missing_member_does_not_form_and_leaves_no_file(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_group, "MEMORY_FOLDER", tmp_path)
    with pytest.raises(ProcessGroupFailed, match="1 of 2 members did not come"):
        SharedBufferGroup.meet(open_store(HOST), "one", rank, 2, torch.device("cpu"), 0.1)
    assert not list(tmp_path.iterdir())


def test_what_opens_a_buffer_on_a_gpu_is_what_torch_takes() -> None:
    """Nothing but numbers and bytes travels: the other arguments are known."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[:6] == [
        "tensor_cls",
        "tensor_size",
        "tensor_stride",
        "tensor_offset",
        "storage_cls",
        "dtype",
    ]
    assert names[6:] == list(broadcast_group._REBUILT)


@pytest.mark.parametrize(
    ("own", "gpus", "expected"),
    [
        ("", [], "cpu"),
        ("", ["a"], "cpu"),
        ("a", [], "cpu"),
        ("a", ["b"], "cuda"),
        ("a", ["b", "c"], "cuda"),
        ("a", ["a"], "ipc"),
        ("a", ["a", "b"], "cpu"),
    ],
)
def test_nccl_is_not_asked_for_two_ranks_on_one_card(
    own: str, gpus: list[str], expected: str
) -> None:
    assert route(own, gpus) == expected


async def test_receivers_on_one_card_have_rounds_of_their_own() -> None:
    loop = asyncio.get_running_loop()

    def asker(*gpus: str) -> _Asker:
        request = JoinRound(
            receiver="r",
            version=1,
            location="v1-00000000",
            num_bytes=1,
            device="cuda",
            gpus=list(gpus),
        )
        return _Asker(request, loop.create_future(), 0.0)

    askers = {"one": asker("a"), "two": asker("b", "a"), "three": asker("b"), "cpu": asker()}
    now, later = _apart(askers)
    assert (set(now), set(later)) == ({"one", "three", "cpu"}, {"two"})


def test_a_payload_that_is_all_of_a_buffer_nobody_changes_is_not_copied() -> None:
    array: Any = np.arange(8, dtype=np.uint8)
    whole = memoryview(array).toreadonly()
    assert _held_or_copied([whole[:3], whole[3:]], pinned=False).data_ptr() == array.ctypes.data
    for views in ([whole[:3]], [memoryview(array)], [memoryview(bytes(8))], []):
        held = _held_or_copied(views, pinned=False)
        assert held.data_ptr() != array.ctypes.data
        assert held.tolist() == list(b"".join(views))
