"""Jobs that have ended are deleted and archived, and nothing of them is left behind."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.scheduler.jobs.removal import kept_streams
from tinkermq.actors.storage.run_folders import remove_weights
from tinkermq.actors.storage.stores import UrlStore
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_metric, read_events
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import delete_stream, stream_info
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.snapshots import restore_streams, save_streams
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import (
    JobRecord,
    JobRequest,
    RequestRecord,
    SealedSecrets,
    StopRequest,
)
from tinkermq.schemas.local import folder as folders
from tinkermq.schemas.metric import EvalRecord, Metric, Presence
from tinkermq.schemas.rollout import Segment
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.errors import NotFoundError, StateError, StorageError
from tinkermq.schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_ARCHIVE,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_REQUESTS,
    BUCKET_SECRETS,
    JobScope,
)

from tests.actors.scheduler.conftest import Stack
from tests.clients.command import tinkermq
from tests.support.hollow_model import make_hollow
from tests.support.strategies import make_group
from tests.support.waiting import eventually

pytestmark = pytest.mark.full


async def _ended(stack: Stack, job: JobRecord) -> JobRecord:
    """Let a job that runs leave something everywhere, and end."""
    scope, broker = job.scope, stack.broker
    await RolloutLog(broker, scope).append(make_group(1))
    await BatchLog(broker, scope).append(_batch(), 0)
    segment = Segment.empty(delivery=1, writer="g", start=0)
    if "generator" in job.config:
        await broker.append(
            scope.segment(1, 0), segment.to_bytes(), deadline_s=5, waiting_for="test"
        )
    await Bucket(broker, BUCKET_EVALS, EvalRecord).put(
        f"{scope.key}.1", EvalRecord(version=1, step=1)
    )
    await Bucket(broker, BUCKET_SECRETS, SealedSecrets).put(scope.key, SealedSecrets(sealed=b"x"))
    beat = Presence(actor="learner", role="learner", host="h", pid=1, state="working", time=0.0)
    await Bucket(broker, BUCKET_ACTORS, Presence).put(f"{scope.key}.learner", beat)
    await publish_metric(broker, scope, Metric(step=7, values={"a": 1.0}, time=time.time()))
    (Path(job.run_dir) / "checkpoints").mkdir()
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    return await stack.until(job, lambda now: not now.untold)


def _batch() -> BatchRecord:
    return BatchRecord(step=1, seqs=[1], tasks=[1], seed=0, digest="d", learner="l", time=1.0)


async def _traces(broker: Broker, job: JobRecord) -> set[str]:
    """Return every stream, and every key of a shared bucket, that is of the job."""
    listed: dict[str, Any] = await broker.api("STREAM.LIST", {})
    names = {stream["config"]["name"] for stream in listed["streams"]}
    found = {name for name in names if job.job in name}
    for bucket in (BUCKET_JOBS, BUCKET_ARCHIVE, BUCKET_EVALS, BUCKET_SECRETS, BUCKET_ACTORS):
        keys = await Bucket(broker, bucket, JobRecord).keys(job.user)
        found |= {f"{bucket} {key}" for key in keys if job.job in key}
    requests = await Bucket(broker, BUCKET_REQUESTS, RequestRecord).items(job.user)
    return found | {entry.key for entry in requests if entry.value.job == job.job}


def _inside(job: JobRecord) -> set[str]:
    return {path.name for path in Path(job.run_dir).iterdir()}


def _rename(job: JobRecord) -> None:
    folder = Path(job.run_dir)
    folder.rename(folder.with_name(f".{folder.name}.deleted-{job.job}"))


def _beside(job: JobRecord) -> list[str]:
    """Return what lies in the folder of run folders."""
    return sorted(path.name for path in Path(job.run_dir).parent.iterdir())


async def test_of_a_deleted_job_nothing_is_left_and_its_name_is_free_again(
    stack: Stack, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store"
    generator = {"count": 1, "segment_tokens": 8}
    job = await stack.running(name="mine", generator=generator, storage={"url": url})
    store = UrlStore(url)
    for name in (job.job, "another"):
        store.put(f"runs/{job.user}/{name}/checkpoints/step_000001-0/config.json", b"{}")
    job = await _ended(stack, job)
    assert job.version == 7
    assert {actor.state for actor in job.actors} == {"exited"}
    segments = await stream_info(stack.broker, job.scope.stream_segment)
    assert segments["state"]["messages"] == 0
    pool = Pool(stack.broker)
    await pool.delete_run("mine")
    assert await _traces(stack.broker, job) == set()
    assert _beside(job) == []
    assert [one.name.split("/")[2] for one in store.objects()] == ["another"]
    with pytest.raises(NotFoundError):
        await pool.delete_run("mine")
    again = await stack.submit(name="mine")
    assert again.job != job.job
    await stack.until(again, "RUNNING")


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/weights", "a\0b", "missing"])
async def test_a_job_whose_folder_of_weights_is_odd_is_deleted_as_any_other(
    stack: Stack, folder: str
) -> None:
    await stack.scheduler()
    job = await stack.submit(name="odd", weights={"transport": "file", "folder": folder})
    await stack.ask("stop", StopRequest(job=job.job))
    await stack.until(job, "CANCELLED")
    await Pool(stack.broker).delete_run("odd")
    assert await _traces(stack.broker, job) == set()


def test_of_a_shared_folder_of_weights_the_payloads_of_the_job_alone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 3)  # of a run: a shared folder may hold more
    for name in ("v1-local.mine-0123abcd.safetensors", "v3-c.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
    for job in ("local.mine", "local.mine-2"):
        (tmp_path / f".v4-{job}-0123abcd.safetensors.89abcdef").touch()
    is_none = "v4-local.mine-0123abcd.safetensors"
    (tmp_path / is_none).mkdir()
    remove_weights("", str(tmp_path), JobScope("local", "mine"))
    left = sorted(path.name for path in tmp_path.iterdir())
    half = ".v4-local.mine-2-0123abcd.safetensors.89abcdef"
    assert left == [half, "model.safetensors", "v3-c.safetensors", is_none]


async def test_a_job_that_runs_or_that_others_live_on_is_not_deleted(stack: Stack) -> None:
    job = await stack.running(slots=4, name="base")
    with pytest.raises(StateError, match="only a run that has ended"):
        await stack.ask("delete", JobRequest(job=job.job))
    with pytest.raises(NotFoundError):
        await stack.ask("delete", JobRequest(job=job.job), user="mallory")
    job = await _ended(stack, job)
    folder = make_hollow(Path(job.run_dir) / "checkpoints")
    reader = await stack.submit(name="reader", model={"path": str(folder)})
    with pytest.raises(StateError, match=r"reader is .* and reads its folder \(model.path\)"):
        await stack.ask("delete", JobRequest(job=job.job))
    await stack.until(reader, "RUNNING")
    await stack.jobs.update(reader, lambda now: now.model_copy(update={"stop": "now"}))
    await stack.until(reader, "CANCELLED")
    await Pool(stack.broker).delete_run("base")
    assert _beside(job) == ["reader"]


async def test_a_job_from_whose_place_in_a_store_another_reads_is_not_deleted(
    stack: Stack,
) -> None:
    job = await _ended(stack, await stack.running(slots=4, name="base"))
    url = f"s3://lab/runs/{job.user}/{job.job}/checkpoints/step_000001-0"
    await stack.submit(name="reader", model={"path": url})
    with pytest.raises(StateError, match=r"reads what it has in the store \(model.path\)"):
        await stack.ask("delete", JobRequest(job=job.job))


async def test_a_deletion_that_a_kill_cut_off_is_done_by_the_next_scheduler(stack: Stack) -> None:
    job, process = await stack.running_under_process()
    job = await _ended(stack, job)
    process.kill()
    await process.wait()
    await stack.jobs.update(job, lambda now: now.model_copy(update={"removal": "delete"}))
    await delete_stream(stack.broker, job.scope.stream_rollout)  # what was done before the kill
    _rename(job)
    await stack.scheduler()

    async def gone() -> bool:
        return await stack.jobs.find_by_id(job.user, job.job) is None

    await eventually(gone, "the job to be deleted")
    assert await _traces(stack.broker, job) == set()
    assert _beside(job) == []


async def test_an_archived_job_keeps_its_folder_and_comes_back_as_it_was(stack: Stack) -> None:
    job = await _ended(stack, await stack.running(name="kept"))
    pool = Pool(stack.broker)
    events = await read_events(stack.broker, job.scope)
    archived = await pool.archive_run("kept")
    assert archived.archived is not None
    left = {one for one in await _traces(stack.broker, job) if "tmq-" in one}
    assert left == {f"{BUCKET_ARCHIVE} {job.scope.key}", f"{BUCKET_EVALS} {job.scope.key}.1"}
    assert archived.archive_digest
    assert _beside(job) == [".archives", "kept"]
    with pytest.raises(StateError, match="archived"):
        await stack.ask("resume", JobRequest(job=job.job))
    words = ("verify", "kept", "--json", "--nats-url", stack.broker.url)
    verified = await asyncio.to_thread(tinkermq, *words)
    assert verified.out, verified.err
    seen = {check["check"]: check["seen"] for check in json.loads(verified.out)["checks"]}
    assert seen["steps"] == "steps recorded: 1", verified.err
    assert (await pool.find("kept")).archived is not None, "it was restored for the check alone"
    await asyncio.gather(*(pool.archive_run("kept", undo=True) for _ in range(2)))
    assert await read_events(stack.broker, job.scope) == events
    assert [record for _, record in await BatchLog(stack.broker, job.scope).read_all()] == [
        _batch()
    ]
    assert await RolloutLog(stack.broker, job.scope).contains(1)
    assert _beside(job) == ["kept"]
    await stack.ask("resume", JobRequest(job=job.job))
    await stack.until(job, "RUNNING")


async def test_an_archive_that_somebody_else_has_written_brings_no_stream_back(
    stack: Stack,
) -> None:
    job = await _ended(stack, await stack.running(name="kept"))
    planted = Path(job.run_dir) / "archive"
    planted.mkdir()
    (planted / f"{job.scope.stream_batch}.json").write_text('{"config": {}, "state": {}}')
    await Pool(stack.broker).archive_run("kept")
    assert [one.name for one in planted.iterdir()] == [f"{job.scope.stream_batch}.json"]

    (config,) = (Path(job.run_dir).parent / ".archives" / job.job).glob("*-batch.json")
    told = json.loads(config.read_text())
    told["config"]["republish"] = {"src": ">", "dest": "tmq.v1.rpc.admin.users.create"}
    config.write_text(json.dumps(told))
    for _ in range(2):
        with pytest.raises(StorageError, match=r"archived: .* differs from what was written"):
            await Pool(stack.broker).archive_run("kept", undo=True)
    (away,) = await stack.jobs.list_archived(job.user)
    assert (away.removal, away.archived is not None) == ("no", True)
    assert job.scope.stream_batch not in await _traces(stack.broker, job)


async def test_streams_come_back_as_they_are_made_whatever_their_archive_says(
    stack: Stack, tmp_path: Path
) -> None:
    job = await _ended(stack, await stack.running(name="kept"))
    configs = kept_streams(job)
    await save_streams(stack.broker, [one["name"] for one in configs], tmp_path / "away")
    for file in (tmp_path / "away").glob("*.json"):
        told = json.loads(file.read_text())
        told["config"]["republish"] = {"src": ">", "dest": "tmq.v1.rpc.admin.users.create"}
        told["config"]["subjects"] = [f"_INBOX_admin.{file.stem}"]
        file.write_text(json.dumps(told))
    for config in configs:
        await delete_stream(stack.broker, config["name"])
    await restore_streams(stack.broker, configs, tmp_path / "away")
    for config in configs[:-1]:  # no checkpoints were in the broker
        info = await stream_info(stack.broker, config["name"])
        assert info["config"]["subjects"] == config["subjects"]
        assert info["config"].get("republish", {}).get("dest") == config.get("republish", {}).get(
            "dest"
        )
    assert await RolloutLog(stack.broker, job.scope).contains(1)
