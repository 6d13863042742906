"""What groups of GPUs do with NCCL's settings and CUDA's streams, with fakes of both."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from tinkermq.actors.policy import devices
from tinkermq.actors.training.numerics import settle_numerics
from tinkermq.actors.training.parallel import COLLECTIVE_DEADLINE_S, Meeting, Parallel
from tinkermq.actors.weights import broadcast_group, nccl
from tinkermq.actors.weights.broadcast_group import ProcessGroup, SharedBufferGroup, open_store
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.wire.errors import ConfigError
from torch.cuda import nccl as torch_nccl
from torch.utils import deterministic

GPU = torch.device("cuda", 0)
SIZE = 100


# -- streams ---------------------------------------------------------------------------------------


class Cuda:
    """Records in which stream each operation runs."""

    def __init__(self) -> None:
        self.current = "kernels"
        self.operations: list[tuple[str, str]] = []
        self.priorities: list[int] = []

    def note(self, operation: str) -> None:
        self.operations.append((operation, self.current))

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def synchronize(self) -> None:
        self.cuda.operations.append(("synchronize", self.name))


class Bytes:
    """uint8[N] on a GPU or in pinned memory."""

    is_cuda, device = True, GPU

    def __init__(self, cuda: Cuda, num: int) -> None:
        self.cuda, self.num = cuda, num

    def __getitem__(self, place: slice) -> "Bytes":
        return Bytes(self.cuda, len(range(self.num)[place]))

    def numel(self) -> int:
        return self.num

    def is_pinned(self) -> bool:
        return True

    def to(self, *_: Any, non_blocking: bool) -> "Bytes":
        assert non_blocking
        self.cuda.note("copy")
        return self

    def copy_(self, _source: Any, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.note("copy")

    def record_stream(self, stream: Stream) -> None:
        self.cuda.operations.append(("lend", stream.name))

    def broadcast(self, *_: Any) -> "Bytes":  # NCCL waits for the current stream
        self.cuda.note("broadcast")
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.cuda.note("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()

    def new_stream(_device: torch.device, priority: int) -> Stream:
        made.priorities.append(priority)
        return Stream(made, "copies")

    def empty(num: int, **_: Any) -> Bytes:
        made.note("allocate")
        return Bytes(made, num)

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(made, made.current))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(devices, "_copy_stream", cache(devices._copy_stream.__wrapped__))
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", 40)
    return made


@pytest.mark.parametrize("work", ["send", "receive", "stream"])
@pytest.mark.parametrize("kind", [ProcessGroup, SharedBufferGroup])
def test_no_copy_of_weights_waits_for_kernels(cuda: Cuda, kind: Any, work: str) -> None:
    """Kernels of a training step fill the current stream for minutes, one bucket after another."""
    if kind is ProcessGroup:
        group: Any = ProcessGroup("one", GPU, Bytes(cuda, 0))
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        for key in ("written", "read/1"):
            store.set(key, "9")
        group = SharedBufferGroup("one", store, int(work != "send"), 2, Bytes(cuda, 80))  # pyright: ignore
    if work == "send":
        group.send(Bytes(cuda, SIZE))
    elif work == "receive":
        group.receive(SIZE)
    else:
        for _ in group.stream(SIZE):
            cuda.note("read")
    streams: dict[str, set[str]] = {}
    for operation, stream in cuda.operations:
        streams.setdefault(operation, set()).add(stream)
    assert cuda.priorities == [-1]
    assert streams.pop("read", {"kernels"}) == {"kernels"}
    # What was received is read in the current stream; what is sent never meets it.
    assert streams.pop("lend", set()) == (set() if work == "send" else {"kernels"})
    assert set().union(*streams.values()) == {"copies"}
    copies = [operation for operation, _ in cuda.operations if operation in ("copy", "broadcast")]
    assert copies.count("broadcast" if kind is ProcessGroup else "copy") == 3


# -- settings of NCCL ------------------------------------------------------------------------------

PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str]]]:
    """Yield the environment in which each communicator was made."""
    seen: list[dict[str, str]] = []

    class Nccl:
        def __init__(self, *_: Any) -> None: ...
        def eager_connect_single_device(self, _: Any) -> None:
            seen.append(dict(os.environ))

        class Options:
            def __init__(self, *, is_high_priority_stream: bool) -> None: ...

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(nccl, "_initial", {})
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch_nccl, "version", lambda: (2, 29, 7))
    yield seen
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def test_deterministic_ranks_pin_how_nccl_adds_and_receivers_of_weights_do_not_meet_that(
    environment: list[dict[str, str]],
) -> None:
    os.environ |= {"NCCL_PROTO": "LL", "NCCL_NO_CACHE": "NCCL_IB_TC"}
    for learner in ({"ranks": 2}, {"ranks": 2, "slots": 2, "deterministic": True}):
        settle_numerics(LearnerConfig.model_validate({"slots": 2, **learner}), on_gpu=True)
        ProcessGroup.meet(open_store("127.0.0.1"), "one", 0, 1, GPU, "127.0.0.1")
    assert {name: os.environ[name] for name in PINNED} == PINNED
    assert os.environ["NCCL_NO_CACHE"] == "NCCL_IB_TC,NCCL_ALGO,NCCL_PROTO,NCCL_NVLS_ENABLE"
    for seen in environment:
        assert {name: seen.get(name) for name in PINNED} == dict.fromkeys(PINNED) | {
            "NCCL_PROTO": "LL"
        }
        assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_nccl_that_cannot_have_two_settings_is_refused(
    environment: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    del environment
    monkeypatch.setattr(torch_nccl, "version", lambda: (2, 28, 9))
    learner = LearnerConfig(slots=2, ranks=2, deterministic=True)
    with pytest.raises(ConfigError, match=r"this torch has NCCL 2\.28\.9"):
        settle_numerics(learner, on_gpu=True)


def test_ranks_wait_for_each_other_in_a_group_made_later_as_long_as_in_a_collective() -> None:
    meeting = Meeting.open()
    parallel = Parallel.join(0, LearnerConfig(), meeting)
    try:
        assert cast(Any, meeting.store).timeout == timedelta(seconds=COLLECTIVE_DEADLINE_S)
    finally:
        parallel.leave()
