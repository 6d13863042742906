"""The environment-host actor as a process: it serves, drains, and fails for good on a bad game."""

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process

from tinkermq.actors.runtime import EXIT_DRAINED, EXIT_FAILED
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.kv import Bucket
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

from tests.support.waiting import PATIENCE_S


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
