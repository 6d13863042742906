"""Programs elsewhere in a pool with users: what their keys are worth, and what hostile ones try."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
from tinkermq.broker.client.keys import EpisodeIdentity, episode_key
from tinkermq.broker.client.login import CREDENTIALS_VARIABLE
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jobs import JobStore
from tinkermq.schemas.agent import CallRequest, EpisodePost, GiveReply, GiveRequest
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.elsewhere import Elsewhere, elsewhere
from tests.support.gateway import Gateway, run_gateway
from tests.support.secured import SecuredPool, environment, refused_publish, secured
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

SAY = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Guarded:
    """A gateway to a pool with a user and a job."""

    gateway: Gateway
    pool: SecuredPool
    ada: JobScope


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """A gateway to a secured pool."""
    folder = tmp_path_factory.mktemp("guarded")
    async with secured(folder) as pool:
        for user in ("ada", "mallory"):
            await pool.user(user)
        ada = await pool.job("ada", "job-of-ada")
        with environment(**{CREDENTIALS_VARIABLE: str(pool.secrets.credentials("gateway"))}):
            async with run_gateway(pool.server.url, folder) as gateway:
                yield Guarded(gateway, pool, ada)


@pytest_asyncio.fixture(loop_scope="session", params=["ada", "environment-0"])
async def program(guarded: Guarded, request: pytest.FixtureRequest) -> AsyncIterator[Elsewhere]:
    """A program whose episode is hosted by a user's own process, or by the pool."""
    pool, scope = guarded.pool, guarded.ada
    is_user = request.param == "ada"
    host = await (pool.user("ada") if is_user else pool.process(scope, request.param))
    generator = await pool.process(scope, "generator-0")
    async with elsewhere(host, generator, scope, guarded.gateway) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def hosted(guarded: Guarded) -> AsyncIterator[Elsewhere]:
    """A program whose episode is hosted by a user's own process."""
    host = await guarded.pool.user("ada")
    generator = await guarded.pool.process(guarded.ada, "generator-0")
    async with elsewhere(host, generator, guarded.ada, guarded.gateway) as made:
        yield made


async def test_a_program_calls_and_posts_with_its_key(program: Elsewhere) -> None:
    async with program.openai() as client:
        chat = await client.chat.completions.create(model="any", messages=SAY)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == "You said: Hello"
    gateway = program.gateways[0]
    told = await gateway.post("/v1/episode/reward", {"reward": 0.5, "call": "c0"}, **program.key)
    assert told.status == 200
    assert (program.episode.num_calls, program.episode.call_rewards) == (1, {0: 0.5})


async def test_keys_that_no_host_has_signed_are_refused_by_the_broker(
    guarded: Guarded, hosted: Elsewhere
) -> None:
    key, job, name = hosted.episode.key, guarded.ada.job, hosted.episode.episode
    for forged in (
        key.replace(f".{name}.", f".{name}-1."),
        key.replace("_ada.", "_mallory."),
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        episode_key(EpisodeIdentity("ada", job, name), b"guessed" * 8),
        guarded.pool.keys["ada"].replace("tmq_", "tmqe_"),
    ):
        answer = await guarded.gateway.post(
            CHAT, {"messages": SAY}, authorization=f"Bearer {forged}"
        )
        assert answer.status == 401
        assert answer.json["error"]["type"] == "authentication_error"
        assert answer.headers["x-should-retry"] == "false"
    assert not hosted.script.asked


async def test_a_signed_key_of_an_episode_that_nobody_hosts_is_worth_nothing(
    guarded: Guarded, hosted: Elsewhere
) -> None:
    past = hosted.proxy.new_key(f"{hosted.episode.episode}-0")
    answer = await guarded.gateway.post(CHAT, {"messages": SAY}, authorization=f"Bearer {past}")
    assert answer.status == 401
    assert "no host has the episode" in answer.text
    again = await guarded.gateway.post(CHAT, {"messages": SAY}, authorization=f"Bearer {past}")
    assert again.status == 401


async def test_users_take_episodes_of_their_own_jobs_only(guarded: Guarded) -> None:
    pool, scope = guarded.pool, JobScope("ada", "given-by-ada")
    record = JobRecord(
        job=scope.job,
        name="given",
        user="ada",
        state="RUNNING",
        config={"agent": {"client": True}, "env": {"hosts": 1}},
        actors=[ActorPlacement(name="environment-0", role="environment")],
        created=time.time(),
    )
    await JobStore(await pool.service("scheduler")).create(record, "test")
    host = await pool.process(scope, "environment-0")

    async def give(request: GiveRequest) -> GiveReply:
        return GiveReply(episode=f"g-5-{request.name}", key="tmqe_none")

    service = await Service.start(host, name="given", description="given")
    await service.endpoint("give", scope.env_give, GiveRequest, give)
    keys = {user: {"authorization": f"Bearer {key}"} for user, key in pool.keys.items()}
    body = {"job": "given", "wait_s": 20}
    taken = await guarded.gateway.post("/v1/episodes", body, idempotency_key="0", **keys["ada"])
    assert (taken.status, taken.json["id"]) == (201, "g-5-0"), taken.text
    for name in ("given", scope.job):
        other = await guarded.gateway.post("/v1/episodes", {"job": name}, **keys["mallory"])
        assert (other.status, "no run" in other.text) == (404, True)
    end = "/v1/episodes/g-5-0/end"
    assert (await guarded.gateway.post(end, {}, **keys["mallory"])).status == 404
    assert (await guarded.gateway.post(end, {}, **keys["ada"])).status == 410
    assert (await guarded.gateway.post("/v1/episodes", body)).status == 401
    await refused_publish(await pool.user("mallory"), scope.env_give)
    await service.stop(0)


async def test_keys_of_users_and_of_episodes_stay_what_they_are(
    guarded: Guarded, hosted: Elsewhere
) -> None:
    user = {"authorization": f"Bearer {guarded.pool.keys['ada']}"}
    answer = await guarded.gateway.post(CHAT, {"model": "x", "messages": SAY}, **user)
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert (await guarded.gateway.get("/api/v1/whoami", **user)).json["user"] == "ada"
    for path in ("/api/v1/whoami", "/api/v1/jobs", "/jobs"):
        assert (await guarded.gateway.get(path, **hosted.key)).status == 404
    form = await guarded.gateway.form("/login", f"key={hosted.episode.key}".encode())
    assert form.status != 303
    assert "set-cookie" not in {name.lower() for name in form.headers}


async def test_a_program_with_a_connection_of_its_own_gets_no_further(
    guarded: Guarded, hosted: Elsewhere
) -> None:
    scope, script, name = guarded.ada, hosted.script, hosted.episode.episode
    own = await guarded.pool.connected(hosted.episode.key)
    post = EpisodePost(request="r", key="tmqe_x", source="s", num_open=64)
    inbox = own.nc.new_inbox()
    heard: list[bytes] = []
    listening = await own.listen(inbox, lambda message: heard.append(message.data))
    await own.nc.publish(scope.episode(name, "post"), post.to_bytes(), reply=inbox)
    await until(lambda: bool(heard), "the host's refusal")
    assert b"not the key of the episode" in heard[-1]
    assert not hosted.episode.num_open
    call = CallRequest.model_validate({"request": "c", "messages": [{"role": "user"}]})
    for other in (f"{name}-1", "g-0-0"):
        await refused_publish(own, scope.episode(other, "call"), call.to_bytes())
    await refused_publish(own, f"$JS.API.DIRECT.GET.{scope.stream_rollout}", b"{}")
    # an answer is sent to inboxes only: nothing of the job can be made to hear one
    await own.nc.publish(scope.episode(name, "call"), call.to_bytes(), reply=scope.rollout(1))
    await own.nc.flush()
    async with hosted.openai() as client:
        await client.chat.completions.create(model="any", messages=SAY)  # type: ignore[arg-type]
    assert [one.request for one in script.asked if one.request == "c"] == []
    await listening.stop()


async def test_what_a_program_says_of_its_calls_is_bounded(
    guarded: Guarded, hosted: Elsewhere
) -> None:
    own = await guarded.pool.connected(hosted.episode.key)
    subject = guarded.ada.episode(hosted.episode.episode, "post")
    for number in range(200):
        told = EpisodePost(
            request=f"r{number}", key=hosted.episode.key, source=f"s{number}", num_open=1
        )
        await own.nc.publish(subject, told.to_bytes(), reply=own.nc.new_inbox())
    await own.nc.flush()
    await until(lambda: hosted.episode.num_open > 0, "the host to hear")
    assert hosted.episode.num_open <= 64
    assert await still_answers(hosted)


async def test_an_endless_body_is_cut_off(guarded: Guarded, hosted: Elsewhere) -> None:
    host, port = guarded.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {hosted.episode.key}\r\n"
    writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    answer = asyncio.create_task(reader.readline())
    chunk, num_bytes = b"x" * (1 << 20), 0
    while not answer.done() and num_bytes < 100 << 20:
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
        num_bytes += len(chunk)
    assert b"413" in await answer
    writer.transport.abort()


async def test_requests_of_one_episode_are_bounded(guarded: Guarded, hosted: Elsewhere) -> None:
    hosted.script.stops_at = 0
    async with httpx.AsyncClient(base_url=guarded.gateway.url, timeout=PATIENCE_S) as client:
        many = [
            asyncio.create_task(
                client.post(CHAT, json={"messages": SAY, "seed": seed}, headers=hosted.key)
            )
            for seed in range(70)
        ]
        await until(lambda: sum(one.done() for one in many) >= 6, "the requests over the bound")
        refused = [one.result() for one in many if one.done()]
        assert {one.status_code for one in refused} == {429}
        assert refused[0].headers["x-should-retry"] == "true"
        users = {"authorization": f"Bearer {guarded.pool.keys['ada']}"}
        assert (await guarded.gateway.get("/api/v1/whoami", **users)).status == 200
        hosted.script.go_on.set()
        answers = await asyncio.gather(*many)
    assert sum(one.status_code == 200 for one in answers) == 64


async def still_answers(program: Elsewhere) -> bool:
    """Whether the program is answered."""
    async with program.openai() as client:
        chat = await client.chat.completions.create(model="any", messages=SAY)  # type: ignore[arg-type]
    return chat.choices[0].message.content == "You said: Hello"
