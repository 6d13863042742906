"""Episodes that are given to those who ask for them."""

import asyncio

import pytest
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.leases import EpisodeLease, LeaseRequests
from tinkermq.schemas.agent import GiveReply, GiveRequest
from tinkermq.schemas.wire.errors import BusyError

from tests.support.waiting import until


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
    await until(lambda: asked._wanted == 1, "the question")
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
