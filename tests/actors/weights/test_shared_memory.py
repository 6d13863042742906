"""Of the actors of one machine one reads a version, whatever becomes of it meanwhile."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.weights import shared_memory
from tinkermq.actors.weights.shared_memory import SharedMemory, own_folder, sweep
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.objects import ObjectStore, digest_of
from tinkermq.broker.jetstream.streams import bound_weights
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.weights import Manifest, WeightsAnnouncement
from tinkermq.schemas.wire.errors import NotFoundError, StorageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.cancelling import cancel_everywhere
from tests.support.models import bytes_of
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually

NUM_BYTES = 3 << 20
ROOM = 64 << 20
SCOPE = JobScope("local", "shared")
PAYLOAD = memoryview(np.random.default_rng(0).bytes(NUM_BYTES))
DIGEST = digest_of([PAYLOAD])

WRITER = """
import asyncio, sys
from pathlib import Path
from tinkermq.actors.weights.shared_memory import SharedMemory
from tinkermq.schemas.wire.subjects import JobScope

async def fill(buffer):
    buffer[:10] = b"0123456789"
    print("writes", flush=True)
    await asyncio.sleep(600)

memory = SharedMemory(JobScope("local", "shared"), 64 << 20, root=Path(sys.argv[1]))
asyncio.run(memory.get(sys.argv[2], int(sys.argv[3]), fill))
"""


@contextmanager
def writer(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that is in the middle of writing."""
    command = [sys.executable, "-c", WRITER, str(root), DIGEST, str(NUM_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writes\n"
        try:
            yield process
        finally:
            process.kill()


class Reads:
    """Fills buffers, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    async def fill(self, buffer: memoryview) -> None:
        self.count += 1
        await asyncio.sleep(0.02)
        buffer[:] = PAYLOAD


def shared(root: Path, *, max_bytes: int = ROOM, wait_s: float = 10.0) -> SharedMemory:
    return SharedMemory(SCOPE, max_bytes, root=root, wait_s=wait_s)


def files(root: Path) -> list[str]:
    return [one.name for one in own_folder(root).iterdir()]


def weights(seed: int) -> dict[str, TensorBytes]:
    words = np.arange(NUM_BYTES // 2, dtype=np.uint16)
    words[::1000] += np.uint16(seed)
    return {"w": TensorBytes("bfloat16", (words.size,), memoryview(words.tobytes()))}


def wide_weights() -> dict[str, TensorBytes]:
    """Return weights of 32 bits, which always travel whole."""
    words = np.arange(NUM_BYTES // 4, dtype=np.float32)
    return {"w": TensorBytes("float32", (words.size,), memoryview(words.tobytes()))}


async def test_the_second_receiver_of_a_machine_pulls_nothing_from_the_broker(
    broker: Broker, nats_server: NatsServer, scope: JobScope
) -> None:
    learner = WeightStore(broker, scope, full_snapshot_every=2)
    objects = ObjectStore(broker, scope.object_weights)
    async with (
        await connect(nats_server.url, name="first") as first,
        await connect(nats_server.url, name="second") as second,
    ):
        receivers = [WeightStore(one, scope, shared_bytes=ROOM) for one in (first, second)]
        for version in range(4):
            manifest = await learner.publish(version, weights(version))
            fetched = await receivers[0].fetch(manifest)
            for place in await objects.names():
                await objects.delete(place)
            again = await receivers[1].fetch(manifest)
            assert bytes_of(again["w"]) == bytes_of(fetched["w"]) == weights(version)["w"].data
            with pytest.raises(NotFoundError):
                await WeightStore(broker, scope).fetch(manifest)


async def test_receivers_beside_the_learner_pull_nothing_at_all(
    broker: Broker, nats_server: NatsServer, scope: JobScope
) -> None:
    learner = WeightStore(broker, scope, shared_bytes=ROOM)
    manifests = [await learner.publish(version, weights(version)) for version in range(2)]
    await learner.keep(set())
    async with await connect(nats_server.url, name="receiver") as other:
        receiver = WeightStore(other, scope, shared_bytes=ROOM)
        for version in range(2):
            fetched = await receiver.fetch(manifests[version])
            assert fetched["w"].data == weights(version)["w"].data


async def test_a_receiver_beside_the_learner_uses_a_version_before_it_is_stored(
    broker: Broker, nats_server: NatsServer, scope: JobScope
) -> None:
    await bound_weights(broker, scope, NUM_BYTES // 2)
    learner = WeightStore(broker, scope, shared_bytes=ROOM)
    async with await connect(nats_server.url, name="receiver") as other:
        receiver = WeightStore(other, scope, shared_bytes=ROOM)
        coming = await waiting_for_newer(receiver, -1)
        with pytest.raises(StorageError):
            await learner.publish(0, wide_weights())
        early = await coming
        assert early is not None
        assert (await receiver.fetch(early))["w"].data == wide_weights()["w"].data
        assert await receiver.latest() is None, "it is not stored"
        await bound_weights(broker, scope, ROOM)
        stored = await learner.publish(0, wide_weights())
        assert await receiver.wait_newer(-1, PATIENCE_S) == stored
        assert await receiver.wait_newer(0, 0.1) is None


async def test_who_does_not_share_the_learners_memory_waits_until_a_version_is_stored(
    broker: Broker, nats_server: NatsServer, scope: JobScope
) -> None:
    await bound_weights(broker, scope, NUM_BYTES // 2)
    learner = WeightStore(broker, scope, shared_bytes=ROOM)
    async with await connect(nats_server.url, name="receiver") as other:
        apart = WeightStore(other, scope, shared_bytes=0)
        coming = await waiting_for_newer(apart, -1)
        with pytest.raises(StorageError):
            await learner.publish(0, wide_weights())
        early = await coming
        assert early is not None
        assert early.location == ""
        with pytest.raises(NotFoundError, match="neither stored yet nor in shared memory"):
            await apart.fetch(early)
        await bound_weights(broker, scope, ROOM)
        stored = await learner.publish(0, wide_weights())
        assert await apart.wait_newer(-1, PATIENCE_S) == stored
        assert bytes_of((await apart.fetch(stored))["w"]) == wide_weights()["w"].data


async def test_an_early_version_of_another_machine_is_not_waited_for(
    broker: Broker, scope: JobScope
) -> None:
    stored = await WeightStore(broker, scope).publish(0, wide_weights())
    early = stored.model_copy(update={"version": 1, "location": "", "host": "another machine"})
    receiver = WeightStore(broker, scope, shared_bytes=ROOM)
    coming = await waiting_for_newer(receiver, 0, timeout_s=0.3)
    announcement = WeightsAnnouncement(version=1, early=early)
    for payload in (announcement.to_bytes(), b"no announcement"):
        await broker.publish(scope.weights, payload)
    assert await coming is None


async def waiting_for_newer(
    store: WeightStore, version: int, timeout_s: float = PATIENCE_S
) -> "asyncio.Task[Manifest | None]":
    """Wait for a version in a task of its own, and return it once that hears announcements."""
    await store.wait_newer(version, 0)
    return asyncio.create_task(store.wait_newer(version, timeout_s))


def resident_bytes(file: Path) -> int:
    """Return the bytes of a file that are in this process's memory."""
    pages = Path("/proc/self/smaps").read_text().partition(str(file))[2]
    return 1024 * int(pages.partition("Rss:")[2].split()[0])


async def test_a_draft_is_published_without_another_copy_and_found_by_receivers(
    broker: Broker, nats_server: NatsServer, scope: JobScope
) -> None:
    learner = WeightStore(broker, scope, shared_bytes=ROOM)
    for version, dtype in enumerate(("float32", "bfloat16", "bfloat16")):
        file = learner.draft(NUM_BYTES)
        assert file is not None
        file.write([PAYLOAD[: 1 << 20]])
        file.write([PAYLOAD[1 << 20 :]])
        draft = file.finished().toreadonly()
        size = NUM_BYTES // (4 if dtype == "float32" else 2)
        cut = 4 * (size // 8)
        itemsize = NUM_BYTES // size
        tensors = {
            "a": TensorBytes(dtype, (cut,), draft[: cut * itemsize]),
            "b": TensorBytes(dtype, (size - cut,), draft[cut * itemsize :]),
        }
        manifest = await learner.publish(version, tensors)
        place = own_folder() / f"{scope.key}.{manifest.digest}"
        assert place.is_file()
        assert shared_memory.place_of(draft) == (place, 0)
        async with await connect(nats_server.url, name="receiver") as other:
            fetched = await WeightStore(other, scope, shared_bytes=ROOM).fetch(manifest)
            assert b"".join(bytes_of(fetched[name]) for name in "ab") == PAYLOAD
            view = fetched["a"].data
            assert isinstance(view, memoryview)
            assert shared_memory.place_of(view) == (place, 0)


def test_a_draft_that_is_not_published_is_swept(tmp_path: Path) -> None:
    file = shared(tmp_path).draft(NUM_BYTES)
    assert file is not None
    file.write([PAYLOAD])
    draft = file.finished()
    sweep(0.0, tmp_path)
    assert draft == PAYLOAD
    assert len(files(tmp_path)) == 1
    del draft
    sweep(0.0, tmp_path)
    assert files(tmp_path) == []


def test_there_is_no_draft_without_room(tmp_path: Path) -> None:
    assert shared(tmp_path, max_bytes=NUM_BYTES - 1).draft(NUM_BYTES) is None
    own_folder(tmp_path).chmod(0o777)
    assert shared(tmp_path).draft(NUM_BYTES) is None


def test_the_parts_of_a_draft_leave_this_process_s_memory_as_they_are_read(tmp_path: Path) -> None:
    payload = memoryview(bytes(range(256)) * (160 << 10))
    file = shared(tmp_path).draft(len(payload))
    assert file is not None
    file.write([payload])
    draft = shared_memory.whole_file([file.finished()])
    assert draft is not None
    parts, most = shared_memory.MappedParts(draft), 0
    for number, part in enumerate(parts):
        assert part == payload[number * len(parts[0]) :][: len(part)]
        most = max(most, resident_bytes(tmp_path))
    assert 0 < most <= len(parts[0]) < len(payload) // 2
    assert resident_bytes(tmp_path) == 0
    assert b"".join(parts) == payload
    assert len(parts) == len(parts[:])


async def test_of_many_that_want_the_same_one_reads_and_the_others_map_it(tmp_path: Path) -> None:
    reads = Reads()
    found = await asyncio.gather(
        *(shared(tmp_path).get(DIGEST, NUM_BYTES, reads.fill) for _ in range(8))
    )
    assert reads.count == 1
    assert all(one == PAYLOAD for one in found)
    found[0][:4] = b"mine"
    assert found[1] == PAYLOAD, "who writes to its own changes nothing for others"


async def test_a_reader_that_is_killed_does_not_hold_up_the_next(tmp_path: Path) -> None:
    reads = Reads()
    with writer(tmp_path) as process:
        memory = shared(tmp_path, wait_s=AFTER_PATIENCE_S)
        waiting = asyncio.create_task(memory.get(DIGEST, NUM_BYTES, reads.fill))
        await asyncio.sleep(0.2)
        assert reads.count == 0, "the other one reads"
        process.kill()
        assert await asyncio.wait_for(waiting, PATIENCE_S) == PAYLOAD
    assert files(tmp_path) == [f"local.shared.{DIGEST}"]


async def test_a_reader_that_hangs_is_waited_for_no_longer_than_a_deadline(tmp_path: Path) -> None:
    reads = Reads()
    with writer(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        memory = shared(tmp_path, wait_s=0.2)
        assert await memory.get(DIGEST, NUM_BYTES, reads.fill) == PAYLOAD
    assert reads.count == 1


async def test_a_read_that_fails_leaves_nothing_and_the_next_one_reads(tmp_path: Path) -> None:
    async def fail(_: memoryview) -> None:
        raise NotFoundError("gone", hint="")

    with pytest.raises(NotFoundError):
        await shared(tmp_path).get(DIGEST, NUM_BYTES, fail)
    assert files(tmp_path) == []
    assert await shared(tmp_path).get(DIGEST, NUM_BYTES, Reads().fill) == PAYLOAD


async def test_what_nobody_maps_is_swept_and_what_somebody_maps_stays(tmp_path: Path) -> None:
    found = await shared(tmp_path).get(DIGEST, NUM_BYTES, Reads().fill)
    sweep(0.0, tmp_path)
    assert len(files(tmp_path)) == 1
    del found
    sweep(root=tmp_path)
    assert len(files(tmp_path)) == 1, "others may still come for it"
    sweep(0.0, tmp_path)
    assert files(tmp_path) == []
    with writer(tmp_path) as process:
        sweep(0.0, tmp_path)
        assert files(tmp_path) == [f"local.shared.{DIGEST}.half"]
        process.kill()
        process.wait()
    sweep(0.0, tmp_path)
    assert files(tmp_path) == []


async def test_old_versions_make_room_and_what_does_not_fit_is_not_shared(tmp_path: Path) -> None:
    memory = shared(tmp_path, max_bytes=2 * NUM_BYTES)
    for first in "0123":
        await memory.get(first * 64, NUM_BYTES, Reads().fill)
    assert sorted(files(tmp_path)) == [f"local.shared.{first * 64}" for first in "23"]
    held = [await memory.get(first * 64, NUM_BYTES, Reads().fill) for first in "23"]
    assert await memory.get("4" * 64, NUM_BYTES, Reads().fill) == PAYLOAD
    assert len(files(tmp_path)) == len(held)
    assert await shared(tmp_path, max_bytes=0).get(DIGEST, NUM_BYTES, Reads().fill) == PAYLOAD
    assert len(files(tmp_path)) == len(held)


async def test_a_folder_that_others_may_write_to_and_a_forged_file_are_not_used(
    tmp_path: Path,
) -> None:
    folder = own_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / f"local.shared.{DIGEST}").write_bytes(bytes(NUM_BYTES - 1))
    (folder / f"local.shared.{'a' * 64}").symlink_to("/etc/passwd")
    for digest in (DIGEST, "a" * 64, "../../../../etc/passwd"):
        assert await shared(tmp_path).get(digest, NUM_BYTES, Reads().fill) == PAYLOAD
    folder.chmod(0o777)
    found = [await shared(tmp_path).get("b" * 64, NUM_BYTES, Reads().fill) for _ in range(2)]
    assert found == [PAYLOAD, PAYLOAD]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    os.chown(own_folder(tmp_path), 65534, 65534)
    reads = Reads()
    for _ in range(2):
        assert await shared(tmp_path).get(DIGEST, NUM_BYTES, reads.fill) == PAYLOAD
    assert reads.count == 2


async def test_a_fetch_cancelled_at_any_await_leaves_no_unfinished_file(tmp_path: Path) -> None:
    memory = SharedMemory(SCOPE, ROOM, root=tmp_path)

    async def fill(buffer: memoryview) -> None:
        await asyncio.sleep(0)
        buffer[:] = PAYLOAD

    async def get() -> None:
        with await memory.get(DIGEST, NUM_BYTES, fill) as shared:
            assert shared == PAYLOAD
        sweep(keep_s=0, root=tmp_path)

    async def offer() -> None:
        shared = await memory.offer(DIGEST, [PAYLOAD])
        assert shared is not None
        shared.release()
        sweep(keep_s=0, root=tmp_path)

    async def nothing_is_left() -> None:
        async def swept() -> bool:
            sweep(keep_s=0, root=tmp_path)
            return not list(own_folder(tmp_path).iterdir())

        await eventually(swept, "its files to be given up")

    for work in (get, offer):
        assert await cancel_everywhere(work, nothing_is_left) > 1
