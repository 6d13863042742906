"""A store as large as the versions that are needed goes through many of them."""

import asyncio
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
from tinkermq.actors.weights.store import NEWEST, WeightStore, room_for
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.jetstream.streams import bound_weights, create_job_streams, stream_info
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.local import disk
from tinkermq.schemas.local.disk import with_room
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError, StorageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.models import bytes_of
from tests.support.waiting import PATIENCE_S

NUM_WORDS = 600_000
VERSION_BYTES = 2 * NUM_WORDS


class Learner:
    """Publishes versions that fill a store of a given size, as the learner does."""

    def __init__(self, broker: Broker, scope: JobScope, *, differences: bool) -> None:
        self._draw = np.random.default_rng(0)
        self._words = self._draw.integers(0, 1 << 16, NUM_WORDS, np.uint16)
        self._differences = differences
        self.needed: set[int] = set()
        self.published: dict[int, bytes] = {}
        self.open = lambda: WeightStore(
            broker, scope, differences=differences, full_snapshot_every=4
        )
        self.store = self.open()

    async def publish(self, version: int) -> None:
        """Publish weights of which a share has changed, or all of them without differences."""
        share = 0.3 if self._differences else 1.0
        places = self._draw.random(NUM_WORDS) < share
        self._words[places] = self._draw.integers(0, 1 << 16, places.sum(), np.uint16)
        self.published[version] = self._words.tobytes()
        words = memoryview(self.published[version])
        tensors = {"w": TensorBytes("bfloat16", (NUM_WORDS,), words)}
        await self.store.make_room(tensors, self.needed)
        await self.store.publish(version, tensors)

    async def check(self, version: int, store: WeightStore | None = None) -> None:
        """Fetch a version as a receiver that has just come, and compare every bit."""
        manifest = await self.store.manifest(version)
        assert manifest is not None
        fetched = await (store or self.open()).fetch(manifest)
        assert bytes_of(fetched["w"]) == self.published[version]


async def learner_of(
    broker: Broker, scope: JobScope, num_versions: int, *, differences: bool
) -> Learner:
    bound = room_for(num_versions, VERSION_BYTES)
    await create_job_streams(broker, scope, LimitsConfig(), weights_bytes=bound)
    return Learner(broker, scope, differences=differences)


@pytest.mark.parametrize("differences", [False, True])
async def test_many_versions_go_through_a_store_that_the_needed_ones_fill(
    broker: Broker, scope: JobScope, differences: bool
) -> None:
    """Needed are the newest, the next, an opponent, an evaluated one, and their anchors."""
    anchors = 3 if differences else 0
    learner = await learner_of(broker, scope, 4 + anchors, differences=differences)
    follower = learner.open()
    for version in range(24):
        evaluated = version - version % 5
        learner.needed = {0, evaluated} - {version}
        await learner.publish(version)
        await learner.check(version, follower)
        for needed in learner.needed | {version}:
            await learner.check(needed)


async def test_a_receiver_that_loads_the_version_before_the_newest_keeps_it_where_there_is_room(
    broker: Broker, scope: JobScope
) -> None:
    learner = await learner_of(broker, scope, NEWEST + 1, differences=False)
    for version in range(6):
        await learner.publish(version)
        assert await learner.store.versions() == [
            one for one in range(version - NEWEST, version + 1) if one >= 0
        ]


async def test_without_room_for_both_the_version_before_the_newest_goes_and_its_reader_moves_on(
    broker: Broker, scope: JobScope
) -> None:
    learner = await learner_of(broker, scope, 2, differences=False)
    await learner.publish(0)
    await learner.publish(1)
    old = await learner.store.manifest(0)
    assert old is not None
    await learner.publish(2)
    assert await learner.store.versions() == [1, 2]
    with pytest.raises(NotFoundError, match="were removed"):
        await learner.open().fetch(old)
    await learner.check(2)


async def test_a_full_store_is_waited_for_until_an_evaluation_has_ended(
    broker: Broker, scope: JobScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSE_S", 0.01)
    learner = await learner_of(broker, scope, 3, differences=True)
    await learner.publish(0)
    await learner.publish(1)
    learner.needed = {0, 1}

    async def fill() -> None:
        for version in itertools.count(2):
            learner.needed.add(version - 1)
            await learner.publish(version)

    with pytest.raises(StorageError) as raised:
        await fill()
    assert raised.value.is_full
    held = await learner.store.versions()
    version = max(held) + 1
    objects = ObjectStore(broker, scope.object_weights)
    names = await objects.names()
    waiting = asyncio.create_task(
        with_room(lambda: learner.publish(version), "weights", lambda _: nullcontext())
    )
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await objects.names() == names  # nothing of failed attempts is left
    learner.needed = set()
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    await learner.check(version)


async def test_the_bound_follows_what_is_asked_for_and_a_server_without_room_is_named(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    await bound_weights(own_broker, own_scope, 5_000_000)
    info = await stream_info(own_broker, f"OBJ_{own_scope.object_weights}")
    assert info["config"]["max_bytes"] == 5_000_000
    with pytest.raises(BrokerError, match="need 1,125,899,906,842,624 bytes") as raised:
        await bound_weights(own_broker, own_scope, 1 << 50)
    assert "raise max_file_store" in raised.value.hint
