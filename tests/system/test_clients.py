"""Users' ways into a real pool: the command line, the Python clients, a game of one's own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.broker.feed import read_traces
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.clients import AsyncSchedulerClient, AsyncServiceClient, GameEnvironment
from tinkermq.schemas.wire.errors import (
    ConfigError,
    DataError,
    GameError,
    JobFailedError,
    ModelError,
    PlacementError,
)
from tinkermq.schemas.wire.subjects import JobScope
from tinkermq.schemas.wire.trace import is_traceparent

from tests.clients.command import command
from tests.clients.test_game_environment import EchoGame
from tests.support.configs import UNHURRIED, small_job
from tests.support.processes import listening_ports
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

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


@pytest.mark.long
async def test_a_client_that_dies_comes_back_and_finds_its_run_waiting(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    args = {**OPENTINKER, "tokenizer_path": str(model), "output_dir": str(tmp_path)}
    async with AsyncSchedulerClient(stack.server.url) as scheduler:
        job = await scheduler.submit_job(args)
    script = f"""
from tinkermq.clients import GameEnvironment, ServiceClient
from tests.clients.test_game_environment import EchoGame
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
    for part in (f"run {job['name']} goes on", f"tinkermq stop {job['name']}", "hosted here"):
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
        before = len(await scheduler.list_jobs())
        with pytest.raises((ConfigError, ModelError, DataError, GameError), match=told):
            await scheduler.submit_job(config)
        assert len(await scheduler.list_jobs()) == before
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
    run: Callable[..., Awaitable["subprocess.CompletedProcess[bytes]"]],
) -> None:
    """The learner waits for a slow game, and traces lead from its steps to the log."""
    told = json.loads((await run("profile", "cli-run", "--json")).stdout)
    assert max(told["waited_for"], key=told["waited_for"].get) == "environment"
    assert sum(told["waited_for"].values()) == pytest.approx(told["learner"]["wait"])
    for shares in (told["learner"], *told["generators"].values(), *told["hosts"].values()):
        assert sum(shares.values()) == pytest.approx(1.0)
    assert told["generators"]["generator-0"]["environment"] > 0.3
    assert "for games, which answered after" in told["advice"][0]["text"]
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

    async def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        full = command([*words, "--nats-url", stack.server.url])
        return await asyncio.to_thread(subprocess.run, full, capture_output=True, check=False)

    listed = json.loads((await run("ps", "--json")).stdout)
    row = next(row for row in listed if row["run"] == "cli-run")
    assert row["state"] == "RUNNING"
    assert f"(job {row['job']})" in seen
    pids = [entry.value.pid for entry in await list_presences(stack.broker, f"local.{row['job']}.")]
    assert len(pids) == 3
    assert set().union(*map(listening_ports, [*pids, *stack.pids])) == set()
    assert b"cli-run has priority 3" in (await run("priority", "cli-run", "3")).stdout
    assert (await run("scale", "cli-run", "generators=2")).returncode == 0
    checkpoint, traced = await asyncio.gather(
        run("checkpoint", "cli-run"), run("profile", "cli-run", "--torch-profiler")
    )
    saved = Path(checkpoint.stdout.decode().strip())
    assert saved.parent == tmp_path / "cli-run" / "checkpoints"
    assert (saved / "model.safetensors").is_file()
    await _assert_traced(Path(traced.stdout.decode().strip()))
    await _assert_profiled(stack, JobScope("local", row["job"]), run)
    assert (await run("stop", "cli-run", "--complete")).returncode == 0
    watched = await run("attach", "cli-run", "--json")
    last = json.loads(watched.stdout.splitlines()[-1])
    assert last["job"]["state"] == "COMPLETED"
