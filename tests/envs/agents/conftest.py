"""A proxy with one episode, and a generator that plays it by a script."""

from collections.abc import AsyncIterator

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.calls import ProxyTimes
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.scripted_generator import Script, ScriptedGenerator


@pytest.fixture
def episode(scope: JobScope) -> ProgramEpisode:
    """An episode of a program."""
    return ProgramEpisode(episode="t3-0", task_input={"question": "2 + 2"}, seed=7, job=scope.job)


@pytest.fixture
def script() -> Script:
    """What its generator says."""
    return Script()


@pytest.fixture
async def proxy(
    broker: Broker, scope: JobScope, episode: ProgramEpisode
) -> AsyncIterator[ModelProxy]:
    """A proxy on which the episode is open; nobody plays it yet."""
    times = ProxyTimes(silence_s=5.0, pause_s=0.02)
    async with ModelProxy(broker, scope, times=times) as proxy:
        proxy.open(episode)
        yield proxy


@pytest.fixture
async def generator(
    broker: Broker, scope: JobScope, episode: ProgramEpisode, script: Script
) -> AsyncIterator[ScriptedGenerator]:
    """Plays the episode."""
    async with ScriptedGenerator(broker, scope, script).playing(episode.episode) as generator:
        yield generator
