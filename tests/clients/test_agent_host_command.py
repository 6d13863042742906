"""`agent host`: the programs of a run on this machine, over one connection."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.env import ResetReply, ResetRequest, StepReply, StepRequest
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.message import Message
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.command import command
from tests.clients.conftest import new_record
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, eventually

PROGRAM = """
import json, os, sys, urllib.request

body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as got:
    print(json.load(got)["choices"][0]["message"]["content"])
"""
REWARD = ["{python}", "-c", "print(0.75)"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program's files on the user's machine."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text(PROGRAM)
    return tmp_path


async def stored(broker: Broker, scope: JobScope, **config: Any) -> JobRecord:
    """A run as its record says it."""
    values = {"model": {"path": "m"}, "training": {"num_steps": 3}, **config}
    return await JobStore(broker).create(new_record(scope, config=values), "test")


def of_programs(**agent: Any) -> dict[str, Any]:
    """Return the configuration of a run whose programs the pool does not run."""
    told = {"command": ["{python}", "agent.py", "{prompt}"], "reward": REWARD, **agent}
    return {"agent": told, "env": {"hosts": 0}}


@contextlib.asynccontextmanager
async def started(broker: Broker, folder: Path, *words: str) -> AsyncIterator[Any]:
    """Run `agent host` as a process in a folder."""
    environment = {**os.environ, "TINKERMQ_NATS_URL": broker.url, "TINKERMQ_HOME": "/nonexistent"}
    process = await asyncio.create_subprocess_exec(
        *command(["agent", "host", *words]),
        cwd=folder,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(broker: Broker, subject: str, request: Message, reply: type[Any]) -> Any:
    """Ask until a host is there."""

    async def attempt() -> Any:
        with contextlib.suppress(NotFoundError):
            return await call(
                broker, subject, request, reply, timeout_s=PATIENCE_S, waiting_for="the host"
            )

    return await eventually(attempt, "the host")


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "--files"])
async def test_programs_run_on_the_users_machine_until_the_run_ends(
    broker: Broker, scope: JobScope, folder: Path, relative: bool
) -> None:
    files = "mine" if relative else "/of/somebody/else"
    record = await stored(broker, scope, **of_programs(files=files))
    words = [record.name] if relative else [record.name, "--files", str(folder / "mine")]
    async with (
        started(broker, folder, *words, "--places", "2") as process,
        ScriptedGenerator(broker, scope, Script()).playing("t1-1"),
    ):
        opening = ResetRequest(episodes=["t1-1"], split="train", sample=None, seed=3, wait_s=9)
        opened = await ask(broker, scope.env_reset, opening, ResetReply)
        assert opened.episodes[0].error is None, opened.episodes[0].error
        step = StepRequest(episodes=["t1-1"], turns=[0], actions=[""], wait_s=9)
        ended = await ask(broker, scope.env(opened.host, "step"), step, StepReply)
        assert ended.rewards == [0.75]
        assert ended.infos[0]["output"] == "You said: seed 3\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert f"serves agent for {record.name}" in errors.decode()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"env": {"game": "guess"}}, "plays the game 'guess' and has no program"),
        ({"agent": {"client": True}, "env": {"hosts": 0}}, "has agent.client set"),
        (of_programs(files="nowhere"), "agent.files='nowhere' is no folder on this host"),
    ],
)
async def test_what_cannot_be_hosted_is_told(
    broker: Broker, scope: JobScope, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    record = await stored(broker, scope, **config)
    async with started(broker, tmp_path, record.name) as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert told in " ".join(errors.decode().split())


async def test_a_run_that_has_ended_is_hosted_no_more(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    record = new_record(scope, config={"model": {"path": "m"}, **of_programs()}, state="COMPLETED")
    await JobStore(broker).create(record, "test")
    async with started(broker, tmp_path, record.name) as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "is COMPLETED: its episodes are no longer played" in errors.decode()
