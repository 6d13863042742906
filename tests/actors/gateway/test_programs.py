"""Programs and users elsewhere: keys of episodes lead through any gateway."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
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
from tests.support.elsewhere import Elsewhere, elsewhere
from tests.support.gateway import Answer, Gateway, run_gateway
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full

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
    answer, reset = await host.taken("taken-1-0", idempotency_key="first")
    told = answer.json
    assert (answer.status, told["id"], told["seed"]) == (201, "taken-1-0", 7)
    assert told["prompt"] == reset.prompts[0]
    assert told["openai_base_url"] == f"{host.gateway.url}/v1"
    assert told["variables"]["OPENAI_API_KEY"] == told["api_key"]
    again = await host.gateway.post(
        OPEN, {"job": host.scope.job, "wait_s": 0}, idempotency_key="first"
    )
    assert (again.json["id"], again.json["api_key"]) == ("taken-1-0", told["api_key"])

    url, key = told["openai_base_url"], told["api_key"]
    script = Script()
    async with (
        ScriptedGenerator(host.broker, host.scope, script).playing("taken-1-0"),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(model="any", messages=SAY)
    assert chat.choices[0].message.content == "You said: Hello"
    one = f"{OPEN}/taken-1-0"
    assert (await host.gateway.get(one)).json["calls"] == 1
    assert (await host.gateway.post(f"{one}/note", {"call": 0, "role": "main"})).status == 200
    wrong = await host.gateway.post(f"{one}/reward", {"reward": "much"})
    assert wrong.status == 400
    assert (await host.gateway.post(f"{one}/reward", {"reward": 0.5})).status == 200
    ended = await host.gateway.post(f"{one}/end", {"status": "done", "info": {"found": 2}})
    assert ended.json == {"status": "done", "reward": 0.5}
    step = StepRequest(episodes=["taken-1-0"], turns=[0], actions=[""], wait_s=10)
    played = await ask(host.broker, host.scope.env(reset.host, "step"), step, StepReply)
    assert (played.rewards, played.done) == ([0.5], [True])
    over = await host.gateway.post(f"{one}/reward", {"reward": 1})
    assert over.status == 410, over.text  # the user's own key is good


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "job is missing"),
    ({"job": "none"}, 404, "no run 'none'"),
    ({"job": "JOB", "task": 3}, 400, "'task' is not supported here"),
    ({"job": "JOB", "wait_s": 999}, 400, "wait_s must be between 0 and 300"),
    ({"job": "JOB", "wait_s": 0}, 425, "its host has not started yet"),
    ({"job": "GAME"}, 400, "agent.client=true and env.hosts=1"),
    ({"job": "PAST"}, 409, "is COMPLETED: it has no more episodes"),
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
    assert "was not taken at this gateway" in unknown.json["error"]["message"]


# -- Programs elsewhere: the key of their episode leads them through any gateway -------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateways(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Two gateways to a pool without users."""
    one, two = (tmp_path_factory.mktemp(f"gateway-{number}") for number in range(2))
    url = nats_server.url
    async with (
        run_gateway(url, one, "--name", "a") as first,
        run_gateway(url, two, "--name", "b") as second,
    ):
        yield first, second


@pytest.fixture
async def program(
    broker: Broker, scope: JobScope, gateways: tuple[Gateway, Gateway]
) -> AsyncIterator[Elsewhere]:
    """A program of an episode that is hosted and played."""
    async with elsewhere(broker, broker, scope, *gateways) as made:
        yield made


async def test_all_apis_are_answered_through_a_gateway(program: Elsewhere) -> None:
    async with program.openai() as client:
        chat = await client.chat.completions.create(model="any", messages=SAY)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "You said: Hello"
        response = await client.responses.create(model="any", input="Hello")
        assert response.output_text == "You said: Hello"
        assert [one.id async for one in await client.models.list()] == ["policy"]
    async with anthropic.AsyncAnthropic(
        base_url=program.gateways[1].url, api_key=f"sk-ant-{program.episode.key}"
    ) as messages:
        told = await messages.messages.create(model="any", max_tokens=50, messages=SAY)  # type: ignore[arg-type]
        assert told.content[0].text == "You said: Hello"  # type: ignore[union-attr]
        counted = await messages.messages.count_tokens(model="any", messages=SAY)  # type: ignore[arg-type]
        assert counted.input_tokens == 11
    assert program.episode.num_calls == 3, "the host knows before the program does"
    await until(lambda: len(program.script.delivered) == 3, "the deliveries to be told")
    await until(lambda: not program.episode.num_open, "the calls to be closed at the host")


async def test_a_key_in_the_path_is_enough_and_a_stream_comes_as_it_is_made(
    program: Elsewhere,
) -> None:
    program.script.stops_at = 2
    url = f"{program.gateways[0].url}/e/{program.episode.key}/v1"
    async with program.openai(base_url=url, api_key="none") as client:
        stream = await client.chat.completions.create(model="any", messages=SAY, stream=True)  # type: ignore[call-overload]
        first = await anext(stream)
        await until(lambda: program.episode.num_open == 1, "the host to know of the call")
        program.script.go_on.set()
        rest = [chunk async for chunk in stream]
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in (first, *rest) if chunk.choices
    )
    assert text == "You said: Hello"


async def test_what_one_gateway_has_answered_another_knows(program: Elsewhere) -> None:
    async with program.openai(0) as one, program.openai(1) as other:
        first = await one.responses.create(model="any", input="Hello")
        second = await other.responses.create(
            model="any", input="And?", previous_response_id=first.id
        )
    assert second.output_text == "You said: And?"
    assert program.script.asked[1].previous == 0
    reward = {"reward": 0.5, "call": first.id}
    answer = await program.gateways[1].post("/v1/episode/reward", reward, **program.key)
    assert (answer.status, answer.json["call"]) == (200, 0)
    assert program.episode.call_rewards == {0: 0.5}


async def test_the_host_answers_what_is_said_of_the_episode(program: Elsewhere) -> None:
    one, other = program.gateways
    told = (await one.get("/v1/episode", **program.key)).json
    assert (told["input"], told["seed"]) == ({"question": "2 + 2"}, 7)
    added = {"reward": 1.0, "mode": "add"}
    for gateway in (one, other, one):  # a replayed post counts once, wherever it comes from
        assert (await gateway.post("/v1/episode/reward", added, **program.key)).status == 200
    assert program.episode.reward == 1.0
    bad = await one.post("/v1/episode/reward", {"reward": "much"}, **program.key)
    assert bad.status == 400
    assert "must be a finite number" in bad.text
    done = {"status": "done", "success": True}
    assert (await other.post("/v1/episode/end", done, **program.key)).status == 200
    assert program.episode.said_end.is_set()
    late = await other.post("/v1/chat/completions", {"messages": SAY}, **program.key)
    assert late.status == 401
    again = await one.post("/v1/episode/reward", {"reward": 2.0}, **program.key)
    assert again.status == 401
    assert "post rewards before the end" in again.text


async def test_an_end_that_came_through_another_gateway_ends_open_calls(
    program: Elsewhere,
) -> None:
    program.script.stops_at = 0
    one, other = program.gateways
    calling = one.post("/v1/chat/completions", {"messages": SAY}, **program.key)
    call = asyncio.create_task(calling)
    await until(lambda: program.episode.num_open == 1, "the host to know of the call")
    assert (await other.post("/v1/episode/end", {}, **program.key)).status == 200
    answer = await call
    assert answer.status == 401
    assert "the episode is over" in answer.text


async def test_a_key_ends_with_its_try(program: Elsewhere) -> None:
    one = program.gateways[0]
    assert (await one.get("/v1/episode", **program.key)).status == 200
    program.episode.over = "its program was stuck"
    program.proxy.close(program.episode.episode)
    answer = await one.post("/v1/episode/reward", {"reward": 1}, **program.key)
    assert answer.status == 401
    assert "its program was stuck" in answer.text
    call = await one.post("/v1/chat/completions", {"messages": SAY}, **program.key)
    assert call.status == 401
    assert call.headers["x-should-retry"] == "false"
    unknown = await program.gateways[1].post(
        "/v1/chat/completions", {"messages": SAY}, **program.key
    )
    assert unknown.status == 401
    assert "stuck" in unknown.text


async def test_forged_keys_are_refused_by_the_host(program: Elsewhere) -> None:
    key = program.episode.key
    other = key[:-1] + ("0" if key[-1] != "0" else "1")
    for forged in (other, "tmqe_short", f"tmqe_local.{program.episode.job}"):
        header = {"authorization": f"Bearer {forged}"}
        for path in ("/v1/chat/completions", "/v1/episode/reward", "/v1/messages"):
            answer = await program.gateways[0].post(path, {"reward": 1}, **header)
            assert answer.status == 401, answer.text
        assert (await program.gateways[0].get(f"/e/{forged}/v1/episode")).status == 401
    assert program.episode.reward is None


async def test_an_episodes_key_opens_nothing_else_of_the_gateway(program: Elsewhere) -> None:
    for path in ("/api/v1/jobs", "/jobs", "/metrics", "/v1/completions"):
        assert (await program.gateways[0].get(path, **program.key)).status == 404
    models = (await program.gateways[0].get("/v1/models")).json
    assert models["data"] == [], "without an episode's key /v1 is serving's"


async def test_large_bodies_are_refused_in_the_words_of_the_api(program: Elsewhere) -> None:
    body = b'{"messages": "' + b"x" * (100 << 20) + b'"}'
    async with httpx.AsyncClient(base_url=program.gateways[0].url, timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/messages", content=body, headers=program.key)
    assert answer.status_code == 413
    assert answer.json()["type"] == "error"
    program.script.say = lambda *_: "fine"
    large = {"messages": [{"role": "user", "content": "x" * (6 << 20)}]}
    answer = await program.gateways[0].post("/v1/chat/completions", large, **program.key)
    assert answer.status == 200
