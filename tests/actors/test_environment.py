"""The environment-host actor as a process: it serves, drains, fails; programs end with it."""

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tinkermq.actors.runtime import EXIT_DRAINED, EXIT_FAILED
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.env import (
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, JobScope

from tests.support.processes import alive
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full


async def start(broker: Broker, scope: JobScope, game: str) -> Process:
    """Store a job for `game` and start its environment host."""
    record = JobRecord(
        job=scope.job,
        name=scope.job,
        user=scope.user,
        state="QUEUED",
        config={"model": {"path": "unused"}, "env": {"game": game}},
        created=time.time(),
    )
    await Bucket(broker, BUCKET_JOBS, JobRecord).create(scope.key, record)
    return await start_process(broker, scope)


async def start_process(broker: Broker, scope: JobScope) -> Process:
    """Start an environment host of a job that is stored."""
    arguments = ("--nats", broker.url, "--user", scope.user, "--job", scope.job)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinkermq.actors.environment", *arguments),
        stderr=PIPE,
        env={"TINKERMQ_LOG_FORMAT": "json"},
    )


async def log_of(process: Process) -> list[dict[str, object]]:
    """Wait for the end of the process and return its log lines."""
    async with asyncio.timeout(PATIENCE_S):
        _, text = await process.communicate()
    return [json.loads(line) for line in text.decode().splitlines() if line.startswith("{")]


async def ask(broker: Broker, subject: str, request, reply_model):
    """Ask until somebody answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await call(
                    broker,
                    subject,
                    request,
                    reply_model,
                    timeout_s=PATIENCE_S,
                    waiting_for="the host",
                )
            except NotFoundError:
                await asyncio.sleep(0.1)


async def test_the_actor_hosts_its_jobs_game_and_finishes_episodes_before_it_ends(
    broker: Broker, scope: JobScope
) -> None:
    process = await start(broker, scope, "guess")
    try:
        described = await ask(broker, scope.env_describe, DescribeRequest(), DescribeReply)
        assert (described.game, described.num_train) == ("guess", None)
        request = ResetRequest(episodes=["a"], split="train", sample=None, seed=1)
        host = (await ask(broker, scope.env_reset, request, ResetReply)).host
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        step = StepRequest(episodes=["a"], turns=[0], actions=["3"])
        await ask(broker, scope.env(host, "step"), step, StepReply)
        await ask(broker, scope.env(host, "close"), CloseRequest(episode="a"), Empty)
        events = [line["event"] for line in await log_of(process)]
        assert process.returncode == EXIT_DRAINED
        assert events[-2:] == ["actor_draining", "host_drained"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_game_that_cannot_be_imported_fails_the_actor_for_good(
    broker: Broker, scope: JobScope
) -> None:
    process = await start(broker, scope, "calculater")
    line = [line for line in await log_of(process) if line["event"] == "actor_failed"][-1]
    assert process.returncode == EXIT_FAILED
    assert line["message"] == "there is no game 'calculater'"
    assert str(line["hint"]).startswith("did you mean calculator?")
    again = await start_process(broker, scope)
    await log_of(again)
    told = [event.kind for event in await read_events(broker, scope)]
    assert told == ["actor_failed"], "of actors that fail alike one event is enough"


# -- The environment-host actor of an agent job as a process: its programs end with it -------------


PROGRAM = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

def ask(text):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]

print(ask("first"))
while os.environ["TINKERMQ_EPISODE"].startswith("endless"):
    time.sleep(1)
print(ask("second"))
print(sys.argv[1])
open(os.environ["TINKERMQ_REWARD"], "w").write("0.5")
"""


@dataclass
class Hosts:
    """Environment hosts of one agent job; none outlives its test."""

    broker: Broker
    scope: JobScope
    folder: Path
    processes: list[Process] = field(default_factory=list)

    async def store(self) -> None:
        """Store the job."""
        (self.folder / "files").mkdir()
        (self.folder / "files" / "agent.py").write_text(PROGRAM)
        words = ["{python}", "agent.py", "{prompt}"]
        agent = {"command": words, "files": str(self.folder / "files"), "grace_s": 1}
        record = JobRecord(
            job=self.scope.job,
            name=self.scope.job,
            user=self.scope.user,
            state="QUEUED",
            config={"model": {"path": "unused"}, "agent": agent},
            created=time.time(),
            run_dir=str(self.folder / "run"),
        )
        await Bucket(self.broker, BUCKET_JOBS, JobRecord).create(self.scope.key, record)

    async def start(self) -> Process:
        """Start a host."""
        arguments = ("--nats", self.broker.url, "--user", self.scope.user, "--job", self.scope.job)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkermq.actors.environment", *arguments),
            stderr=PIPE,
            env={"TINKERMQ_LOG_FORMAT": "json", "TMPDIR": str(self.folder)},
        )
        self.processes.append(process)
        return process

    def left(self) -> set[Path]:
        """Return the folders of programs."""
        return set(self.folder.glob("tinkermq-programs-*"))


@pytest.fixture
async def hosts(broker: Broker, scope: JobScope, tmp_path: Path) -> AsyncIterator[Hosts]:
    """An agent job without a host yet."""
    made = Hosts(broker, scope, tmp_path)
    await made.store()
    yield made
    for process in made.processes:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def opened(broker: Broker, scope: JobScope, episode: str) -> str:
    """Start an episode; return its host."""
    request = ResetRequest(episodes=[episode], split="train", sample=None, seed=3, wait_s=9)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            reply = await ask(broker, scope.env_reset, request, ResetReply)
            assert reply.episodes[0].error is None, reply.episodes[0].error
            if reply.episodes[0].prompt is not None:
                return reply.host


async def test_a_host_told_to_stop_lets_its_programs_finish(
    broker: Broker, scope: JobScope, hosts: Hosts
) -> None:
    go_on = asyncio.Event()
    script = Script()
    process = await hosts.start()
    async with ScriptedGenerator(broker, scope, script).playing("t1-1"):
        script.stops_at, script.go_on = 1, go_on
        host = await opened(broker, scope, "t1-1")
        await until(lambda: len(script.asked) >= 1, "the first call")
        process.send_signal(signal.SIGTERM)
        script.stops_at = None
        go_on.set()
        request = StepRequest(episodes=["t1-1"], turns=[0], actions=[""], wait_s=9)
        async with asyncio.timeout(PATIENCE_S):
            reply = await ask(broker, scope.env(host, "step"), request, StepReply)
            while reply.observations == [None] and not reply.failed:  # not ready yet
                reply = await ask(broker, scope.env(host, "step"), request, StepReply)
    assert reply.rewards == [0.5]
    assert reply.infos[0]["output"] == "You said: first\nYou said: second\nseed 3\n"
    await log_of(process)
    assert process.returncode == EXIT_DRAINED


@pytest.mark.faults
async def test_programs_end_with_a_host_that_is_killed_and_the_next_host_clears_up(
    broker: Broker, scope: JobScope, hosts: Hosts
) -> None:
    process = await hosts.start()
    async with ScriptedGenerator(broker, scope, Script()).playing("endless-1"):
        await opened(broker, scope, "endless-1")
        processes = set(descendants(process.pid)) - {process.pid}
        assert len(processes) >= 2
        process.kill()
        await log_of(process)
        await until(lambda: not any(map(alive, processes)), "the end of the programs")
        abandoned = hosts.left()
        assert len(abandoned) == 1
        other = await hosts.start()
        host = await opened(broker, scope, "endless-2")
        assert not abandoned & hosts.left()
        await ask(broker, scope.env(host, "close"), CloseRequest(episode="endless-2"), Empty)
        other.send_signal(signal.SIGTERM)
        await log_of(other)
    assert not hosts.left()
