"""Manifests that a compromised learner writes: they open, fetch and remove nothing of others."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.weights.job_weights import follow_weights, open_weights
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.weights import JoinRound, Manifest, weight_file
from tinkermq.schemas.wire.codec import pack, unpack
from tinkermq.schemas.wire.errors import BrokerError, ConfigError, MessageError, StorageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context
from tests.support.waiting import PATIENCE_S

TENSORS = {"w": TensorBytes("float32", (2,), memoryview(bytes(8)))}
OTHERS = {"transport": "file", "digest": "0" * 64}
"""What a forged manifest says to have a file opened, and its digest named in the error."""


async def forge(broker: Broker, scope: JobScope, version: int, changes: Mapping[str, Any]) -> None:
    """Write a changed manifest of a published version, as its learner could."""
    for key in ("latest", f"v{version}"):
        subject = f"$KV.{scope.bucket_weights}.{key}"
        message = await broker.nc.jetstream().get_last_msg(f"KV_{scope.bucket_weights}", subject)
        assert message.data is not None
        told: Any = unpack(message.data, max_bytes=1 << 20)
        forged = pack({**told, **changes})
        await broker.append(subject, forged, deadline_s=PATIENCE_S, waiting_for="test")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "job.key"
    path.parent.mkdir()
    path.write_bytes(b"12345678")
    return path


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _files_of(folder: Path, job: str) -> list[Path]:
    return [path for path in folder.iterdir() if job in path.name]


def difference(location: str) -> dict[str, Any]:
    fields = {"base": 0, "base_digest": "0" * 64, "num_bytes": 8, "digest": "0" * 64}
    return {"location": "", "differences": [{**fields, "location": location}], "kind": "delta"}


@pytest.mark.parametrize("transport", ["object", "file"])
@pytest.mark.parametrize("where", ["location", "difference"])
@pytest.mark.parametrize("path", ["{}", "../secrets/job.key", "v1-0123abcd/../../secrets/job.key"])
async def test_a_manifest_that_names_a_file_is_no_version_and_removes_nothing(
    broker: Broker,
    scope: JobScope,
    tmp_path: Path,
    secret: Path,
    transport: Any,
    where: str,
    path: str,
) -> None:
    store = WeightStore(broker, scope, transport, folder=tmp_path / "weights")
    await store.publish(1, TENSORS)
    path = path.format(secret)
    changes = {"location": path} if where == "location" else difference(path)
    await forge(broker, scope, 1, {**OTHERS, **changes})
    assert await store.latest() is None
    assert await store.manifest(1) is None
    assert not await store.is_out(1)
    await store.sweep()
    await store.keep(set(), newest=2)
    await store.make_room(TENSORS, set())
    await store.publish(1, TENSORS)  # in place of the forged one
    await forge(broker, scope, 1, {**OTHERS, **changes})
    await store.remove(1)
    assert _read(secret) == b"12345678"


async def test_a_version_is_fetched_by_the_transport_of_the_jobs_configuration_alone(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    by_file = WeightStore(broker, scope, "file", folder=folder)
    manifest = await by_file.publish(1, TENSORS)
    file = folder / weight_file(scope, manifest.location)
    by_object = WeightStore(broker, scope, folder=folder)
    assert await by_object.latest() is None
    assert not await by_object.is_out(1)
    with pytest.raises(ConfigError, match="travels by file, and this job's versions by object"):
        await by_object.fetch(manifest)
    await by_object.remove(1)
    assert file.exists()  # until a learner starts with the other transport
    await by_object.sweep()
    assert not file.exists()


@pytest.mark.parametrize("version", [2, 11])
async def test_a_manifest_removes_no_payload_of_another_version_or_job(
    broker: Broker, scope: JobScope, tmp_path: Path, version: int
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path)
    other = WeightStore(broker, JobScope(scope.user, f"{scope.job}x"), "file", folder=tmp_path)
    await store.publish(1, TENSORS)
    with contextlib.suppress(Exception):  # the other job has no streams: its file is what counts
        await other.publish(1, TENSORS)
    theirs = _files_of(tmp_path, f"{scope.job}x-")[0]
    suffix = theirs.stem.rpartition("-")[2]
    await forge(broker, scope, 1, {"location": f"v1-{suffix}"})
    await store.remove(1)
    assert theirs.exists()
    await store.publish(1, TENSORS)
    newer = await store.publish(version, TENSORS)
    await forge(broker, scope, 1, {"location": newer.location})
    await store.remove(1)
    assert (tmp_path / weight_file(scope, newer.location)).exists()


async def test_a_link_with_the_name_of_a_payload_is_not_followed(
    broker: Broker, scope: JobScope, tmp_path: Path, secret: Path
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path / "weights")
    manifest = await store.publish(1, TENSORS)
    file = tmp_path / "weights" / weight_file(scope, manifest.location)
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(StorageError, match="cannot be read"):
        await store.fetch(manifest)
    await store.remove(1)
    assert _read(secret) == b"12345678"


async def test_the_error_of_a_damaged_file_does_not_tell_its_digest(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    store = WeightStore(broker, scope, "file", folder=tmp_path)
    manifest = await store.publish(1, TENSORS)
    await forge(broker, scope, 1, {"digest": "0" * 64})
    forged = await store.latest()
    assert forged is not None
    with pytest.raises(BrokerError, match="version 1 is damaged") as told:
        await store.fetch(forged)
    assert manifest.digest not in str(told.value)


@pytest.mark.parametrize(
    ("configured", "accepted"),
    [
        ("auto", {"object", "nccl"}),
        ("object", {"object"}),
        ("file", {"file"}),
        ("nccl", {"nccl"}),
    ],
)
async def test_a_jobs_processes_accept_what_its_configuration_names(
    broker: Broker, scope: JobScope, tmp_path: Path, configured: str, accepted: set[str]
) -> None:
    sections = {"model": {"path": "m"}, "env": {"game": "g"}, "weights": {"transport": configured}}
    context = await job_context(broker, scope, "server", JobConfig.model_validate(sections))
    context.record = context.record.model_copy(update={"run_dir": str(tmp_path)})
    for store in (open_weights(context), follow_weights(context, scope.job)):
        for transport in ("object", "file", "nccl"):
            manifest = Manifest(
                version=1, tensors=[], num_bytes=0, digest="", transport=transport, published=0.0
            )
            assert store._accepts(manifest) == (transport in accepted)
    await context.service.stop()


@pytest.mark.parametrize(
    "forged",
    [
        *({"location": name} for name in ("../v1-0000000a", "/v1-0000000a", "v1-0000000a\n", "v1")),
        *({"location": name} for name in ("v1-0000000a/..", "v1-0000000a\0", "V1-0000000A", "")),
        *({"version": number} for number in (-1, 1.5, float("nan"))),
        *({"num_bytes": -1}, {"num_ranks": 0}, {"num_ranks": 1025}, {"port": 65536}),
        *({"receiver": "x" * 65}, {"group": "x" * 65}, {"gpus": ["x"] * 1025}, {"device": "meta"}),
    ],
    ids=str,
)
def test_a_request_for_a_version_that_names_something_else_is_malformed(
    forged: dict[str, Any],
) -> None:
    fields = {"receiver": "r", "version": 1, "location": "v1-0000000a", "num_bytes": 4}
    request = JoinRound.model_validate({**fields, "device": "cpu"})
    assert JoinRound.from_bytes(request.to_bytes()) == request
    with pytest.raises(MessageError, match=next(iter(forged))):
        JoinRound.from_bytes(request.to_bytes(**forged))
