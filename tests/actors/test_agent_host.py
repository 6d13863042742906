"""The environment-host actor of an agent job as a process: its programs end with it."""

import asyncio
import signal
import tempfile
import time
from asyncio.subprocess import Process
from pathlib import Path

import pytest
from tinkermq.actors.runtime import EXIT_DRAINED
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.envs.sandbox.watch import descendants
from tinkermq.schemas.env import CloseRequest, ResetReply, ResetRequest, StepReply, StepRequest
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, JobScope

from tests.support.processes import alive
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import until

from .test_environment import ask, log_of, start_process

PROGRAM = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

def ask(text):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=60)
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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a program."""
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(PROGRAM)
    return folder


async def started(broker: Broker, scope: JobScope, folder: Path) -> Process:
    """Store an agent job and start its environment host."""
    agent = {"command": ["{python}", "agent.py", "{prompt}"], "files": str(folder), "grace_s": 1}
    config = {"model": {"path": "unused"}, "agent": agent}
    record = JobRecord(
        job=scope.job,
        name=scope.job,
        user=scope.user,
        state="QUEUED",
        config=config,
        created=time.time(),
        run_dir=str(folder.parent / "run"),
    )
    await Bucket(broker, BUCKET_JOBS, JobRecord).create(scope.key, record)
    return await start_process(broker, scope)


async def opened(broker: Broker, scope: JobScope, episode: str) -> str:
    """Start an episode; return its host."""
    request = ResetRequest(episodes=[episode], split="train", sample=None, seed=3, wait_s=9)
    reply = await ask(broker, scope.env_reset, request, ResetReply)
    assert reply.episodes[0].error is None, reply.episodes[0].error
    return reply.host


def left() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("tinkermq-programs-*"))


async def test_a_host_told_to_stop_lets_its_programs_finish(
    broker: Broker, scope: JobScope, files: Path
) -> None:
    go_on = asyncio.Event()
    script = Script()
    process = await started(broker, scope, files)
    async with ScriptedGenerator(broker, scope, script).playing("t1-1"):
        script.stops_at, script.go_on = 1, go_on
        host = await opened(broker, scope, "t1-1")
        await until(lambda: len(script.asked) >= 1, "the first call")
        process.send_signal(signal.SIGTERM)
        go_on.set()
        request = StepRequest(episodes=["t1-1"], turns=[0], actions=[""], wait_s=9)
        reply = await ask(broker, scope.env(host, "step"), request, StepReply)
    assert reply.rewards == [0.5]
    assert reply.infos[0]["output"] == "You said: first\nYou said: second\nseed 3\n"
    await log_of(process)
    assert process.returncode == EXIT_DRAINED


@pytest.mark.faults
async def test_programs_end_with_a_host_that_is_killed_and_the_next_host_clears_up(
    broker: Broker, scope: JobScope, files: Path
) -> None:
    before = left()
    process = await started(broker, scope, files)
    async with ScriptedGenerator(broker, scope, Script()).playing("endless-1"):
        await opened(broker, scope, "endless-1")
        processes = set(descendants(process.pid)) - {process.pid}
        assert len(processes) >= 2
        process.kill()
        await log_of(process)
        await until(lambda: not any(map(alive, processes)), "the end of the programs")
        abandoned = left() - before
        assert len(abandoned) == 1
        other = await start_process(broker, scope)
        host = await opened(broker, scope, "endless-2")
        assert not abandoned & left()
        await ask(broker, scope.env(host, "close"), CloseRequest(episode="endless-2"), Empty)
        other.send_signal(signal.SIGTERM)
        await log_of(other)
    assert left() == before
