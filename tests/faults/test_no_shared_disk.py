"""Jobs of machines that share no disk: checkpoints and the model are in a store."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.storage.checkpoints import CheckpointMirror
from tinkermq.actors.storage.stores import UrlStore
from tinkermq.broker.jetstream.objects import ObjectStore

from tests.support.configs import small_job
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.namespaces import Network
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.s3 import S3, environment, s3_server
from tests.support.stack import Stack

pytestmark = [
    pytest.mark.faults,
    pytest.mark.full,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="machines apart need root"
    ),
]


SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.2}, "num_val": 0}
"""So that each checkpoint is uploaded; one that a newer one overtakes is not."""


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    with s3_server(tmp_path) as server:
        cache = {"TINKERMQ_CACHE": str(tmp_path / "machine" / "cache")}
        with environment({**server.environment, **cache}):
            (tmp_path / "machine").mkdir()
            yield server


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


def put_model(s3: S3, model: Path) -> None:
    store = UrlStore(s3.url("models/tiny"))
    for file in model.iterdir():
        store.put(file.name, file)


def names_below(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


async def submit(
    stack: Stack, s3: S3, model: Path, env: dict[str, Any] | None = None, **training: Any
) -> Job:
    put_model(s3, model)
    config = small_job(
        model,
        env=env or SLOW,
        training=training,
        storage={"url": s3.url("lab")},
    )
    config["model"] = {"path": s3.url("models/tiny")}
    return await stack.submit({**config, "output_dir": str(stack.folder / "machine")})


async def test_a_job_whose_node_vanished_goes_on_where_no_path_is_in_common(
    tmp_path: Path, model: Path, s3: S3, gate: Gate
) -> None:
    async with Stack(tmp_path, apart=tmp_path / "machine") as stack:
        job = await submit(stack, s3, model, gate.env(6), num_steps=18)
        await job.until_event("checkpoint_uploaded", count=2)
        stack.kill("node")
        stack.start("node", "other")
        gate.open()
        again = await job.until_event("training_started", count=2)
        assert int(again.data["step"]) >= 6
        await job.until("COMPLETED")
        run = job.run_dir
        inside = run.relative_to(tmp_path / "machine")
        there = {
            name: names_below(tmp_path / f"disk-{name}" / inside / "checkpoints", "step_*")
            for name in ("node", "other")
        }
        assert there["other"] == ["step_000015", "step_000018"]
        assert "step_000018" not in there["node"]
        assert names_below(run, "checkpoints") == []
        mirror = CheckpointMirror.of_run(s3.url("lab"), job.scope, keep_last=2, keep_every=0)
        kept = [one.step for one in mirror.whole()]
        assert (len(kept), kept[-1]) == (2, 18)
        assert mirror.fetch_newest(run / "checkpoints") == []
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)
        for name in there:
            assert len(names_below(tmp_path / f"disk-{name}" / "cache", "*.held")) == 1


@pytest.mark.long
async def test_a_checkpoint_in_the_store_is_forked_and_served_by_a_node_that_never_saw_it(
    tmp_path: Path, model: Path, s3: S3
) -> None:
    async with Stack(tmp_path, apart=tmp_path / "machine") as stack:
        job = await submit(stack, s3, model, num_steps=6)
        await job.until("COMPLETED")
        stack.kill("node")
        stack.start("node", "other")
        longer = {**job.record.config, "training": {**job.record.config["training"]}}
        longer["training"]["num_steps"] = 9
        longer.pop("name", None)
        fork = await stack.submit(longer, fork_of=f"{job.record.name}@last")
        started = await fork.until_event("training_started")
        assert int(started.data["step"]) == 6
        await fork.until("COMPLETED")
        mirror = CheckpointMirror.of_run(s3.url("lab"), fork.scope, keep_last=2, keep_every=0)
        assert [one.step for one in mirror.whole()][-1] == 9
        served = await stack.submit(longer, fork_of=f"{job.record.name}@3", kind="infer")
        ready = await served.until_event("server_ready")
        assert ready.data["model"] == f"{job.record.name}@3"


async def test_without_any_store_the_broker_keeps_the_checkpoints_of_a_machine_that_dies(
    tmp_path: Path, model: Path, network: Network, gate: Gate
) -> None:
    for name in ("node", "other"):  # each machine has the model, and no path leads to the other's
        shutil.copytree(model, tmp_path / f"disk-{name}" / "model")
    apart = tmp_path / "machine"
    apart.mkdir()
    async with Stack(tmp_path, apart=apart, network=network) as stack:
        config = small_job(
            apart / "model",
            env=gate.env(6),
            training={"num_steps": 18},
            storage={"url": "broker:"},
            limits={"checkpoint_bytes": 64 << 20},
        )
        job = await stack.submit({**config, "output_dir": str(apart)})
        await job.until_event("checkpoint_uploaded", count=2)
        network.cut("node")
        stack.kill("node")
        stack.start("node", "other")
        gate.open()
        again = await job.until_event("training_started", count=2)
        assert int(again.data["step"]) >= 6
        await job.until("COMPLETED")
        inside = job.run_dir.relative_to(apart) / "checkpoints"
        there = names_below(tmp_path / "disk-other" / inside, "step_*")
        assert there == ["step_000015", "step_000018"]
        store = ObjectStore(stack.broker, job.scope.object_checkpoints)
        kept = {name.partition("-")[0] for name in await store.names()}
        assert (len(kept), kept & {".job", "step_000018"}) == (3, {".job", "step_000018"})
        shutil.copytree(tmp_path / "disk-other" / inside, job.run_dir / "checkpoints")
        shutil.copytree(model, apart / "model")  # the replay is here
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)


async def test_an_adapter_in_the_store_goes_on_and_is_served_with_its_base_from_there(
    tmp_path: Path, model: Path, s3: S3, gate: Gate
) -> None:
    put_model(s3, model)
    config = small_job(
        model,
        env=gate.env(3),
        training={"num_steps": 9},
        storage={"url": s3.url("lab")},
        lora={"rank": 4},
    )
    config["model"] = {"path": s3.url("models/tiny")}
    config["output_dir"] = str(tmp_path / "machine")
    async with Stack(tmp_path, apart=tmp_path / "machine") as stack:
        job = await stack.submit(config)
        await job.until_event("checkpoint_uploaded")
        stack.kill("node")
        stack.start("node", "other")
        gate.open()
        again = await job.until_event("training_started", count=2)
        assert int(again.data["step"]) >= 3
        await job.until("COMPLETED")
        stack.kill("other")
        stack.start("node", "third")
        served = await stack.submit(config, fork_of=f"{job.record.name}@9", kind="infer")
        ready = await served.until_event("server_ready")
        assert ready.data["model"] == f"{job.record.name}@9"


async def test_a_node_that_sees_another_tokenizer_under_the_models_path_fails_the_job(
    tmp_path: Path, model: Path
) -> None:
    for name in ("node", "other"):
        shutil.copytree(model, tmp_path / f"disk-{name}" / "model")
    with (tmp_path / "disk-other" / "model" / "tokenizer.json").open("a") as file:
        file.write(" ")
    apart = tmp_path / "machine"
    apart.mkdir()
    async with Stack(tmp_path, slots=1, apart=apart) as stack:
        stack.start("node", "other")
        await stack.until_nodes(2)
        job = await stack.submit({**small_job(apart / "model"), "output_dir": str(apart)})
        ended = await job.until("FAILED")
        assert f"sees another {apart}/model/tokenizer.json than" in ended.reason


async def test_while_the_store_refuses_the_log_is_kept_and_then_all_comes_there(
    tmp_path: Path, model: Path, s3: S3, gate: Gate
) -> None:
    async with Stack(tmp_path, apart=tmp_path / "machine") as stack:
        s3.faults.set("507", method="PUT", only="step_")
        job = await submit(
            stack, s3, model, gate.env(3), num_steps=18, keep_rollouts=False, keep_last=1
        )
        failed = await job.until_event("checkpoint_upload_failed")
        assert "could not write step_000003" in failed.message
        gate.let(9)
        await job.until_step(9)
        assert await job.rollout_log.first_seq() == 1
        s3.faults.set("", 0)
        gate.let(13)
        await job.until_event("checkpoint_uploaded")

        async def trimmed() -> bool:
            return await job.rollout_log.first_seq() > 1

        await job.eventually(trimmed, "the log to be trimmed")
        gate.open()
        ended = await job.until("COMPLETED")
        assert (ended.attempt, ended.losses) == (1, 0)


async def test_a_store_that_refuses_the_key_fails_the_job_before_it_trains(
    tmp_path: Path, model: Path, s3: S3
) -> None:
    async with Stack(tmp_path, apart=tmp_path / "machine") as stack:
        s3.faults.set("403", method="PUT", only=".job")
        job = await submit(stack, s3, model)
        ended = await job.until("FAILED")
        assert "refuses to write .job" in ended.reason
        assert "AWS_ACCESS_KEY_ID" in ended.reason
