"""Versions of weights: published and fetched whole or as differences, by both transports."""

import asyncio
import resource
import socket
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.js.errors import DigestMismatchError
from safetensors.numpy import load_file
from tinkermq.actors.weights.history import apply, encode
from tinkermq.actors.weights.store import FORMAT, SeenFiles, WeightStore, software
from tinkermq.actors.weights.tensors import TensorBytes, TensorSource
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.objects import ObjectStore, chunks_of
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.weights import Manifest, weight_file
from tinkermq.schemas.wire.errors import (
    BrokerError,
    ConfigError,
    MessageError,
    ModelError,
    NotFoundError,
    RewoundError,
    StorageError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.cancelling import cancel_everywhere
from tests.support.models import bytes_of
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S

TRANSPORTS: tuple[Literal["object", "file"], ...] = ("object", "file")


def _tensors(seed: int, num_values: int = 1000) -> dict[str, TensorBytes]:
    """Return tensors of three dtypes, one of them empty and one without dimensions."""
    rng = np.random.default_rng(seed)

    def tensor(dtype: str, shape: tuple[int, ...], item_bytes: int) -> TensorBytes:
        size = int(np.prod(shape)) * item_bytes
        return TensorBytes(dtype, shape, memoryview(rng.bytes(size)))

    return {
        "layer.0.weight": tensor("float32", (num_values, 3), 4),
        "layer.0.bias": tensor("bfloat16", (num_values,), 2),
        "none": tensor("float32", (0, 5), 4),
        "scale": tensor("float16", (), 2),
        "layer.1.weight": tensor("float32", (3, num_values), 4),
    }


def _same(one: Mapping[str, TensorSource], other: Mapping[str, TensorSource]) -> bool:
    return list(one) == list(other) and all(
        (a.dtype, a.shape, bytes_of(a)) == (b.dtype, b.shape, bytes_of(b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_file()]


@pytest.fixture(params=TRANSPORTS)
def open_store(
    request: pytest.FixtureRequest, scope: JobScope, tmp_path: Path
) -> Callable[..., WeightStore]:
    folder = tmp_path / "weights"
    return partial(WeightStore, scope=scope, transport=request.param, folder=folder)


@pytest.fixture
def store(open_store: Callable[..., WeightStore], broker: Broker) -> WeightStore:
    return open_store(broker, chunk_bytes=1 << 16)


async def test_what_was_published_is_fetched_bit_for_bit(store: WeightStore) -> None:
    tensors = _tensors(1, num_values=100_000)
    manifest = await store.publish(0, tensors)
    assert manifest.num_bytes == sum(tensor.data.nbytes for tensor in tensors.values())
    assert _same(await store.fetch(manifest), tensors)
    assert await store.latest() == manifest
    assert await store.manifest(0) == manifest


async def test_a_fetch_cancelled_at_any_await_leaves_nothing_and_the_next_one_is_whole(
    open_store: Callable[..., WeightStore], broker: Broker
) -> None:
    learner, versions = open_store(broker), [_tensors(1, 5000)]
    changed = bytearray(versions[0]["layer.0.bias"].data)
    changed[:2] = b"ab"
    versions.append(
        {**versions[0], "layer.0.bias": TensorBytes("bfloat16", (5000,), memoryview(changed))}
    )
    for number, tensors in enumerate(versions):
        await learner.publish(number, tensors)

    async def play() -> None:
        receiver = open_store(broker)
        try:
            for number, tensors in enumerate(versions):
                assert await receiver.wait_newer(number - 1, PATIENCE_S) is not None
                manifest = await receiver.manifest(number)
                assert manifest is not None
                assert _same(await receiver.fetch(manifest), tensors)
        finally:
            await receiver.close()

    num_subscriptions = len(broker.nc._subs)

    async def given_back() -> None:
        assert len(broker.nc._subs) == num_subscriptions

    assert await cancel_everywhere(play, given_back) > 6


async def test_nothing_at_all_can_be_published(store: WeightStore) -> None:
    assert await store.fetch(await store.publish(0, {})) == {}


async def test_a_late_joiner_finds_all_versions_and_the_latest(
    store: WeightStore, nats_server: NatsServer, open_store: Callable[[Broker], WeightStore]
) -> None:
    for version in (0, 1, 2):
        await store.publish(version, _tensors(version))
    async with await connect(nats_server.url, name="late") as late:
        joiner = open_store(late)
        assert await joiner.versions() == [0, 1, 2]
        latest = await joiner.latest()
        assert latest is not None
        assert latest.version == 2
        assert _same(await joiner.fetch(latest), _tensors(2))


async def test_the_latest_is_never_set_back(store: WeightStore) -> None:
    await store.publish(5, _tensors(5))
    await store.publish(4, _tensors(4))
    latest = await store.latest()
    assert latest is not None
    assert latest.version == 5


async def test_a_version_published_again_replaces_the_first(store: WeightStore) -> None:
    first = await store.publish(1, _tensors(1))
    second = await store.publish(1, _tensors(2))
    assert await store.latest() == second
    assert await store.versions() == [1]
    assert _same(await store.fetch(second), _tensors(2))
    with pytest.raises(NotFoundError):
        await store.fetch(first)


async def test_a_removed_version_is_gone_and_removing_again_is_harmless(
    store: WeightStore,
) -> None:
    old = await store.publish(0, _tensors(0))
    new = await store.publish(1, _tensors(1))
    await store.remove(0)
    await store.remove(0)
    assert await store.versions() == [1]
    with pytest.raises(NotFoundError):
        await store.fetch(old)
    assert _same(await store.fetch(new), _tensors(1))


async def test_who_has_a_version_that_is_retracted_starts_again(
    store: WeightStore, nats_server: NatsServer, open_store: Callable[..., WeightStore]
) -> None:
    for version in range(4):
        await store.publish(version, _tensors(version))
    async with await connect(nats_server.url, name="waiter") as connection:
        waiter = open_store(connection)
        assert await waiter.wait_newer(-1, PATIENCE_S) is not None
        await store.retract(1)
        assert await store.versions() == [0, 1]
        latest = await store.latest()
        assert latest is not None
        assert latest.version == 1
        with pytest.raises(RewoundError, match="version 3 of the weights"):
            await waiter.wait_newer(3, PATIENCE_S)
        await waiter.close()
    await store.retract(1)
    assert await store.versions() == [0, 1]


async def test_a_waiter_is_woken_by_the_announcement(
    store: WeightStore, nats_server: NatsServer, open_store: Callable[..., WeightStore]
) -> None:
    async with await connect(nats_server.url, name="waiter") as connection:
        waiter = open_store(connection, poll_s=AFTER_PATIENCE_S)
        assert await waiter.wait_newer(-1, 0.05) is None
        waiting = asyncio.create_task(waiter.wait_newer(-1, AFTER_PATIENCE_S))
        await asyncio.sleep(0.1)
        await store.publish(0, _tensors(0))
        manifest = await asyncio.wait_for(waiting, PATIENCE_S)
        assert manifest is not None
        assert manifest.version == 0
        assert await waiter.wait_newer(0, 0.05) is None
        await waiter.close()


async def test_a_lost_announcement_is_made_up_for_by_looking(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    async with await connect(own_server.url, name="waiter") as connection:
        waiter = WeightStore(connection, own_scope)
        waiting = asyncio.create_task(waiter.wait_newer(-1, AFTER_PATIENCE_S))
        await asyncio.sleep(0.1)
        own_server.kill()
        own_server.start()
        await WeightStore(own_broker, own_scope).publish(0, _tensors(0))
        assert await asyncio.wait_for(waiting, PATIENCE_S) is not None
        await waiter.close()


async def test_a_kill_in_the_middle_of_publishing_and_fetching_damages_nothing(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    tensors = _tensors(7, num_values=1_000_000)
    store = WeightStore(own_broker, own_scope, chunk_bytes=1 << 17)

    async def kill() -> None:
        for delay_s in (0.01, 0.03, 0.02):
            await asyncio.sleep(delay_s)
            own_server.kill()
            own_server.start()

    async with asyncio.TaskGroup() as group:
        publishing = group.create_task(store.publish(0, tensors))
        group.create_task(kill())
    async with asyncio.TaskGroup() as group:
        fetching = group.create_task(store.fetch(publishing.result()))
        group.create_task(kill())
    assert _same(fetching.result(), tensors)
    await store.sweep()
    assert len(await ObjectStore(own_broker, own_scope.object_weights).names()) == 1


async def test_a_damaged_object_is_fetched_twice_and_then_an_error(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope)
    manifest = await store.publish(3, _tensors(3))
    info = await ObjectStore(broker, scope.object_weights).info(manifest.location)
    assert info is not None
    chunk = f"$O.{scope.object_weights}.C.{info.nuid}"
    await broker.api(f"STREAM.PURGE.OBJ_{scope.object_weights}", {"filter": chunk})
    await broker.append(chunk, bytes(info.num_bytes), deadline_s=PATIENCE_S, waiting_for="test")
    with pytest.raises(BrokerError, match=r"version 3 is damaged: .* has digest"):
        await store.fetch(manifest)


@pytest.mark.parametrize("theirs", ["0.0.1", "99.1", "0.1.0.dev1", "", "0.1"])
@pytest.mark.parametrize("transport", ["object", "file"])
async def test_weights_of_another_version_of_tinkermq_are_not_told_to_be_damaged(
    broker: Broker,
    scope: JobScope,
    tmp_path: Path,
    transport: Literal["object", "file"],
    theirs: str,
) -> None:
    store = WeightStore(broker, scope, transport, folder=tmp_path)
    manifest = await store.publish(103, _tensors(3))
    assert manifest.software == software()
    other = manifest.model_copy(update={"digest": "0" * 64, "software": theirs})
    with pytest.raises(ConfigError) as told:
        await store.fetch(other)
    assert "damaged" not in str(told.value)
    assert (f"by tinkermq {theirs} and" if theirs else "by an older") in str(told.value)
    assert software() in str(told.value)
    assert "install the same version" in told.value.hint


async def test_a_damaged_file_is_an_error(broker: Broker, scope: JobScope, tmp_path: Path) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path)
    manifest = await store.publish(3, _tensors(3))
    file = tmp_path / weight_file(scope, manifest.location)
    content = await asyncio.to_thread(file.read_bytes)
    await asyncio.to_thread(file.write_bytes, content[:-10] + b"\xff" * 10)
    with pytest.raises(BrokerError, match="version 3 is damaged"):
        await store.fetch(manifest)
    await asyncio.to_thread(file.write_bytes, b"")
    with pytest.raises(StorageError, match="cannot be read"):
        await store.fetch(manifest)


async def test_an_object_whose_chunks_are_gone_is_an_error_at_once(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope)
    manifest = await store.publish(3, _tensors(3))
    await broker.api(
        f"STREAM.PURGE.OBJ_{scope.object_weights}", {"filter": f"$O.{scope.object_weights}.C.>"}
    )
    with pytest.raises(NotFoundError, match=r"chunks in .* are missing after 0 bytes"):
        await store.fetch(manifest)


async def test_a_full_bucket_is_named(broker: Broker, scope: JobScope) -> None:
    await create_job_streams(broker, scope, LimitsConfig(), weights_bytes=1 << 20)
    store = WeightStore(broker, scope)
    with pytest.raises(StorageError, match="was refused: maximum bytes exceeded") as raised:
        await store.publish(0, _tensors(0, num_values=200_000))
    assert raised.value.is_full
    assert "raising max_file_store" in raised.value.hint
    assert await store.versions() == []


async def test_a_folder_that_cannot_be_written_is_named(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    store = WeightStore(broker, scope, "file", folder=tmp_path / "file" / "weights")
    with pytest.raises(StorageError, match="the weights cannot be written to"):
        await store.publish(0, _tensors(0))


async def test_the_file_transport_without_a_folder_is_refused(
    broker: Broker, scope: JobScope
) -> None:
    with pytest.raises(ConfigError, match=r"weights\.folder is not set") as raised:
        WeightStore(broker, scope, "file")
    assert "weights.folder" in raised.value.hint


async def test_a_full_disk_leaves_no_half_written_file(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path / "weights")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # the nearest to a full disk
    try:
        with pytest.raises(StorageError, match="the weights cannot be written"):
            await store.publish(0, _tensors(0, num_values=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _files(tmp_path / "weights") == []
    assert await store.latest() is None


async def test_a_learner_removes_what_a_killed_one_has_left_in_a_folder_of_several_jobs(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path)
    manifest = await store.publish(3, _tensors(0))
    own = weight_file(scope, manifest.location)
    others = [own.replace(scope.job, f"{scope.job}-x"), f".{own}".replace(scope.user, "bob"), "my"]
    halves = [f".{own}.0123abcd", own.replace("v3", "v4"), own.replace("v3", "v4-from-v3")]
    for name in [*others, *halves]:
        (tmp_path / name).write_bytes(b"half")
    await WeightStore(broker, scope, "file", folder=tmp_path).sweep()
    assert sorted(_files(tmp_path)) == sorted([own, *others])
    assert _same(await store.fetch(manifest), _tensors(0))


async def test_the_file_opens_as_safetensors_and_leaves_no_temporary_one(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    tensors = {"w": TensorBytes("float32", (2, 3), memoryview(np.arange(6, dtype="<f4").tobytes()))}
    manifest = await WeightStore(broker, scope, "file", folder=tmp_path).publish(0, tensors)
    file = weight_file(scope, manifest.location)
    assert (load_file(tmp_path / file)["w"] == np.arange(6).reshape(2, 3)).all()
    assert _files(tmp_path) == [file]


async def test_a_reader_keeps_a_file_that_is_removed_under_it(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path)
    fetched = await store.fetch(await store.publish(0, _tensors(0)))
    await store.remove(0)
    assert _same(fetched, _tensors(0))


async def test_the_stock_object_store_reads_what_was_published(
    broker: Broker, scope: JobScope
) -> None:
    tensors = _tensors(0, num_values=50_000)
    manifest = await WeightStore(broker, scope, chunk_bytes=1 << 16).publish(0, tensors)
    objects = await broker.nc.jetstream().object_store(scope.object_weights)
    stored = await objects.get(manifest.location)
    assert stored.data == b"".join(map(bytes_of, tensors.values()))


async def test_without_its_digest_the_stock_object_store_lists_and_refuses_it(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope, sha256=False)
    manifest = await store.publish(0, _tensors(0))
    assert _same(await store.fetch(manifest), _tensors(0))
    objects = await broker.nc.jetstream().object_store(scope.object_weights)
    listed = await objects.get_info(manifest.location)
    assert listed.description == "stored without the SHA-256 by which `nats object get` checks"
    with pytest.raises(DigestMismatchError):
        await objects.get(manifest.location)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "int8"}, {"shape": [2, 2]}, {"offset": 100}, {"num_bytes": 10}, {"shape": [-1, -6]}],
)
async def test_a_manifest_that_contradicts_itself_is_refused(
    broker: Broker, scope: JobScope, change: dict[str, object]
) -> None:
    store = WeightStore(broker, scope)
    tensors = {"w": TensorBytes("float32", (2, 3), memoryview(bytes(24)))}
    manifest = await store.publish(0, tensors)
    entry = manifest.tensors[0].model_copy(update=change)
    with pytest.raises(MessageError, match="tensor w of dtype"):
        await store.fetch(Manifest(**{**dict(manifest), "tensors": [entry]}))


async def test_tensors_that_contradict_themselves_are_not_published(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope)
    with pytest.raises(MessageError, match="does not fit its 8 bytes"):
        await store.publish(0, {"w": TensorBytes("float32", (2, 3), memoryview(bytes(8)))})
    assert await store.versions() == []


async def test_the_weights_of_a_removed_job_are_named(broker: Broker, scope: JobScope) -> None:
    await delete_job_streams(broker, scope)
    store = WeightStore(broker, scope)
    with pytest.raises(NotFoundError):
        await store.latest()
    with pytest.raises(NotFoundError):
        await store.publish(0, _tensors(0))


def test_chunks_cover_all_bytes_and_copy_only_at_seams() -> None:
    parts = [memoryview(bytes(range(10))), memoryview(b""), memoryview(bytes(range(10, 13)))]
    for size in range(1, 15):
        chunks = list(chunks_of(parts, size))
        assert b"".join(chunks) == bytes(range(13))
        assert all(len(chunk) == size for chunk in chunks[:-1])
    assert list(chunks_of([], 4)) == []
    assert next(chunks_of(parts, 5)).obj is parts[0].obj


async def test_versions_that_were_removed_leave_nothing_for_later_steps_to_read(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope)
    for version in range(20):
        await store.publish(version, _tensors(version, num_values=2))
        await store.keep(set(), newest=2)
    state = (await stream_info(broker, f"KV_{scope.bucket_weights}"))["state"]
    assert state["messages"] == 3  # two versions and which is the latest
    assert await store.versions() == [18, 19]


async def test_a_machine_that_sees_another_file_under_the_models_path_is_named(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "notes.md"):
        (tmp_path / name).write_text("{}")
    learner = WeightStore(broker, scope, files=SeenFiles([str(tmp_path), "owner/name"]))
    manifest = await learner.publish(1, _tensors(1))
    (tmp_path / "notes.md").write_text("other")
    (tmp_path / "config.json").unlink()  # what is not there is told by who needs it
    await WeightStore(broker, scope, files=SeenFiles([str(tmp_path)])).fetch(manifest)
    (tmp_path / "tokenizer.json").write_text("[]")
    elsewhere = WeightStore(broker, scope, files=SeenFiles([str(tmp_path)]))
    with pytest.raises(ModelError, match=rf"sees another {tmp_path}/tokenizer.json than") as other:
        await elsewhere.fetch(manifest)
    assert socket.gethostname() in other.value.message
    assert "1 of 2 files differ" in other.value.message
    assert "copy the model anew" in other.value.hint


# -- The codec of differences: tables computed by hand, and any two versions at all ----------------


def changed(old: np.ndarray, new: np.ndarray, block_words: int = 1 << 22) -> tuple[bytes, bytes]:
    """Return the difference, and what it makes of `old`."""
    difference = encode(old.data, new.data, block_words)
    made = old.copy()
    apply(memoryview(difference), made.data)
    return difference, made.tobytes()


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def test_a_block_as_it_is_on_the_wire() -> None:
    old = np.zeros(400, np.uint16)
    new = old.copy()
    new[0], new[3], new[399] = 1, 0xFFFF, 300  # +1, -1, a step of two bytes after a far gap
    difference, made = changed(old, new)
    assert made == new.tobytes()
    assert difference[:5] == b"TMQD\x01"
    assert struct.unpack_from("<QI", difference, 5) == (400, 1 << 22)
    changes, far, wide, num_bytes, _ = struct.unpack_from("<5I", difference, 17)
    assert (changes, far, wide, num_bytes) == (3, 1, 1, 12)


def test_equal_versions_differ_in_nothing_but_heads() -> None:
    same = np.arange(10_000, dtype=np.uint16)
    assert len(changed(same, same, 4096)[0]) == 17 + 3 * 20


def test_small_steps_of_few_weights_take_a_seventieth() -> None:
    draw = np.random.default_rng(0)
    old = draw.integers(0, 1 << 16, 1 << 20, np.uint16)
    new = old.copy()
    places = draw.choice(old.size, old.size * 15 // 1000, replace=False)
    new[places] += draw.choice(np.array([1, 0xFFFF], np.uint16), places.size)
    difference, made = changed(old, new)
    assert made == new.tobytes()
    assert old.nbytes / len(difference) > 70


@given(
    st.binary(max_size=600),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 65535)), max_size=60),
    st.sampled_from([1, 7, 256, 4096]),
)
@settings(max_examples=150, deadline=None)
def test_any_target_is_made_to_the_bit(base: bytes, writes: list, block_words: int) -> None:
    old = np.frombuffer(base[: len(base) // 2 * 2], np.uint16)
    new = old.copy()
    for place, value in writes:
        if place < new.size:
            new[place] = value
    assert changed(old, new, block_words)[1] == new.tobytes()


@given(st.integers(0, 10**9), st.integers(0, 255), st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_damage_raises_one_error_or_makes_other_words(place: int, byte: int, cut: int) -> None:
    old = np.arange(500, dtype=np.uint16)
    new = old.copy()
    new[::7] += 3
    new[123] = 9999
    damaged = bytearray(encode(old.data, new.data, 128))
    damaged[place % len(damaged)] = byte
    damaged = damaged[: 1 + cut % len(damaged)]
    made = old.copy()
    try:
        apply(memoryview(bytes(damaged)), made.data)
    except MessageError as error:
        assert "does not fit 500 words" in error.message  # noqa: PT017


@pytest.mark.parametrize("difference", [b"", b"TMQD\x01", encode(words(1).data, words(2).data)])
def test_one_of_another_size_is_refused(difference: bytes) -> None:
    with pytest.raises(MessageError, match="does not fit 3 words"):
        apply(memoryview(difference), words(1, 2, 3).data)


def test_versions_of_different_sizes_have_no_difference() -> None:
    with pytest.raises(ValueError, match="a difference of 1 and 2 words"):
        encode(words(1).data, words(1, 2).data)


# -- 16-bit weights as differences: who gets what, and that nothing ends in wrong weights ----------


NUM_WORDS = 5000
PUBLISHED = {
    1: (
        "ff67df2e4c7e21f77072d8e93c3f2ec2e2f3d1e91ba12f827ce26d37356d7b95",
        "544d514401e80300000000000000004000050000000300000001000000180000002100000028b52f"
        "fd2018c1000000ffffff6203030303802b0100002b0100002b0100005efc",
    )
}
"""By format: the digest of a payload, and a difference from it."""


class Learner:
    """Publishes versions of which it remembers every bit."""

    def __init__(self, broker: Broker, scope: JobScope, seed: int = 0, **store: Any) -> None:
        self.draw = np.random.default_rng(seed)
        self.words = self.draw.integers(0, 1 << 16, NUM_WORDS, np.uint16)
        self.published: dict[int, bytes] = {}
        self.version = -1
        self.open = lambda: WeightStore(broker, scope, full_snapshot_every=4, **store)
        self.store = self.open()

    async def publish(self, share: float = 0.02) -> Manifest:
        """Change a share of the weights a little, 1 means all and much, and publish."""
        places = self.draw.random(NUM_WORDS) < share
        far = 1 << 15 if share == 1 else 200
        self.words[places] += self.draw.integers(-far, far, places.sum()).astype(np.uint16)
        self.version += 1
        self.published[self.version] = self.words.tobytes()
        cut = NUM_WORDS // 3
        return await self.store.publish(
            self.version,
            {
                "a": TensorBytes("bfloat16", (cut,), memoryview(self.words[:cut].tobytes())),
                "b": TensorBytes("float16", (NUM_WORDS - cut,), self.words[cut:].data),
            },
        )


async def fetched(store: WeightStore, manifest: Manifest) -> bytes:
    return b"".join(bytes_of(one) for one in (await store.fetch(manifest)).values())


@pytest.mark.parametrize("transport", ["object", "file"])
async def test_small_changes_travel_as_differences_from_the_last_and_from_the_anchor(
    broker: Broker, scope: JobScope, tmp_path: Path, transport: str
) -> None:
    learner = Learner(broker, scope, transport=transport, folder=tmp_path)
    manifests = [await learner.publish() for _ in range(6)]
    told = [(one.kind, [each.base for each in one.differences]) for one in manifests]
    assert told == [
        ("full", []),
        ("delta", [0]),
        ("delta", [1, 0]),
        ("delta", [2, 0]),
        ("full", [3]),
        ("delta", [4]),
    ]
    assert manifests[1].stored_bytes < manifests[0].stored_bytes / 15
    steady, late = learner.open(), learner.open()
    for manifest in manifests:
        assert await fetched(steady, manifest) == learner.published[manifest.version]
    for manifest in (manifests[3], manifests[2], manifests[0], manifests[5]):
        assert await fetched(late, manifest) == learner.published[manifest.version]


async def test_who_keeps_up_or_holds_the_anchor_fetches_one_difference(
    broker: Broker, scope: JobScope
) -> None:
    learner = Learner(broker, scope)
    manifests = [await learner.publish() for _ in range(4)]
    objects = ObjectStore(broker, scope.object_weights)
    steady, late = learner.open(), learner.open()
    await fetched(steady, manifests[0])
    await fetched(steady, manifests[1])
    await fetched(late, manifests[0])
    await objects.delete(manifests[0].location)
    for store, manifest in ((steady, manifests[2]), (late, manifests[3])):
        assert await fetched(store, manifest) == learner.published[manifest.version]
    with pytest.raises(NotFoundError):
        await fetched(learner.open(), manifests[3])


async def test_who_keeps_up_never_fetches_a_whole_version_again(
    broker: Broker, scope: JobScope
) -> None:
    learner, objects = Learner(broker, scope), ObjectStore(broker, scope.object_weights)
    steady = learner.open()
    for _ in range(10):
        manifest = await learner.publish()
        if manifest.version and manifest.location:
            await objects.delete(manifest.location)
        assert await fetched(steady, manifest) == learner.published[manifest.version]
    assert manifest.differences[-1].base == 8
    with pytest.raises(NotFoundError):
        await fetched(learner.open(), manifest)


async def test_versions_are_kept_with_the_anchor_that_they_are_made_of(
    broker: Broker, scope: JobScope
) -> None:
    learner = Learner(broker, scope)
    for _ in range(4):
        await learner.publish()
    await learner.store.keep({3})
    assert await learner.store.versions() == [0, 3]
    latest = await learner.store.latest()
    assert latest is not None
    assert await fetched(learner.open(), latest) == learner.published[3]
    await learner.store.sweep()
    assert await fetched(learner.open(), latest) == learner.published[3]
    await learner.publish()
    await learner.store.keep({4})
    assert await learner.store.versions() == [4]
    assert len(await ObjectStore(broker, scope.object_weights).names()) == 2


async def test_changes_everywhere_and_weights_of_32_bits_travel_whole(
    broker: Broker, scope: JobScope
) -> None:
    learner = Learner(broker, scope)
    assert [(await learner.publish(1.0)).kind for _ in range(3)] == ["full"] * 3
    wide = TensorBytes("float32", (4,), memoryview(bytes(16)))
    kinds = [(await learner.store.publish(9 + n, {"w": wide})).kind for n in range(2)]
    assert kinds == ["full", "full"]


@pytest.mark.parametrize("seed", range(8))
async def test_joins_losses_reordering_and_corruption_end_in_equal_bits_or_in_a_refusal(
    broker: Broker, scope: JobScope, seed: int
) -> None:
    learner = Learner(broker, scope, seed)
    draw, objects = learner.draw, ObjectStore(broker, scope.object_weights)
    manifests = [await learner.publish()]
    stores = [learner.open()]
    refused = 0

    async def check(store: WeightStore, manifest: Manifest) -> None:
        nonlocal refused
        try:
            words = await fetched(store, manifest)
        except (NotFoundError, BrokerError):
            refused += 1
        else:
            assert words == learner.published[manifest.version]

    for _ in range(40):
        what = draw.choice(["publish", "fetch", "old", "join", "lose", "spoil", "flip", "restart"])
        store = stores[draw.integers(len(stores))]
        if what == "publish":
            manifests.append(await learner.publish(draw.choice([0.0, 0.02, 0.02, 1.0])))
            await learner.store.keep(set(), newest=2)
        elif what == "fetch":
            await check(store, manifests[-1])
        elif what == "old":
            await check(store, manifests[draw.integers(len(manifests))])
        elif what == "join":
            stores.append(learner.open())
        elif what == "restart":  # the learner died, and knows of no version it had sent
            learner.store = learner.open()
        elif what == "flip" and store._history.held:  # what is held is not what was held
            held = np.frombuffer(store._history.held[-1].payload, np.uint8)
            held[draw.integers(len(held))] ^= 1
        elif names := await objects.names():
            name = sorted(names)[draw.integers(len(names))]
            if what == "lose":
                await objects.delete(name)
            elif what == "spoil":
                await objects.put(name, [memoryview(b"spoilt")], deadline_s=PATIENCE_S)
    learner.store = learner.open()
    last = await learner.publish()
    for store in stores:
        assert await fetched(store, last) == learner.published[last.version]
    assert refused < 30


async def test_what_other_commits_have_published_in_this_format_is_read(
    broker: Broker, scope: JobScope
) -> None:
    """If it fails: raise FORMAT and write down here what is published now."""
    digest, difference = PUBLISHED[FORMAT]
    assert f"weights format {FORMAT}" in software()
    words = (np.arange(1000) * 7 % 1009).astype(np.uint16)
    manifest = await WeightStore(broker, scope).publish(
        0, {"a": TensorBytes("bfloat16", (10, 40), words[:400].data), "b": _rest(words)}
    )
    assert manifest.digest == digest
    changed = words.copy()
    changed[::300] += 3
    changed[999] = 9
    apply(memoryview(bytes.fromhex(difference)), words.data)
    assert words.tobytes() == changed.tobytes()


def _rest(words: np.ndarray) -> TensorBytes:
    return TensorBytes("float16", (600,), words[400:].data)
