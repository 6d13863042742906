"""16-bit weights as differences: who gets what, and that nothing ends in wrong weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.objects import ObjectStore
from tinkermq.broker.weights.history import apply
from tinkermq.broker.weights.payloads import TensorBytes
from tinkermq.broker.weights.store import FORMAT, WeightStore, software
from tinkermq.schemas.weights import Manifest
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.models import bytes_of
from tests.support.waiting import PATIENCE_S

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
