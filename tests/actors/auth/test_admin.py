"""What an admin may do with the jobs of others, and how everybody else fares who tries."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.storage.access import ROOTS_VARIABLE
from tinkermq.broker.calls import ask_users
from tinkermq.broker.client.login import AS_VARIABLE
from tinkermq.clients import AsyncPoolUsers
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import JobRecord, StopRequest
from tinkermq.schemas.user import AuditList, AuditRequest
from tinkermq.schemas.wire.errors import (
    BrokerError,
    ConfigError,
    NotFoundError,
    TinkermqError,
)

from tests.actors.auth.submitting import submitted
from tests.support.secured import SecuredPool, environment
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_admin_sees_and_stops_the_job_of_another(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    job = await submitted(scheduled, "ada", tmp_path)
    with environment(**{AS_VARIABLE: "ada"}):
        as_ada = Pool(await scheduled.connected(scheduled.admin_key))
    assert [one.job for one in await as_ada.list_jobs()] == [job.job]
    await as_ada.stop(job.job)
    ada = Pool(await scheduled.user("ada"))

    async def cancelled() -> bool:
        return (await ada.find(job.job)).state == "CANCELLED"

    await eventually(cancelled, "the job to be cancelled")


@pytest.mark.parametrize("reply", ["", "_INBOX_ada.x.1", "_INBOX_mallory.x.1"])
async def test_whoever_is_to_have_the_answer_the_admin_who_asked_is_named(
    scheduled: SecuredPool, tmp_path: Path, reply: str
) -> None:
    job = await submitted(scheduled, "ada", tmp_path)
    with environment(**{AS_VARIABLE: "ada"}):
        as_ada = await scheduled.connected(scheduled.admin_key)
    request = StopRequest(job=job.job, now=True).to_bytes()
    await as_ada.nc.publish(as_ada.rpc("scheduler", "stop"), request, reply=reply)
    ada, root = Pool(await scheduled.user("ada")), await scheduled.user("root")

    async def cancelled() -> JobRecord | None:
        now = await ada.find(job.job)
        return now if now.state == "CANCELLED" else None

    assert (
        await eventually(cancelled, "the job to be cancelled")
    ).stopped_by == "user root for ada"

    async def written() -> bool:
        told = (await ask_users(root, "audit", AuditRequest(limit=100), AuditList)).records
        return ("root", "jobs.stop", f"ada/{job.name}") in [
            (one.who, one.what, one.target) for one in told
        ]

    await eventually(written, "the audit to name the admin")


async def test_nobody_else_sees_or_stops_it(scheduled: SecuredPool, tmp_path: Path) -> None:
    job = await submitted(scheduled, "ada", tmp_path)
    await scheduled.user("mallory")
    with environment(**{AS_VARIABLE: "ada"}):
        pretending = Pool(await scheduled.connected(scheduled.keys["mallory"]))
    for attempt in (pretending.list_jobs(), pretending.stop(job.job, now=True)):
        with pytest.raises(BrokerError, match="may not publish"):
            await attempt
    honest = Pool(await scheduled.user("mallory"))
    with pytest.raises(NotFoundError):
        await honest.stop(job.job, now=True)
    assert (await Pool(await scheduled.user("ada")).find(job.job)).state == "QUEUED"


async def test_equal_names_of_two_users_have_folders_of_their_own(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    first = await submitted(scheduled, "ada", tmp_path, name="mine")
    second = await submitted(scheduled, "mallory", tmp_path, name="mine")
    assert Path(first.run_dir) == tmp_path / "ada" / "mine"
    assert Path(second.run_dir) == tmp_path / "mallory" / "mine"


async def test_an_admin_is_told_of_all_jobs_and_stops_one_by_its_id(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    jobs = [await submitted(scheduled, user, tmp_path) for user in ("ada", "mallory")]
    root, ada = Pool(await scheduled.user("root")), Pool(await scheduled.user("ada"))
    told = {one.job: one for one in await root.all_jobs(widest=True)}
    assert told.keys() >= {one.job for one in jobs}
    own = await ada.all_jobs(widest=True)
    assert {one.user for one in own} == {"ada"}
    hers = next(one for one in jobs if one.user == "ada")
    stopped = await root.stop(hers.job)
    assert stopped.stopped_by == "user root"

    async def cancelled() -> JobRecord | None:
        now = await ada.find(hers.job)
        return now if now.state == "CANCELLED" else None

    ended = await eventually(cancelled, "the job to be cancelled")
    assert [(event.kind, event.source) for event in ended.untold] == [
        ("job_queued", "user ada"),
        ("job_cancelled", "user root"),
    ]


@pytest.mark.parametrize("key", ["model.path", "env.train_data", "weights.folder", "output_dir"])
@pytest.mark.parametrize("of", ["the run", "all her runs"])
async def test_a_job_cannot_name_the_files_of_anothers_run(
    scheduled: SecuredPool, tmp_path: Path, key: str, of: str
) -> None:
    hers = await submitted(
        scheduled, "ada", tmp_path, name=f"run-{key.replace('.', '-')}-{len(of)}"
    )
    folder = Path(hers.run_dir) if of == "the run" else Path(hers.run_dir).parent / "x" / ".."
    path = str(folder / "checkpoints")
    section, _, name = key.rpartition(".")
    value: Any = [path] if name.endswith("data") else path
    below = {"env": {"game": "addition", "hosts": 0, "num_val": 0}, "weights": {}}.get(section, {})
    changes = {section: {**below, name: value}} if section else {name: value}
    if section == "weights":
        changes["weights"]["transport"] = "file"
    with pytest.raises(ConfigError, match=rf"{key}=.* is in a run folder of another user"):
        await submitted(scheduled, "mallory", tmp_path, **changes)


@pytest.mark.parametrize("key", ["output_dir", "weights.folder"])
async def test_a_job_writes_only_below_the_folders_that_the_operator_allows(
    scheduled: SecuredPool, tmp_path: Path, key: str
) -> None:
    outside, link = tmp_path.parent / f"outside-{key}", tmp_path / "link"
    outside.mkdir()
    link.symlink_to(outside)
    section, _, name = key.rpartition(".")
    with environment(**{ROOTS_VARIABLE: str(tmp_path)}):
        for folder in (outside, link / "x", tmp_path / ".." / outside.name, Path("elsewhere")):
            changes = {section: {"transport": "file", name: str(folder)}} if section else {}
            place = folder if key == "output_dir" else tmp_path
            with pytest.raises(ConfigError, match=rf"{key}=.* outside of .* {tmp_path}") as refused:
                await submitted(scheduled, "ada", place, **changes)
            assert f"leave {key} out" in refused.value.hint
        assert not list(outside.iterdir())
        own = await submitted(scheduled, "ada", tmp_path / "deep" / "er", name=f"mine-{section}")
        assert Path(own.run_dir) == tmp_path / "deep" / "er" / "ada" / own.name
        unnamed = await submitted(scheduled, "ada", None)
        assert Path(unnamed.run_dir) == tmp_path / "ada" / unnamed.name
        admins = await submitted(scheduled, "root", outside)
        assert Path(admins.run_dir) == outside / "root" / admins.name


async def test_a_job_cannot_begin_with_the_weights_of_anothers_run(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    hers = await submitted(scheduled, "ada", tmp_path, name="chats")
    checkpoint = Path(hers.run_dir) / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    own = await submitted(scheduled, "mallory", tmp_path, name="own")
    adapter = Path(own.run_dir) / "checkpoints" / "step_000001"
    adapter.mkdir(parents=True)
    mallory = Pool(await scheduled.user("mallory"))
    for run in (hers.job, hers.name):
        with pytest.raises(NotFoundError, match="has no run"):
            await mallory.submit(hers.config, fork_of=f"{run}@4", weights_only=True)
        with pytest.raises(NotFoundError, match="has no run"):
            await mallory.submit(hers.config, kind="infer", adapters=[f"{run}@4"])
    with pytest.raises(ConfigError, match="does not name a checkpoint"):
        await mallory.submit(hers.config, fork_of=str(checkpoint), weights_only=True)
    settings = {"base_model_name_or_path": str(checkpoint)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="is in a run folder of another user"):
        await mallory.submit(own.config | {"name": None}, fork_of="own@1", weights_only=True)


async def test_code_that_comes_with_a_model_is_for_admins(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    model = {"path": "models/odd", "trust_remote_code": True}
    with pytest.raises(ConfigError, match=r"model.trust_remote_code=true: in a pool with users"):
        await submitted(scheduled, "mallory", tmp_path, model=model)
    assert (await submitted(scheduled, "root", tmp_path, model=model)).state == "QUEUED"


async def test_any_user_may_name_functions_with_ranks_transports_and_trackers(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "algorithm": {"own_loss": "mine:loss"},
        "learner": {"ranks": 2, "slots": 2},
        "weights": {"transport": "nccl"},
        "logger_backends": ["jsonl", "wandb", "mlflow"],
    }
    assert (await submitted(scheduled, "mallory", tmp_path, **settings)).state == "QUEUED"


async def test_an_api_that_generators_ask_is_one_that_the_operator_names(
    scheduled: SecuredPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"teacher": "http://169.254.169.254/v1?model=m"}
    told = r"teacher=http://169.254.169.254/v1: .* do not call this API for user mallory"
    with pytest.raises(ConfigError, match=told):
        await submitted(scheduled, "mallory", tmp_path, algorithm=asked)
    monkeypatch.setenv("TINKERMQ_TEACHER_URLS", "http://169.254.169.254/v1")
    assert (await submitted(scheduled, "mallory", tmp_path, algorithm=asked)).state == "QUEUED"
    longer = {"teacher": "http://169.254.169.254/v1/../admin?model=m"}
    with pytest.raises(ConfigError, match="TINKERMQ_TEACHER_URLS"):
        await submitted(scheduled, "mallory", tmp_path, algorithm=longer)


async def test_a_job_that_teaches_is_one_of_the_users_own_that_serves(
    scheduled: SecuredPool, tmp_path: Path
) -> None:
    hers = await submitted(scheduled, "ada", tmp_path)
    with pytest.raises(NotFoundError, match="has no run"):
        await submitted(scheduled, "mallory", tmp_path, algorithm={"teacher": f"job:{hers.job}"})
    with pytest.raises(ConfigError, match=r"of kind train and QUEUED, which answers no requests"):
        await submitted(scheduled, "ada", tmp_path, algorithm={"teacher": f"job:{hers.name}"})
    with pytest.raises(NotFoundError, match="has no run"):
        await submitted(scheduled, "mallory", tmp_path, algorithm={"teacher": f"{hers.name}@3"})


@pytest.mark.parametrize("path", ["~nobody-here/model", "a/\0/b", "x/" * 2000])
async def test_a_path_that_cannot_be_one_is_not_the_files_of_another(
    scheduled: SecuredPool, tmp_path: Path, path: str
) -> None:
    await submitted(scheduled, "ada", tmp_path)
    job = await submitted(scheduled, "mallory", tmp_path, model={"path": path})
    assert job.config["model"]["path"] == path


async def test_an_admin_serves_the_own_runs_only(scheduled: SecuredPool, tmp_path: Path) -> None:
    hers = await submitted(scheduled, "ada", tmp_path)
    root = Pool(await scheduled.user("root"))
    with pytest.raises(NotFoundError, match="has no run"):
        await root.submit(hers.config, kind="infer", follow=hers.job)


async def test_users_are_managed_from_python(scheduled: SecuredPool) -> None:
    async with AsyncPoolUsers(scheduled.server.url, scheduled.admin_key) as users:
        key = await users.add("grace", slots=2)
        assert "grace" in [one.user for one in await users.list()]
        assert (await users.quota("grace", {"max_slots": 5})).max_slots == 5
        with pytest.raises(ConfigError, match="there is no limit 'max_slot'"):
            await users.quota("grace", {"max_slot": 5})
        assert await users.rotate("grace") != key
        await users.revoke("grace")
    async with AsyncPoolUsers(scheduled.server.url, key) as hers:
        with pytest.raises(TinkermqError):
            await hers.list()
