"""Episodes given to who asks for them, and a gateway's side of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.keys import read_episode_key
from tinkermq.broker.client.login import of_program
from tinkermq.broker.client.parts import ask_parts, last_part
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.leases import EpisodeLease, LeaseRequests
from tinkermq.envs.agents.proxy.exchange import BodyRoom, KeyRefused
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.envs.agents.proxy.remote_episode import HostTimes, RemoteEpisode
from tinkermq.schemas.agent import EpisodePost, EpisodePosted, GiveReply, GiveRequest, ReportedCall
from tinkermq.schemas.wire.errors import BusyError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, until

SAY = {"messages": [{"role": "user", "content": "Hello"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def host(broker: Broker, scope: JobScope) -> AsyncIterator[ModelProxy]:
    """A host that lets programs in by a gateway, too."""
    async with ModelProxy(broker, scope, gateway="https://pool") as proxy:
        yield proxy


@pytest.fixture
async def episode(host: ModelProxy, scope: JobScope) -> ProgramEpisode:
    """An episode that is open there."""
    opened = ProgramEpisode("t3-0", {}, job=scope.job, key=host.new_key("t3-0"))
    host.open(opened)
    return opened


@pytest.fixture
async def remote(broker: Broker, episode: ProgramEpisode) -> AsyncIterator[RemoteEpisode]:
    """The same episode at a gateway."""
    made = await remote_of(broker, episode.key)
    await made.check()
    yield made
    await made.close()


async def remote_of(broker: Broker, key: str) -> RemoteEpisode:
    """Connect with a key."""
    identity = read_episode_key(key)
    assert identity is not None
    own = await connect(broker.url, name="program", login=of_program(key, with_users=False))
    times = HostTimes(report_s=0.1, first_s=2.0, away_s=2.0)
    return RemoteEpisode(own, identity, key, BodyRoom(1 << 26), host_times=times)


def client_of(remote: RemoteEpisode, episode: ProgramEpisode) -> httpx.AsyncClient:
    """Return a program's client."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=remote),  # type: ignore[arg-type]
        base_url="http://pool",
        headers={"authorization": f"Bearer {episode.key}"},
        timeout=PATIENCE_S,
    )


def report(key: str, *calls: int, **more: int) -> EpisodePost:
    """A gateway's report."""
    answered = [ReportedCall(names=[f"call_{number}_"], calls=[number]) for number in calls]
    return EpisodePost(request=uuid.uuid4().hex, key=key, source="one", answered=answered, **more)  # type: ignore[arg-type]


async def told(broker: Broker, scope: JobScope, post: EpisodePost) -> EpisodePosted:
    """Send a post to the host."""
    subject = scope.episode("t3-0", "post")
    return await last_part(ask_parts(broker, subject, post, EpisodePosted, waiting_for="the host"))


async def test_a_call_that_is_reported_twice_counts_once(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, remote: RemoteEpisode
) -> None:
    del remote  # which has seen that the host listens
    for _ in range(2):
        posted = await told(broker, scope, report(episode.key, 0, 1, num_open=2))
        assert (posted.status, posted.over) == (0, "")
    assert (episode.num_calls, episode.num_open) == (2, 2)
    await told(broker, scope, report(episode.key, 1, 2))
    assert (episode.num_calls, episode.num_open) == (3, 0)


async def test_the_host_answers_nothing_but_what_is_said_of_the_episode(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, remote: RemoteEpisode
) -> None:
    del remote
    for path in (CHAT, "/v1/models", f"/e/{episode.key}/v1/episode"):
        for method in ("GET", "POST"):
            asked = report(episode.key).model_copy(update={"method": method, "path": path})
            assert (await told(broker, scope, asked)).status == 404
    with pytest.raises(PermissionError):
        await told(broker, scope, report(episode.key[:-1] + "x", 7))
    assert not episode.num_calls


async def test_an_open_call_ends_when_its_host_has_gone(
    broker: Broker,
    scope: JobScope,
    host: ModelProxy,
    episode: ProgramEpisode,
    remote: RemoteEpisode,
) -> None:
    script = Script(stops_at=0)
    async with (
        ScriptedGenerator(broker, scope, script).playing("t3-0"),
        client_of(remote, episode) as client,
    ):
        call = asyncio.create_task(client.post(CHAT, json=SAY))
        await until(lambda: episode.num_open == 1, "the host to know of the call")
        await host.__aexit__()
        answer = await call
    assert answer.status_code == 401
    assert "its host is away" in answer.text or "ended" in answer.text
    assert remote.over


async def test_a_key_that_no_host_knows_is_refused(
    broker: Broker, host: ModelProxy, episode: ProgramEpisode
) -> None:
    del episode
    other = await remote_of(broker, host.new_key("t3-1"))
    with pytest.raises(KeyRefused, match="no host has the episode"):
        await other.check()
    await other.close()
    random = await remote_of(broker, host.new_key("t3-0"))
    with pytest.raises(KeyRefused, match="not the key"):
        await random.check()
    await random.close()


# -- Episodes that are given to those who ask for them ---------------------------------------------


def given(name: str) -> EpisodeLease:
    return EpisodeLease(ProgramEpisode(name, {"question": "2+2"}), [], "http://x", {})


async def started(asked: LeaseRequests, name: str) -> EpisodeLease:
    """Start an episode as the host does, once somebody asks for one."""
    await asked.acquire()
    episode = given(name)
    asked.give(episode)
    return episode


def ask(asked: LeaseRequests, name: str = "", wait_s: float = 10) -> "asyncio.Task[GiveReply]":
    return asyncio.create_task(asked.answer(GiveRequest(name=name, wait_s=wait_s)), name="ask")


async def test_an_episode_starts_when_it_is_asked_for_and_not_before() -> None:
    asked = LeaseRequests(4)
    starting = asyncio.create_task(started(asked, "a"), name="start")
    await asyncio.sleep(0.01)
    assert not starting.done()
    reply = await ask(asked)
    assert (reply.episode, reply.task) == ("a", {"question": "2+2"})
    assert reply.key == (await starting).episode.key


async def test_the_same_name_gets_the_same_episode_while_it_is_under_way() -> None:
    asked = LeaseRequests(4)
    starting = asyncio.create_task(started(asked, "a"), name="start")
    assert (await ask(asked, "one")).episode == (await ask(asked, "one")).episode == "a"
    episode = await starting
    episode.episode.over = "it has ended"
    for dropped in episode.on_drop:
        dropped()
    assert (await ask(asked, "one", wait_s=0)).episode == ""


async def test_an_episode_whose_asker_has_gone_waits_for_the_next() -> None:
    asked = LeaseRequests(4)
    assert (await ask(asked, wait_s=0)).episode == ""
    waiting = ask(asked)
    await until(lambda: asked._num_requested == 1, "the question")
    await asked.acquire()
    waiting.cancel()
    await asyncio.wait({waiting})
    gone = given("gone")
    gone.episode.over = "it has ended"
    asked.give(gone)
    asked.give(given("a"))
    assert (await ask(asked)).episode == "a"


async def test_no_more_are_given_than_the_host_has_places() -> None:
    asked = LeaseRequests(1)
    starting = asyncio.create_task(started(asked, "a"), name="start")
    await ask(asked)
    await starting
    with pytest.raises(BusyError, match=r"agent.per_host=1 allows"):
        await ask(asked)
    asked.release()
    starting = asyncio.create_task(started(asked, "b"), name="start")
    assert (await ask(asked)).episode == "b"
    await starting
