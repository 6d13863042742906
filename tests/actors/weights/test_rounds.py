"""Weights from memory to memory: receivers that come, go, die; learners that are started again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from nats.aio.msg import Msg
from tinkermq.actors.weights import broadcast
from tinkermq.actors.weights.broadcast import BroadcastReceiver, Sender
from tinkermq.actors.weights.broadcast_group import ProcessGroup, ProcessGroupFailed, reach_store
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import CopiedWeights, TensorBytes, fingerprint
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.weights import JoinRound, Manifest
from tinkermq.schemas.wire.errors import (
    BrokerError,
    ConfigError,
    DeadlineError,
    NotFoundError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.weights.receiving import MEET_S, DiesAt, die, follow, newest, processes
from tests.support.models import bytes_of
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until

pytestmark = pytest.mark.full


class Learner:
    """Publishes versions of which it remembers every bit; may die and be started again."""

    late_s = 0.05

    def __init__(self, broker: Broker, scope: JobScope, folder: Path, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.published: dict[int, bytes] = {}
        self.scope, self.folder = scope, folder
        self._broker = broker

    async def start(self) -> None:
        """Begin to serve, knowing of nothing but what lies in the folder."""
        broker, scope = self._broker, self.scope
        self.sender = Sender(
            broker, scope, self.folder, window_s=0.05, late_s=self.late_s, meet_s=MEET_S
        )
        self.store = WeightStore(broker, scope, "nccl", holder=self.sender)
        self.service = await Service.start(broker, name="learner", description="a learner")
        await self.sender.open(self.service)
        self._serving = asyncio.create_task(self.sender.serve())

    async def die(self) -> None:
        """End as a process does that is killed: what was in memory is gone."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await self.service.stop(0)

    async def publish(self, version: int, size: int = 3000) -> Manifest:
        """Publish random weights, or those that this version had."""
        words = self.published.setdefault(version, self.draw.bytes(4 * size + 2))
        tensors = {
            "a": TensorBytes("bfloat16", (1,), memoryview(words[:2])),
            "none": TensorBytes("float32", (0,), memoryview(b"")),
            "b": TensorBytes("float32", (size,), memoryview(words[2:])),
        }
        return await self.store.publish(version, tensors)


@pytest.fixture
async def learner(broker: Broker, scope: JobScope, tmp_path: Path) -> AsyncIterator[Learner]:
    made = Learner(broker, scope, tmp_path / "weights")
    await made.start()
    yield made
    await made.die()


@pytest.fixture
async def join(
    nats_server: NatsServer, scope: JobScope
) -> AsyncIterator[Callable[[], "asyncio.Future[WeightStore]"]]:
    """Open the weights as a receiver with a connection of its own."""
    async with AsyncExitStack() as stack:

        async def opened() -> WeightStore:
            broker = await connect(nats_server.url, name="receiver")
            await stack.enter_async_context(broker)
            receiver = BroadcastReceiver(broker, scope, meet_s=MEET_S)
            stack.callback(receiver.close)
            return WeightStore(broker, scope, receiver=receiver)

        yield lambda: asyncio.ensure_future(opened())


async def fetched(store: WeightStore, manifest: Manifest) -> bytes:
    return b"".join(bytes_of(one) for one in (await store.fetch(manifest)).values())


async def fetched_together(
    learner: Learner, stores: Sequence[WeightStore], manifest: Manifest
) -> list[bytes]:
    """Fetch in one round, whose others the learner waits for however slow the machine is."""
    sender = learner.sender
    before = sender._window_s, sender._late_s
    sender._window_s = sender._late_s = AFTER_PATIENCE_S
    fetching = [asyncio.create_task(fetched(store, manifest)) for store in stores]

    def all_asked() -> bool:
        waiting = [len(askers) for askers in sender._waiting.values()]
        return waiting == [len(stores)] or all(one.done() for one in fetching)

    await until(all_asked, f"{len(stores)} receivers to ask")
    sender._window_s, sender._late_s = before
    sender._requested.set()
    return await asyncio.gather(*fetching)


def group_of(store: WeightStore) -> str:
    receiver = store._receiver
    assert isinstance(receiver, BroadcastReceiver)
    return receiver._member.group


async def test_all_get_the_same_bits_and_their_group_is_used_again(learner, join) -> None:
    stores = [await join() for _ in range(3)]
    groups = set()
    for version in range(3):
        manifest = await learner.publish(version)
        found = await fetched_together(learner, stores, manifest)
        assert found == [learner.published[version]] * 3
        groups |= {group_of(store) for store in stores}
    assert len(groups) == 1
    assert (await stores[0].fetch(await learner.store.publish(3, {}))) == {}
    adapter = {"lora_A": TensorBytes("float16", (2, 1), memoryview(b"abcd"))}
    manifest = await learner.store.publish(4, adapter, kind="lora")
    assert (manifest.kind, await fetched(stores[1], manifest)) == ("lora", b"abcd")


async def test_who_leaves_does_nothing_and_who_comes_late_has_a_round_of_its_own(
    learner, join
) -> None:
    stores = [await join() for _ in range(3)]
    first = await learner.publish(0)
    await asyncio.gather(*(fetched(store, first) for store in stores))
    stores.pop()._receiver.close()
    second = await learner.publish(1)
    found = await asyncio.gather(*(fetched(store, second) for store in stores))
    assert found == [learner.published[1]] * 2
    late = await join()
    assert await fetched(late, first) == learner.published[0]
    assert await fetched(late, second) == learner.published[1]
    third = await learner.publish(2)
    found = await asyncio.gather(*(fetched(store, third) for store in [*stores, late]))
    assert found == [learner.published[2]] * 3


async def test_a_late_receiver_divides_no_round(
    learner, join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers come far behind the window, and the next version needs no other group."""
    stores = [await join() for _ in range(4)]
    sender = learner.sender
    sender._num_receivers, sender._window_s, sender._late_s = 4, 0.0, AFTER_PATIENCE_S
    sent: list[str] = []
    plain = ProcessGroup.send
    monkeypatch.setattr(
        ProcessGroup, "send", lambda self, payload: (sent.append(self.name), plain(self, payload))
    )
    for version in range(3):
        manifest = await learner.publish(version)
        fetching: list[asyncio.Task[bytes]] = []
        for number, store in enumerate(stores):
            fetching.append(asyncio.create_task(fetched(store, manifest)))

            def asked(number: int = number) -> bool:
                waiting = sum(map(len, sender._waiting.values()))
                return waiting == number + 1 or number == 3

            await until(asked, f"{number + 1} receivers to ask")
        assert await asyncio.gather(*fetching) == [learner.published[version]] * 4
        assert len(sent) == version + 1
    assert len(set(sent)) == 1
    # One that is gone is waited for once.
    stores.pop()._receiver.close()
    sender._late_s = 0.1
    for version in (3, 4):
        manifest = await learner.publish(version)
        async with asyncio.timeout(PATIENCE_S):
            found = await asyncio.gather(*(fetched(store, manifest) for store in stores))
        assert found == [learner.published[version]] * 3
        sender._late_s = AFTER_PATIENCE_S


@pytest.mark.parametrize("dies_at", ["placed", "met"])
async def test_a_receiver_killed_in_a_round_costs_the_others_that_round(
    learner, nats_server: NatsServer, scope: JobScope, dies_at: DiesAt
) -> None:
    learner.sender._window_s = AFTER_PATIENCE_S  # until all of three have asked
    with processes() as start:
        followers = [start(follow, nats_server.url, scope) for _ in range(2)]
        victim = start(die, nats_server.url, scope, dies_at)
        await learner.publish(0, 1_000_000)

        def all_asked() -> bool:
            return [len(one) for one in learner.sender._waiting.values()] == [3]

        await until(all_asked, "three receivers to ask")
        learner.sender._window_s = 0.05
        learner.sender._requested.set()
        wanted = (0, sha256(learner.published[0]).hexdigest())
        assert [await one.tell() for one in followers] == [wanted] * 2
        await asyncio.to_thread(victim.process.join)
        assert victim.process.exitcode == -9
        await learner.publish(1)
        wanted = (1, sha256(learner.published[1]).hexdigest())
        assert [await one.tell() for one in followers] == [wanted] * 2


async def test_damage_on_the_way_is_fetched_again_and_then_an_error(
    broker: Broker, learner, join
) -> None:
    store, manifest = await join(), await learner.publish(0)
    held = learner.sender._held[manifest.location].payload
    held[100] ^= 1
    asked = 0

    def repair(message: Msg) -> None:
        nonlocal asked
        asked += bool(JoinRound.from_bytes(message.data).port)
        if asked == 2:
            held[100] ^= 1

    listening = await broker.listen(learner.scope.weights_join, repair)
    assert await fetched(store, manifest) == learner.published[0]
    assert asked == 2
    await listening.stop()
    held[-1] ^= 128
    with pytest.raises(BrokerError, match="version 0 is damaged: it has digest"):
        await store.fetch(manifest)


async def test_a_learner_started_again_has_what_it_was_asked_to_keep_and_makes_the_rest_anew(
    learner, join
) -> None:
    store = await join()
    for version in range(5):
        await learner.publish(version)
        await learner.store.keep({1}, newest=2)
    kept = await learner.store.manifest(1)
    assert await learner.store.versions() == [1, 3, 4]
    assert await fetched(store, await learner.store.manifest(3)) == learner.published[3]
    await learner.die()
    await learner.start()
    assert await fetched(store, await learner.store.manifest(1)) == learner.published[1]
    assert [await learner.store.is_out(one) for one in (1, 2, 4, 5)] == [True, False, False, False]
    waiting = asyncio.create_task(newest(store, 3))
    for version in (2, 3):
        await learner.publish(version)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.1)
    await learner.publish(4)
    version, tensors = await waiting
    assert version == 4
    assert b"".join(bytes_of(one) for one in tensors.values()) == learner.published[4]
    await learner.store.remove(1)
    with pytest.raises(NotFoundError, match="version 1 is not in the learner's memory"):
        await store.fetch(kept)
    await learner.store.keep(set(), newest=2)
    assert list(learner.folder.iterdir()) == []


async def test_memory_holds_two_versions_and_files_the_older_ones_that_are_kept(learner) -> None:
    for version in range(6):
        await learner.publish(version)
        await learner.store.keep({0, 2}, newest=2)
        assert len(learner.sender._held) <= 3
    assert sorted(path.name[:3] for path in learner.folder.iterdir()) == ["v0-", "v2-"]


async def test_a_version_digested_on_the_gpu_is_not_digested_again(
    learner, join, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = memoryview(learner.draw.bytes(4000))
    version = CopiedWeights({"a": TensorBytes("float32", (1000,), words)})
    version.fingerprint = fingerprint(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    with monkeypatch.context() as patched:
        patched.setattr(broadcast, "fingerprint", None)
        manifest = await learner.store.publish(0, version)
    assert manifest.digest == version.fingerprint
    assert await fetched(await join(), manifest) == bytes(words)


async def test_a_learner_that_stays_away_is_named(broker: Broker, learner, scope: JobScope) -> None:
    manifest = await learner.publish(0)
    await learner.die()
    store = WeightStore(broker, scope, receiver=BroadcastReceiver(broker, scope, patience_s=0.1))
    with pytest.raises(DeadlineError, match=r"version 0 was waited for for 0.1 s: the learner"):
        await store.fetch(manifest)
    await learner.start()
    with pytest.raises(ConfigError, match="travels by nccl, and this job's versions by object"):
        await WeightStore(broker, scope).fetch(manifest)


def test_a_place_to_meet_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ProcessGroupFailed, match=r"met at 127\.0\.0\.1:1, which") as raised:
        reach_store("127.0.0.1", 1)
    assert "the broker's address in that network" in raised.value.hint


@pytest.mark.parametrize("seed", range(12))
async def test_any_order_of_joins_losses_and_damage_ends_in_equal_bits_or_in_a_refusal(
    broker: Broker, scope: JobScope, tmp_path: Path, join, seed: int
) -> None:
    learner = Learner(broker, scope, tmp_path, seed)
    await learner.start()
    draw, version, received, refused = learner.draw, 0, 0, 0
    manifests = [await learner.publish(0)]
    stores = [await join()]

    async def check(store: WeightStore, manifest: Manifest) -> None:
        nonlocal received, refused
        try:
            words = await fetched(store, manifest)
        except (NotFoundError, BrokerError, DeadlineError):
            refused += 1
        else:
            assert words == learner.published[manifest.version]
            received += 1

    for _ in range(40):
        what = draw.choice(
            ["publish", "fetch", "fetch", "old", "join", "leave", "spoil", "restart"]
        )
        some = [one for one in stores if draw.random() < 0.7]
        if what == "publish":
            version += 1
            manifests.append(await learner.publish(version))
            await learner.store.keep({1}, newest=2)
        elif what == "fetch":
            await asyncio.gather(*(check(one, manifests[-1]) for one in some))
        elif what == "old":
            await asyncio.gather(
                *(check(one, manifests[draw.integers(len(manifests))]) for one in some)
            )
        elif what == "join":
            stores.append(await join())
        elif what == "leave" and some:
            some[0]._receiver.close()  # and comes back when it asks again
        elif what == "spoil" and learner.sender._held:
            held = draw.choice(list(learner.sender._held))
            learner.sender._held[held].payload[draw.integers(3000)] ^= 1
        elif what == "restart":
            await learner.die()
            await learner.start()
            manifests.append(await learner.publish(version))
    last = await learner.publish(version + 1)
    found = await asyncio.gather(*(fetched(one, last) for one in stores))
    assert found == [learner.published[version + 1]] * len(stores)
    assert received
    assert refused
    await learner.die()
