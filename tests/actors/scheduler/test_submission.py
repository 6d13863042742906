"""What a client may submit, and what it is told when it may not."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.learner.start import starting_point
from tinkermq.actors.scheduler.jobs.states import slots_of
from tinkermq.actors.scheduler.submission.origins import changed_config
from tinkermq.actors.storage.cache import fetch_model, with_checkpoints_here
from tinkermq.actors.storage.checkpoints import CheckpointMirror, free_copies, free_stored
from tinkermq.actors.storage.files import write_digests
from tinkermq.actors.storage.stores import BrokerStore, Stores
from tinkermq.actors.storage.tinker_checkpoints import (
    TINKER_FOLDER,
    CheckpointFolders,
    StoredCheckpoint,
)
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.schemas.checks import CheckReply
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import (
    ConfigureRequest,
    JobRecord,
    JobRequest,
    ListRequest,
    ResumeRequest,
    ScaleRequest,
    StopRequest,
)
from tinkermq.schemas.tinker.names import CheckpointName
from tinkermq.schemas.tinker.operation import ModelInfo
from tinkermq.schemas.wire.errors import (
    ConfigError,
    ModelError,
    NotFoundError,
    PlacementError,
    StateError,
    StorageError,
)

from tests.actors.scheduler.conftest import Stack
from tests.support.hollow_model import make_hollow
from tests.support.s3 import environment
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full


async def test_the_same_request_makes_one_job_however_often_it_comes(stack: Stack) -> None:
    await stack.scheduler()
    request = stack.request(request_id="again")
    records = await asyncio.gather(*(stack.ask("submit", request) for _ in range(4)))
    assert len({record.job for record in records}) == 1
    assert len(await stack.jobs.list_jobs()) == 1


async def test_a_job_gets_a_readable_name_a_first_event_and_a_run_folder(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit(generator={"count": 2})
    assert job.name.startswith("bandit-tiny-")
    assert job.run_dir == str(stack.folder / "outputs" / job.name)
    assert Path(job.run_dir).is_dir()  # noqa: ASYNC240  a local folder, in a test
    assert [actor.name for actor in job.actors] == ["learner", "generator-0", "generator-1"]
    assert parse_config(job.config).name == job.name
    assert [(event.kind, event.source) for event in job.untold] == [("job_queued", "user local")]
    assert (await stack.ask("get", JobRequest(job=job.name))).job == job.job


async def test_a_wrong_key_comes_back_to_the_client_and_makes_no_job(stack: Stack) -> None:
    await stack.scheduler()
    with pytest.raises(ConfigError, match=r"learner\.lrr(.|\n)*did you mean learner\.lr"):
        await stack.submit(learner={"lrr": 1})
    with pytest.raises(ConfigError, match=r"learner\.lrr"):
        await stack.submit(learner={"lrr": 1}, configured=False)
    with pytest.raises(ConfigError, match=r"lr=-1"):
        await stack.submit(learner={"lr": -1})
    assert await stack.jobs.list_jobs() == []


async def test_a_job_that_no_pool_of_this_size_can_hold_is_refused(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node(slots=2)
    await stack.until_nodes(1)
    with pytest.raises(PlacementError, match="needs 5 slots"):
        await stack.submit(generator={"count": 4})
    job = await stack.submit()
    with pytest.raises(PlacementError, match="needs 4 slots"):
        await stack.ask("scale", ScaleRequest(job=job.job, role="generator", count=3))
    assert len(await stack.jobs.list_jobs()) == 1


async def test_a_name_is_given_once(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit(name="mine")
    with pytest.raises(StateError, match=r"named 'mine' exists already(.|\n)*resume mine"):
        await stack.submit(name="mine")
    await stack.ask("stop", StopRequest(job="mine"))
    await stack.until(job, "CANCELLED")
    await create_job_streams(stack.broker, job.scope, LimitsConfig())
    await stack.jobs.update(job, lambda now: now.model_copy(update={"started": 1.0}))
    await stack.broker.append(
        job.scope.batch, b"of its first step", deadline_s=PATIENCE_S, waiting_for="the log"
    )
    with pytest.raises(StateError, match="named 'mine'"):
        await stack.submit(name="mine")


async def test_a_run_that_never_began_a_step_frees_its_name_and_stays_visible(stack: Stack) -> None:
    await stack.scheduler()
    first = await stack.submit(name="mine")
    await stack.ask("stop", StopRequest(job="mine"))
    await stack.until(first, "CANCELLED")
    second = await stack.submit(name="mine")
    assert (second.name, second.run_dir) == ("mine", f"{first.run_dir}-2")
    old = await stack.ask("get", JobRequest(job=first.job))
    assert (old.name, old.state, old.run_dir) == ("mine-cancelled-1", "CANCELLED", first.run_dir)
    assert (await stack.ask("get", JobRequest(job="mine"))).job == second.job
    await stack.ask("stop", StopRequest(job="mine"))
    await stack.until(second, "CANCELLED")
    request = stack.request(name="mine", request_id="third")
    third, again = [await stack.ask("submit", request) for _ in range(2)]
    assert third.job == again.job
    assert third.run_dir == f"{first.run_dir}-3"
    names = sorted(record.name for record in await stack.jobs.list_jobs())
    assert names == ["mine", "mine-cancelled-1", "mine-cancelled-2"]
    resumed = await stack.ask("resume", ResumeRequest(job="mine-cancelled-1"))
    assert (resumed.name, resumed.state) == ("mine-cancelled-1", "QUEUED")


async def test_a_folder_that_holds_another_run_is_never_written_over(stack: Stack) -> None:
    await stack.scheduler()
    folder = stack.folder / "outputs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}")
    with pytest.raises(StateError, match=r"holds another run\n +choose another name, or move"):
        await stack.submit(name="mine")


async def test_an_output_folder_that_cannot_be_made_is_told(stack: Stack) -> None:
    await stack.scheduler()
    (stack.folder / "file").write_text("")
    with pytest.raises(StorageError, match="cannot create the run folder"):
        await stack.submit(output_dir=str(stack.folder / "file"))


async def test_users_do_not_see_each_other(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit(name="mine")
    with pytest.raises(NotFoundError, match="user 'eve' has no run 'mine'"):
        await stack.ask("get", JobRequest(job="mine"), user="eve")
    with pytest.raises(NotFoundError):
        await stack.ask("stop", StopRequest(job=job.job), user="eve")


async def test_a_job_may_be_configured_after_it_was_submitted(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit(configured=False)
    assert (job.state, job.configured, job.actors) == ("QUEUED", False, [])
    half = ConfigureRequest(job=job.job, config={"learner": {"lr": 1e-3}})
    assert not (await stack.ask("configure", half)).configured
    with pytest.raises(ConfigError, match="batchsize"):
        await stack.ask(
            "configure", ConfigureRequest(job=job.job, config={"training": {"batchsize": 3}})
        )
    rest = ConfigureRequest(
        job=job.job, config={"name": "mine", "training": {"batch_size": 3}}, start=True
    )
    started = await stack.ask("configure", rest)
    config = parse_config(started.config)
    assert (started.name, config.learner.lr, config.training.batch_size) == ("mine", 1e-3, 3)
    assert (await stack.ask("configure", rest)).job == job.job
    with pytest.raises(StateError, match="has its configuration already"):
        await stack.ask("configure", half.model_copy(update={"config": {"seed": 5}}))


async def test_an_incomplete_configuration_does_not_start(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit(configured=False, model={})
    with pytest.raises(ConfigError, match=r"model\.path is missing"):
        await stack.ask("configure", ConfigureRequest(job=job.job, config={}, start=True))


async def test_a_fork_names_a_checkpoint_that_is_there(stack: Stack) -> None:
    await stack.scheduler()
    origin = await stack.submit(name="origin")
    with pytest.raises(NotFoundError, match="'origin' has no checkpoint yet"):
        await stack.submit(fork_of="origin@last")
    with pytest.raises(NotFoundError, match="'origin' has no checkpoint of step 40"):
        await stack.submit(fork_of="origin@40")
    folder = Path(origin.run_dir) / "checkpoints" / "step_000040"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(NotFoundError, match="no checkpoint of step 20") as caught:
        await stack.submit(fork_of="origin@20")
    assert "it has those of steps 40" in (caught.value.hint or "")
    fork = await stack.submit(fork_of=f"{origin.job}@40")
    assert fork.fork_of == (await stack.submit(fork_of="origin@last")).fork_of == "origin@40"
    shutil.rmtree(folder)  # the other run rotates its checkpoints: the fork keeps what it needs
    assert (Path(fork.fork_dir) / "config.json").read_text() == "{}"
    assert Path(fork.fork_dir).is_relative_to(fork.run_dir)
    with pytest.raises(ConfigError, match="does not name a checkpoint"):
        await stack.submit(fork_of="origin")


async def test_a_fork_of_a_run_whose_checkpoints_are_in_the_broker_has_a_copy_of_its_own(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.scheduler()
    origin = await stack.submit(name="origin", storage={"url": "broker:"})
    with pytest.raises(NotFoundError, match="'origin' has no checkpoint yet"):
        await stack.submit(fork_of="origin@last")
    limits = LimitsConfig(checkpoint_bytes=16 << 20)
    await create_job_streams(stack.broker, origin.scope, limits, checkpoints=True)
    await stack.jobs.update(origin, lambda now: now.model_copy(update={"has_streams": True}))
    store = BrokerStore(stack.broker, origin.scope)
    mirror = CheckpointMirror(store, keep_last=2, keep_every=0)
    made = tmp_path / "made"
    (made / "learner").mkdir(parents=True)
    (made / "learner" / "state.json").write_text("{}")
    (made / "config.json").write_text("40")
    write_digests(made)
    await asyncio.to_thread(mirror.upload, 40, made)

    async def missing() -> NotFoundError | None:
        with pytest.raises(NotFoundError) as told:
            await stack.submit(fork_of="origin@7")
        return told.value if told.value.hint.startswith("it has") else None

    told = await eventually(missing, "the scheduler to have seen the streams")
    assert "of step 7" in told.message
    assert told.hint == "it has those of steps 40"
    fork = await stack.submit(fork_of="origin@last")
    own = f"broker:runs/local/{fork.job}/fork"
    assert (fork.fork_of, fork.fork_dir) == ("origin@40", own)
    await delete_job_streams(stack.broker, origin.scope)  # the copy is the fork's own
    stores = Stores(stack.broker, fork.scope)
    with environment({"TINKERMQ_CACHE": str(tmp_path / "cache")}):
        here = await asyncio.to_thread(with_checkpoints_here, fork, stores)
        only = await asyncio.to_thread(with_checkpoints_here, fork, stores, weights_only=True)
    assert (Path(here.fork_dir) / "config.json").read_text() == "40"
    assert (Path(here.fork_dir) / "learner" / "state.json").exists()
    assert (Path(only.fork_dir) / "config.json").read_text() == "40"
    assert not (Path(only.fork_dir) / "learner").exists()
    with pytest.raises(StorageError, match="belongs to another run"):
        stores.open(f"broker:runs/local/{origin.job}/fork")
    await asyncio.to_thread(free_copies, fork, Stores(stack.broker))
    with pytest.raises(NotFoundError):
        await stream_info(stack.broker, f"OBJ_{fork.scope.object_checkpoints}")


async def test_a_fork_of_a_run_with_a_store_keeps_a_copy_there(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.scheduler()
    url = f"file://{tmp_path}/store"
    origin = await stack.submit(name="origin", storage={"url": url})
    with pytest.raises(NotFoundError, match=r"'origin' has no checkpoint yet \(file://"):
        await stack.submit(fork_of="origin@last")
    mirror = CheckpointMirror.of_run(url, origin.scope, keep_last=2, keep_every=0)
    for step in (9, 40):
        made = tmp_path / "made" / str(step)
        (made / "learner").mkdir(parents=True)
        (made / "learner" / "state.json").write_text("{}")
        (made / "config.json").write_text(str(step))
        write_digests(made)
        mirror.upload(step, made)
    with pytest.raises(NotFoundError, match="of step 7") as missing:
        await stack.submit(fork_of="origin@7")
    assert missing.value.hint == "it has those of steps 9, 40"
    fork = await stack.submit(fork_of="origin@last")
    assert (fork.fork_of, fork.fork_dir) == ("origin@40", f"{url}/runs/local/{fork.job}/fork")
    begun = await stack.submit(fork_of="origin@9", weights_only=True)
    assert begun.config["model"]["path"] == f"{url}/runs/local/{begun.job}/fork"
    shutil.rmtree(tmp_path / "store" / "runs" / "local" / origin.job)
    with environment({"TINKERMQ_CACHE": str(tmp_path / "cache")}):
        here = with_checkpoints_here(fork, Stores(stack.broker))
        model = fetch_model(begun.config["model"]["path"])
    assert starting_point(CheckpointStore(tmp_path, keep_last=1, keep_every=0), here.fork_dir)
    assert (Path(here.fork_dir) / "config.json").read_text() == "40"
    assert (Path(model) / "config.json").read_text() == "9"
    assert not (Path(model) / "learner").exists()
    free_stored(begun)
    assert not [path for path in (tmp_path / "store").rglob(f"{begun.job}/*") if path.is_file()]


async def test_a_fork_of_a_run_whose_store_cannot_be_reached_or_read_is_told(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.scheduler()
    (tmp_path / "file").write_text("")
    await stack.submit(name="away", storage={"url": "s3://nobody/here"})
    await stack.submit(name="wrong", storage={"url": f"file://{tmp_path}/file/below"})
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with environment({"AWS_ENDPOINT": "http://127.0.0.1:1", **keys}):
        with pytest.raises(StorageError, match=r"s3://nobody/here.*could not list") as away:
            await stack.submit(fork_of="away@last")
        assert "check that the pool's machines reach the store" in away.value.hint
    with pytest.raises(StorageError, match=r"file/below"):
        await stack.submit(fork_of="wrong@last")


async def test_a_job_may_begin_with_the_weights_of_another_run(stack: Stack) -> None:
    await stack.scheduler()
    origin = await stack.submit(name="origin")
    with pytest.raises(ConfigError, match="weights_only is for a run that starts from"):
        await stack.submit(weights_only=True)
    for step in (9, 40):
        folder = Path(origin.run_dir) / "checkpoints" / f"step_{step:06d}"
        (folder / "learner").mkdir(parents=True)
        (folder / "config.json").write_text(str(step))
    record = await stack.submit(fork_of="origin@last", weights_only=True)
    assert record.fork_of == "origin@40"
    assert record.fork_dir == ""  # it goes on from nothing: steps and optimiser are its own
    kept = Path(record.config["model"]["path"])
    assert kept.parent == Path(record.run_dir)
    assert not (kept / "learner").exists()
    assert (kept / "config.json").read_text() == "40"
    with pytest.raises(ConfigError, match="an SFT run was submitted without data"):
        await stack.submit(kind="sft")
    sft = await stack.submit(sft={"data": ["chats.jsonl"]})
    assert (sft.kind, slots_of(sft.actors)) == ("sft", 1)


async def test_a_job_may_begin_with_an_adapter_of_a_program_written_for_tinker(
    stack: Stack,
) -> None:
    """Whose it is stands in its place in the run folder of the service, which is an admin's."""
    await stack.scheduler()
    service = await stack.submit(kind="tinker", env={"game": ""}, tinker={"base": "org/base"})
    name = CheckpointName.parse("tinker://s1:train:0/weights/end")
    folders = CheckpointFolders(Path(service.run_dir) / TINKER_FOLDER)
    stored = StoredCheckpoint(
        user="ada",
        name=name,
        place=folders.place_of("ada", name),
        info=ModelInfo(model="s1:train:0", base="org/base", folder="/base", arch="qwen3", rank=4),
        seq=3,
        time=time.time(),
    )
    stored.folder.mkdir(parents=True)
    (stored.folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/base"}')
    folders.commit(stored)

    async def begin(user: str, **changes: Any) -> JobRecord:
        return await stack.ask("submit", stack.request(fork_of=str(name), **changes), user)

    record = await begin("ada")
    assert (record.fork_of, record.weights_only, record.fork_dir) == (str(name), True, "")
    kept = Path(record.config["model"]["path"]) / "adapter_config.json"
    assert kept.parent.parent == Path(record.run_dir)
    assert kept.stat().st_nlink == 1  # a copy: nothing of the job's is in the admin's folder
    with pytest.raises(NotFoundError, match=f"there is no checkpoint {name}"):
        await begin("bob")
    served = stack.request(kind="infer", adapters=[str(name)], request_id="served")
    assert list((await stack.ask("submit", served, "ada")).adapters) == [str(name)]
    folders.commit(replace(stored, is_public=True))
    assert (await begin("bob", request_id="now")).fork_of == str(name)
    folders.remove(stored, "deleted")
    with pytest.raises(NotFoundError, match="was deleted"):
        await begin("ada", request_id="later")


async def test_what_a_state_does_not_allow_is_refused(stack: Stack) -> None:
    await stack.scheduler()
    job = await stack.submit()
    with pytest.raises(StateError, match="is QUEUED; only a RUNNING run can be paused"):
        await stack.ask("pause", JobRequest(job=job.job))
    await stack.ask("stop", StopRequest(job=job.job))
    await stack.until(job, "CANCELLED")
    with pytest.raises(StateError, match="has no actors to scale"):
        await stack.ask("scale", ScaleRequest(job=job.job, role="generator", count=1))


async def test_the_list_holds_ended_jobs_only_when_asked(stack: Stack) -> None:
    await stack.scheduler()
    first = await stack.submit()
    await stack.ask("stop", StopRequest(job=first.job))
    await stack.until(first, "CANCELLED")
    second = await stack.submit()
    assert [job.job for job in await stack.list_jobs(ListRequest())] == [second.job]
    both = await stack.list_jobs(ListRequest(all=True))
    assert [job.job for job in both] == [second.job, first.job]


async def test_an_inference_job_has_servers_and_no_learner(stack: Stack) -> None:
    await stack.scheduler()
    request = stack.request(generator={"count": 2}).model_copy(update={"kind": "infer"})
    job = await stack.ask("submit", request)
    assert [actor.name for actor in job.actors][:2] == ["server-0", "server-1"]
    assert {actor.role for actor in job.actors} <= {"server", "environment"}
    with pytest.raises(StateError, match="needs a server"):
        await stack.ask("scale", ScaleRequest(job=job.job, role="server", count=0))
    none = stack.request(generator={"count": 0}).model_copy(update={"kind": "infer"})
    with pytest.raises(ConfigError, match="without a server"):
        await stack.ask("submit", none)


async def test_only_inference_jobs_follow_and_only_live_runs_are_followed(stack: Stack) -> None:
    await stack.scheduler()
    run = await stack.submit()
    infer = {"kind": "infer", "follow": run.name}
    job = await stack.ask("submit", stack.request().model_copy(update=infer))
    assert (job.follow, job.serves) == (run.job, run.name)
    with pytest.raises(ConfigError, match="for inference runs"):
        await stack.ask("submit", stack.request().model_copy(update={"follow": run.name}))
    chained = stack.request().model_copy(update={"kind": "infer", "follow": job.name})
    with pytest.raises(StateError, match="has no new versions"):
        await stack.ask("submit", chained)


async def test_only_an_inference_job_of_the_user_judges(stack: Stack) -> None:
    await stack.scheduler()
    run = await stack.submit()
    infer = await stack.ask("submit", stack.request().model_copy(update={"kind": "infer"}))

    def judged_by(name: str, user: str = "local") -> Awaitable[JobRecord]:
        reward = {"source": "judge", "judge": name}
        env = {"game": "bandit", "hosts": 0, "num_val": 0, "reward": reward}
        return stack.ask("submit", stack.request(env=env), user)

    assert (await judged_by(infer.name)).judge == infer.job
    with pytest.raises(ConfigError, match="which answers no requests"):
        await judged_by(run.name)
    for name, user in (("nobody", "local"), (infer.name, "ada")):
        with pytest.raises(NotFoundError, match=name):
            await judged_by(name, user)


async def test_sequences_longer_than_a_models_positions_are_refused_where_its_config_is_known(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.scheduler()
    model = {"path": str(make_hollow(tmp_path / "short"))}
    (tmp_path / "short" / "config.json").write_text('{"max_position_embeddings": 512}')
    lengths = {"max_prompt_tokens": 500, "max_response_tokens": 12, "max_turn_tokens": 12}
    longer = {"max_context": 513}
    told = "of up to 513 tokens are asked for, model .*short has positions for 512"
    with pytest.raises(ModelError, match=told) as refused:
        await stack.submit(model=model, rollout=lengths, generator=longer)
    assert "generator.max_context" in refused.value.hint
    assert await stack.jobs.list_jobs() == []
    request = stack.request(model=model, rollout=lengths, generator=longer)
    reply = await stack.ask_for("try", request, CheckReply)
    [finding] = [item for item in reply.results if item.name == "model"]
    assert (finding.ok, finding.by) == (False, "scheduler")
    assert "positions for 512" in finding.detail
    assert (await stack.submit(model=model, rollout=lengths)).state == "QUEUED"
    far = {"path": str(tmp_path / "elsewhere")}
    assert (await stack.submit(model=far, rollout=lengths, generator=longer)).state == "QUEUED"


async def test_a_model_that_no_node_can_have_is_refused_before_the_job_is_queued(
    stack: Stack, tmp_path: Path
) -> None:
    await stack.scheduler()
    missing = {"path": str(tmp_path / "nowhere")}
    waits = await stack.submit(model=missing)  # no node is there that could be asked
    assert waits.state == "QUEUED"
    await stack.node("n1")
    await stack.node("n2")
    await stack.until(waits, "RUNNING")
    with pytest.raises(ModelError, match=r"node n\d, n\d: there is no model folder .*nowhere"):
        await stack.submit(model=missing)
    with pytest.raises(ModelError, match="offline mode"):
        await stack.submit(model={"path": "nowhere/model"})
    assert [one.job for one in await stack.list_jobs(ListRequest())] == [waits.job]


@pytest.mark.parametrize(("steps", "is_refused"), [(10, True), (40, False), (80, False)])
def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_made(steps: int, is_refused: bool) -> None:
    config = {"model": {"path": "m"}, "env": {"game": "bandit"}, "training": {"num_steps": 60}}
    record = JobRecord(
        job="j", name="r", user="u", state="COMPLETED", config=config, created=0.0, version=40
    )
    refused = pytest.raises(ConfigError, match="=10 is less than the 40 steps that run r has made")
    with refused if is_refused else contextlib.nullcontext():
        changed_config(record, {"training": {"num_steps": steps}})
