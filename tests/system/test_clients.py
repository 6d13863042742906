"""Users' ways into a real pool: the command line, the Python clients, dry runs, games on nodes."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tinkermq.broker.feed import read_traces
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.clients import (
    AsyncRun,
    AsyncSchedulerClient,
    AsyncServiceClient,
    GameEnvironment,
    Run,
)
from tinkermq.clients.pool import Pool
from tinkermq.clients.verify import MEANINGS
from tinkermq.schemas.job import JobList, ListRequest
from tinkermq.schemas.wire.errors import (
    ConfigError,
    DataError,
    GameError,
    JobFailedError,
    ModelError,
    NotFoundError,
    PlacementError,
)
from tinkermq.schemas.wire.subjects import JobScope
from tinkermq.schemas.wire.trace import is_traceparent

from tests.clients.command import Outcome, command, tinkermq, tinkermq_here
from tests.clients.test_inference_client import EchoGame
from tests.support.configs import UNHURRIED, small_job
from tests.support.processes import listening_ports
from tests.support.refused_models import CHANGES, save_refused
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


OPENTINKER = {
    "adv_estimator": "grpo",
    "rollout_n": 2,
    "batch_size": 2,
    "val_batch_size": 4,
    "max_prompt_tokens": 32,
    "max_new_tokens": 4,
    "multi_turn": {"max_assistant_turns": 1, "max_user_turns": 0},
    "learning_rate": 1e-3,
}


async def test_the_names_of_opentinker_train_a_game_that_the_client_hosts(
    stack: Stack, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the client's own trackers write under outputs/ where it runs
    args = {**OPENTINKER, "tokenizer_path": str(model), "output_dir": str(tmp_path)}
    async with AsyncSchedulerClient(stack.server.url) as scheduler:
        job = await scheduler.submit_job(args, enable_agent_loop=True, num_gpus=2)
        assert job["status"] == "QUEUED"
        env = GameEnvironment(EchoGame, args, job_id=job["job_id"])
        async with AsyncServiceClient(job["server_url"], "project", "run", ["jsonl"]) as client:
            with env:
                await client.set_config(args, env)
                last = await client.fit(env, num_steps=3, test_freq=2, verbose=False)
        assert last["training/global_step"] == 3
        ended = await scheduler.job_status(job["job_id"])
    assert ended["status"] == "COMPLETED"
    folder = Path(ended["run_dir"])
    assert (folder / "checkpoints" / "step_000003" / "config.json").exists()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    validated = {row["step"] for row in map(json.loads, lines) if "val/mean_score" in row}
    # The client asks for step 2 once it has heard of it; the job may have ended by then.
    assert {0, 3} <= validated <= {0, 2, 3}


async def test_a_client_that_dies_comes_back_and_finds_its_run_waiting(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    args = {**OPENTINKER, "tokenizer_path": str(model), "output_dir": str(tmp_path)}
    async with AsyncSchedulerClient(stack.server.url) as scheduler:
        job = await scheduler.submit_job(args)
    script = f"""
from tinkermq.clients import GameEnvironment, ServiceClient
from tests.clients.test_inference_client import EchoGame
client, env = ServiceClient({job["server_url"]!r}), GameEnvironment(EchoGame, {args!r})
client.set_config({args!r}, env)
client.fit(env, num_steps=80)
"""
    with _started([sys.executable, "-c", script]) as process:
        await asyncio.wait_for(asyncio.to_thread(_until_a_step, process), PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in said
    for part in (f"run {job['name']} continues", f"tinkermq stop {job['name']}", "hosted here"):
        assert part in said
    with _started([sys.executable, "-c", script]) as process:
        await asyncio.wait_for(asyncio.to_thread(_until_a_step, process), PATIENCE_S)
        process.kill()
    async with AsyncServiceClient(job["server_url"]) as client:
        record = await client.status()
        assert record.state == "RUNNING"
        with GameEnvironment(EchoGame, args) as env:
            last = await asyncio.wait_for(client.fit(env, verbose=False), PATIENCE_S)
    assert last["training/global_step"] == 80


async def test_a_job_that_fails_tells_its_reason_to_whoever_waits(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    config = small_job(
        model, env={"game": "tests.support.games:NoSuchGame"}, training={"num_steps": 2}
    )
    async with AsyncSchedulerClient(stack.server.url, timeout=PATIENCE_S) as scheduler:
        # It fails while it starts, or just after.
        with pytest.raises(JobFailedError, match="has no game 'NoSuchGame'"):
            await _train_to_the_end(scheduler, {**config, "output_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"training": {"batch_size": "four"}}, r"training\.batch_size='four'"),
        ({"adv_estimator": "nope"}, r"algorithm\.advantage='nope'"),
        ({"model": {"path": "{tmp}/nowhere"}}, "there is no model folder '.*nowhere'"),
        ({"model": {"path": "{tmp}"}}, "is not a model: it has no config.json"),
        (
            {"env": {"train_data": ["{tmp}/no.parquet"]}},
            r"no dataset file .*no.parquet' \(env",
        ),
        ({"env": {"game": "bandid"}}, r"there is no game 'bandid'\n.*did you mean bandit"),
    ],
)
async def test_what_cannot_work_is_refused_when_it_is_said(
    stack: Stack, model: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    changes = json.loads(json.dumps(changes).replace("{tmp}", str(tmp_path)))
    config = small_job(model)
    config["output_dir"] = str(tmp_path)
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    if "adv_estimator" in config:
        config.pop("algorithm", None)
    async with AsyncSchedulerClient(stack.server.url) as scheduler:
        before = await _jobs(stack)
        with pytest.raises((ConfigError, ModelError, DataError, GameError), match=told):
            await scheduler.submit_job(config)
        assert await _jobs(stack) <= before
        job = await scheduler.submit_job({"output_dir": str(tmp_path)})
        async with AsyncServiceClient(job["server_url"]) as client:
            with pytest.raises((ConfigError, ModelError, DataError, GameError), match=told):
                await client.set_config(config)
        await scheduler.cancel_job(job["job_id"])


async def _train_to_the_end(scheduler: AsyncSchedulerClient, config: dict[str, Any]) -> None:
    job = await scheduler.submit_job(config)
    async with AsyncServiceClient(job["server_url"]) as client:
        await asyncio.wait_for(client.fit(verbose=False), PATIENCE_S)


async def test_a_job_that_can_never_fit_is_refused_at_once(stack: Stack, model: Path) -> None:
    config = small_job(model, generator={"count": 500})
    async with AsyncSchedulerClient(stack.server.url) as scheduler:
        with pytest.raises(PlacementError, match="501 slots"):
            await scheduler.submit_job(config)


def _started(words: list[str]) -> "subprocess.Popen[str]":
    """Start a user's process in a session of its own, with its output in pipes."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )


def _until_a_step(process: "subprocess.Popen[str]") -> str:
    """Read what a process writes until it tells of a training step; return all of it."""
    assert process.stdout is not None
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step "):
            return "".join(seen)
    raise AssertionError(f"it ended: {''.join(seen)}{process.stderr.read()}")


async def _assert_traced(file: Path) -> None:
    """A file of the run's folder holds torch's own trace of a step."""
    assert file.parent.name == "traces"
    text = await asyncio.to_thread(file.read_text)
    names = {event["name"] for event in json.loads(text)["traceEvents"]}
    assert "Optimizer.step#AdamW.step" in names


async def _assert_profiled(
    stack: Stack,
    scope: JobScope,
    run: Callable[..., Awaitable[Outcome]],
) -> None:
    """The learner waits for a slow game, and traces lead from its steps to the log."""
    told = json.loads((await run("profile", "cli-run", "--json")).out)
    assert max(told["waited_for"], key=told["waited_for"].get) == "environment"
    assert sum(told["waited_for"].values()) == pytest.approx(told["learner"]["wait"])
    for shares in (told["learner"], *told["generators"].values(), *told["hosts"].values()):
        assert sum(shares.values()) == pytest.approx(1.0)
    assert told["generators"]["generator-0"]["environment"] > 0.3
    advice = told["advice"][0]["text"]  # where no core is free, no host is held to be slow
    assert re.search("for games, which answered after|cores of this machine are", advice)
    held = json.loads((await run("profile", "cli-run", "--memory", "--json")).out)
    assert {"learner", "generator-0", "environment-0"} <= held.keys()
    learner = held["learner"]
    assert held["generator-0"]["parts"]["weights"] >= learner["parts"]["weights"] * 0.9
    moments = learner["parts"]["optimiser state"]
    assert moments == pytest.approx(2 * learner["parts"]["weights"], rel=0.01)
    assert sum(learner["parts"].values()) < learner["memory"]["resident"]
    assert learner["memory"]["resident"] <= learner["memory"]["peak"]
    shown = (await run("profile", "cli-run", "--memory")).out
    assert "optimiser state" in shown
    log = RolloutLog(stack.broker, scope)
    traces = await read_traces(stack.broker, scope, 100)
    for group in [group for trace in traces for group in trace.groups]:
        entry = await log.find(group.task)
        assert entry is not None
        assert group.traceparent == entry.traceparent
        assert is_traceparent(group.traceparent)


async def test_train_streams_and_control_c_detaches_without_stopping_the_run(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    config = small_job(model, env=UNHURRIED, training={"num_steps": 500})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**config, "output_dir": str(tmp_path), "name": "cli-run"}))
    words = ["train", str(file), "--nats-url", stack.server.url]
    with _started(command(words)) as process:
        seen = await asyncio.wait_for(asyncio.to_thread(_until_a_step, process), PATIENCE_S)
        assert "submitted cli-run" in seen
        assert "tinkermq stop cli-run" in seen
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
    assert process.returncode == 130
    assert "detached; the run continues" in errors
    assert "Traceback" not in errors

    async def run(*words: str) -> Outcome:
        full = (*words, "--nats-url", stack.server.url)
        return await asyncio.to_thread(tinkermq_here, *full)

    listed = json.loads((await run("ps", "--json")).out)
    row = next(row for row in listed if row["run"] == "cli-run")
    assert row["state"] == "RUNNING"
    assert f"(job {row['job']})" in seen
    pids = [entry.value.pid for entry in await list_presences(stack.broker, f"local.{row['job']}.")]
    assert len(pids) == 3
    assert set().union(*map(listening_ports, [*pids, *stack.pids])) == set()
    assert "cli-run has priority 3" in (await run("priority", "cli-run", "3")).out
    assert (await run("scale", "cli-run", "generators=2")).code == 0
    saved = Path((await run("checkpoint", "cli-run")).out.strip())
    assert saved.parent == tmp_path / "cli-run" / "checkpoints"
    assert (saved / "model.safetensors").is_file()
    traced = await run("profile", "cli-run", "--torch-profiler")
    await _assert_traced(Path(traced.out.strip()))
    await _assert_profiled(stack, JobScope("local", row["job"]), run)
    assert (await run("stop", "cli-run", "--complete")).code == 0
    watched = await run("attach", "cli-run", "--json")
    last = json.loads(watched.out.splitlines()[-1])
    assert last["job"]["state"] == "COMPLETED"


# -- A dry run asks the pool: what a submission would be told, for each thing who says it ----------


async def dry_run(
    stack: Stack,
    folder: Path,
    config: dict[str, Any],
    *words: str,
    url: str = "",
    apart: bool = True,
) -> Outcome:
    """Try a job from `folder`, where nothing of this checkout can be imported, if `apart`."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(folder / "runs"), **config}))
    line = ("train", str(file), "--dry-run", "--nats-url", url or stack.server.url, *words)
    if not apart:
        return await asyncio.to_thread(tinkermq_here, *line)
    return await asyncio.to_thread(tinkermq, *line, cwd=folder)


def rows(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    return file


async def test_each_thing_is_told_with_who_said_it_and_nothing_is_submitted(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    before = await _jobs(stack)
    env = {"game": "addition", "train_data": [str(rows(tmp_path))], "num_val": 0}
    told = await dry_run(stack, tmp_path, small_job(model, env=env), "--json", apart=False)
    assert told.code == 0, told.out + told.err
    checks = json.loads(told.out)["checks"]
    assert all(check["ok"] for check in checks)
    here, node = "", "node node"
    played = {"the game imports", "types are right", "first prompts fit"}
    assert played <= {check["name"] for check in checks if check["by"] == here}
    said = {(check["name"], check["by"]) for check in checks if check["by"] != here}
    assert said == {
        ("model", node),
        ("data", node),
        ("game", node),
        ("slots", "scheduler"),
    }
    assert not (tmp_path / "runs").exists()
    assert await _jobs(stack) <= before


@pytest.mark.parametrize("name", ["quantised weights", "deepseek_v32"])
async def test_a_model_that_cannot_work_is_refused_by_each_way_in_and_none_is_submitted(
    stack: Stack, tmp_path: Path, name: str
) -> None:
    before = await _jobs(stack)
    said = save_refused(name, tmp_path / "model")
    config = small_job(tmp_path / "model")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    line = ("train", str(tmp_path / "job.yaml"), "--nats-url", stack.server.url)
    for words in (("model", "check", str(tmp_path / "model")), (*line, "--dry-run"), line):
        told = await asyncio.to_thread(tinkermq_here, *words)
        assert told.code != 0
        assert said in told.out + told.err
        assert "Traceback" not in told.out + told.err
    if name in CHANGES:
        with pytest.raises(ModelError, match=re.escape(said)):
            await Pool(stack.broker).submit(config)
    assert await _jobs(stack) <= before


async def _jobs(stack: Stack) -> set[str]:
    """Return the ids of all jobs; what they are changes while other tests' jobs end."""
    listed = await stack.ask("list", ListRequest(all=True), JobList)
    return {one.job for one in listed.records}


async def test_what_nodes_and_scheduler_lack_is_all_told_and_the_first_is_the_error(
    stack: Stack, tmp_path: Path
) -> None:
    config = small_job(
        Path("/no/such/model"),
        env={"game": "none.such:Game", "train_data": ["/no/rows.jsonl"], "num_val": 0},
        generator={"count": 1000},
    )
    told = await dry_run(stack, tmp_path, config)
    assert told.code == 2
    assert sum(line.startswith("fail ") for line in told.out.splitlines()) == 6, told.out
    assert "/no/such/model" in told.out
    assert "there is no file /no/rows.jsonl  (node node)" in told.out
    assert "there is no module 'none' for game 'none.such:Game'  (node node)" in told.out
    assert "the run needs 1,001 slots" in told.out


async def test_a_name_that_is_taken_or_a_run_that_is_not_there_is_the_schedulers_to_tell(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    told = await dry_run(stack, tmp_path, small_job(model), "--from", "no-such-run@40", apart=False)
    assert told.code == 2
    failed = "user 'local' has no run 'no-such-run'  (scheduler)"
    assert re.search(rf"^fail job +{re.escape(failed)}$", told.out, re.MULTILINE)


@asynccontextmanager
async def from_elsewhere(url: str) -> AsyncIterator[str]:
    """Yield an address under which a broker of this machine is one of another."""
    port = int(url.rpartition(":")[2])

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
        target.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to), pump(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.2", 0) as server:
        host, own_port = server.sockets[0].getsockname()
        yield f"nats://{host}:{own_port}"


async def test_a_pool_elsewhere_may_have_what_this_machine_lacks(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    config = small_job(model, env={"game": "tests.support.games:SlowBandit", "num_val": 0})
    async with from_elsewhere(stack.server.url) as url:
        for pool_url in (stack.server.url, url):
            told = await dry_run(stack, tmp_path, config, url=pool_url)
            assert told.code == 0, told.out + told.err
            assert re.search(r"skip game +there is no module 'tests'.* here: not played", told.out)
            assert "tests.support.games:SlowBandit: its package is there" in told.out


# -- A node inspects a model before a job is submitted ---------------------------------------------


async def test_a_node_looks_into_a_model_with_the_code_of_the_run(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    pool, env = Pool(stack.broker), {"game": "addition", "hosts": 1}
    told = await pool.inspect_model(small_job(model, env=env))
    assert [one.detail for one in told if not one.ok] == []
    assert {one.by for one in told} == {"node node"}
    names = {one.name for one in told}
    assert {"the weights are those of the configuration", "a checkpoint can be written"} <= names

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    told = await pool.inspect_model(small_job(broken, env=env))
    wrong = [one.name for one in told if not one.ok]
    assert "the weights are those of the configuration" in wrong
    nowhere = await pool.inspect_model(small_job(tmp_path / "none", env=env))
    assert nowhere == []


# -- A run in Python: all that the command line tells of it, and what it is worth ------------------


async def test_a_run_is_read(stack: Stack, model: Path) -> None:
    env = {"game": "bandit", "num_val": 8}
    job = await stack.submit(small_job(model, env=env, training={"num_steps": 6, "test_freq": 3}))
    name = (await job.until("COMPLETED")).name
    async with AsyncRun(name, stack.server.url) as run:
        numbers = await run.metrics()
        trained = numbers["step"] >= 1
        assert numbers["step"][trained].tolist() == [1, 2, 3, 4, 5, 6]
        assert np.isfinite(numbers["training_step_reward"][trained]).all()
        assert np.isfinite(numbers["val/mean_score"]).sum() == 3
        assert list(await run.metrics(["actor/lr"])) == ["step", "actor/lr"]
        with pytest.raises(ConfigError, match="the run has no metric 'lr'"):
            await run.metrics(["lr"])
        best = await run.rollouts(sort="reward", limit=4)
        rewards = [one["reward"] for one in best]
        assert rewards == sorted(rewards, reverse=True)
        assert {one["step"] for one in await run.rollouts(2)} == {2}
        with pytest.raises(NotFoundError, match="step 99"):
            await run.rollouts(99)
        assert any(line.startswith("learner | ") for line in await run.logs("learner"))
        with pytest.raises(NotFoundError, match="no actor 'learnr'"):
            await run.logs("learnr")
        assert (await run.profile()).num_steps == 6
    with Run(name, stack.server.url) as notebook:
        assert repr(notebook) == f"Run({name!r})"
        shown = notebook._repr_html_()
        assert repr(notebook) == f"Run({name!r}, COMPLETED)"
    assert name in shown
    assert "<polyline" in shown
    words = ("verify", name, "--replay", "--json", "--nats-url", stack.server.url)
    verified = await asyncio.to_thread(tinkermq, *words)
    assert verified.code == 0, verified
    checks = json.loads(verified.out)["checks"]
    results = {check["check"]: check["result"] for check in checks}
    assert results == dict.fromkeys(MEANINGS, "passed")


async def test_checkpoints_of_a_run_are_evaluated_and_compared(stack: Stack, model: Path) -> None:
    env = {"game": "bandit", "num_val": 8}
    job = await stack.submit(small_job(model, env=env, training={"num_steps": 6, "test_freq": 3}))
    name = (await job.until("COMPLETED")).name
    async with AsyncRun(name, stack.server.url) as run:
        values = await run.evaluate(6)
        assert "val/mean_score" in values
        difference = await run.compare(6, f"{name}@3", tasks=[0, 1, 2])
        assert difference.num_tasks == 3
