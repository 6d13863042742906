"""A program elsewhere: its episode's host, who plays it, and gateways between them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import openai
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.gateway import Gateway
from tests.support.scripted_generator import Script, ScriptedGenerator

_numbers = count(1)


@dataclass
class Elsewhere:
    """One episode whose program comes through a gateway."""

    proxy: ModelProxy
    episode: ProgramEpisode
    script: Script
    gateways: tuple[Gateway, ...]
    background: set["asyncio.Task[Any]"] = field(default_factory=set["asyncio.Task[Any]"])

    @property
    def key(self) -> dict[str, str]:
        """The header with the episode's key."""
        return {"authorization": f"Bearer {self.episode.key}"}

    def openai(self, number: int = 0, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's library, as the environment of a program leads it."""
        env = self.proxy.env_of(self.episode, self.gateways[number].url)
        url, key = env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"]
        found: dict[str, Any] = {"base_url": url, "api_key": key, "max_retries": 0}
        return openai.AsyncOpenAI(**{**found, **options})


@asynccontextmanager
async def elsewhere(
    host: Broker,
    generator: Broker,
    scope: JobScope,
    *gateways: Gateway,
) -> AsyncIterator[Elsewhere]:
    """Host an episode with `host`, and play it with `generator`.

    Each has a name of its own, and so a key: a gateway remembers for a while that one is over.
    """
    episode = f"g-{next(_numbers)}-0"
    script = Script()
    async with ModelProxy(host, scope, gateway=gateways[0].url) as proxy:
        opened = ProgramEpisode(
            episode, {"question": "2 + 2"}, seed=7, job=scope.job, key=proxy.new_key(episode)
        )
        opened.deadline = time.monotonic() + 600
        proxy.open(opened)
        async with ScriptedGenerator(generator, scope, script).playing(episode):
            yield Elsewhere(proxy, opened, script, gateways)
