"""`/v1/episodes`: a user without Python takes episodes of a job, and says what they are worth."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.env import ResetReply, ResetRequest, StepReply, StepRequest
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.test_environment import ask, start_process
from tests.support.gateway import Answer, Gateway, run_gateway
from tests.support.scripted_generator import Script, ScriptedGenerator

SAY: Any = [{"role": "user", "content": "Hello"}]
OPEN = "/v1/episodes"


def record_of(scope: JobScope, **config: Any) -> JobRecord:
    return JobRecord(
        job=scope.job,
        name=f"run-{scope.job}",
        user=scope.user,
        state="RUNNING",
        config={"model": {"path": "unused"}, **config},
        created=time.time(),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A gateway to a pool without users."""
    async with run_gateway(nats_server.url, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@dataclass
class Host:
    """An agent job whose episodes are asked for, with its host in the pool."""

    broker: Broker
    scope: JobScope
    gateway: Gateway

    async def taken(self, episode: str, **headers: str) -> tuple[Answer, ResetReply]:
        """Take an episode while a generator starts it."""
        body = {"job": f"run-{self.scope.job}", "wait_s": 60}
        taking = asyncio.create_task(self.gateway.post(OPEN, body, **headers), name="take")
        request = ResetRequest(
            episodes=[episode], split="train", sample=None, seed=7, kwargs={"prompt": "2+2?"}
        )
        reset = await self.reset(request)
        return await taking, reset

    async def reset(self, request: ResetRequest) -> ResetReply:
        """Ask until the episode has started."""
        subject = self.scope.env_reset
        while True:
            reset = await ask(self.broker, subject, request, ResetReply)
            if reset.prompts:
                return reset
            subject = self.scope.env(reset.host, "reset")


@pytest.fixture
async def host(broker: Broker, scope: JobScope, pool: Gateway) -> AsyncIterator[Host]:
    """A host as a process."""
    record = record_of(scope, agent={"client": True}, env={"hosts": 1})
    await JobStore(broker).create(record, "test")
    process = await start_process(broker, scope)
    try:
        yield Host(broker, scope, pool)
    finally:
        process.kill()
        await process.communicate()


async def test_an_episode_is_taken_played_rewarded_and_ended_over_http(host: Host) -> None:
    answer, reset = await host.taken("g-1-0", idempotency_key="first")
    told = answer.json
    assert (answer.status, told["id"], told["seed"]) == (201, "g-1-0", 7)
    assert told["prompt"] == reset.prompts[0]
    assert told["openai_base_url"] == f"{host.gateway.url}/v1"
    assert told["variables"]["OPENAI_API_KEY"] == told["api_key"]
    again = await host.gateway.post(
        OPEN, {"job": host.scope.job, "wait_s": 0}, idempotency_key="first"
    )
    assert (again.json["id"], again.json["api_key"]) == ("g-1-0", told["api_key"])

    url, key = told["openai_base_url"], told["api_key"]
    script = Script()
    async with (
        ScriptedGenerator(host.broker, host.scope, script).playing("g-1-0"),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(model="any", messages=SAY)
    assert chat.choices[0].message.content == "You said: Hello"
    one = f"{OPEN}/g-1-0"
    assert (await host.gateway.get(one)).json["calls"] == 1
    assert (await host.gateway.post(f"{one}/note", {"call": 0, "role": "main"})).status == 200
    wrong = await host.gateway.post(f"{one}/reward", {"reward": "much"})
    assert wrong.status == 400
    assert (await host.gateway.post(f"{one}/reward", {"reward": 0.5})).status == 200
    ended = await host.gateway.post(f"{one}/end", {"status": "done", "info": {"found": 2}})
    assert ended.json == {"status": "done", "reward": 0.5}
    step = StepRequest(episodes=["g-1-0"], turns=[0], actions=[""], wait_s=10)
    played = await ask(host.broker, host.scope.env(reset.host, "step"), step, StepReply)
    assert (played.rewards, played.done) == ([0.5], [True])
    over = await host.gateway.post(f"{one}/reward", {"reward": 1})
    assert over.status in (401, 410), over.text


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "job is missing"),
    ({"job": "none"}, 404, "no job or run 'none'"),
    ({"job": "JOB", "task": 3}, 400, "'task' is not supported here"),
    ({"job": "JOB", "wait_s": 999}, 400, "wait_s must be between 0 and 300"),
    ({"job": "JOB", "wait_s": 0}, 425, "its host is not there yet"),
    ({"job": "GAME"}, 400, "agent.client=true and env.hosts=1"),
    ({"job": "PAST"}, 409, "is COMPLETED: it gives no episodes out"),
]


async def test_what_cannot_be_given_is_refused_with_the_reason(
    broker: Broker, scope: JobScope, pool: Gateway
) -> None:
    jobs = JobStore(broker)
    agent: dict[str, Any] = {"agent": {"client": True}, "env": {"hosts": 1}}
    await jobs.create(record_of(scope, **agent), "test")
    others = {"JOB": scope, "GAME": JobScope(scope.user, f"{scope.job}-game")}
    await jobs.create(record_of(others["GAME"], env={"game": "guess"}), "test")
    others["PAST"] = JobScope(scope.user, f"{scope.job}-past")
    ended = record_of(others["PAST"], **agent).model_copy(update={"state": "COMPLETED"})
    await jobs.create(ended, "test")
    for body, status, words in REFUSED:
        named = {**body, "job": others[body["job"]].job} if body.get("job") in others else body
        answer = await pool.post(OPEN, named)
        assert (answer.status, words in answer.json["error"]["message"]) == (status, True), answer
    assert answer.headers.get("retry-after") is None
    assert (await pool.post(OPEN, {"job": scope.job, "wait_s": 0})).headers["retry-after"] == "1"
    unknown = await pool.post(f"{OPEN}/g-9-9/end", {})
    assert unknown.status == 404
    assert "was taken here" in unknown.json["error"]["message"]
