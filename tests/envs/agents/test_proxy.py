"""The proxy as the makers' own libraries use it."""

from typing import Any

import openai
import pytest
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy

from tests.support.scripted_generator import Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("generator")


def openai_client(proxy: ModelProxy, episode: ProgramEpisode, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's library, as the environment of a program leads it."""
    env = proxy.env_of(episode)
    return openai.AsyncOpenAI(
        base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], **options
    )


async def test_a_chat_is_answered(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with openai_client(proxy, episode) as client:
        answer = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Hello"}]
        )
    assert answer.choices[0].message.content == "You said: Hello"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 11
    await until(lambda: bool(script.delivered), "the delivery to be told")
    assert script.delivered[0].calls == [0]
    assert script.delivered[0].whole
    assert episode.num_calls == 1
    assert episode.num_open == 0
