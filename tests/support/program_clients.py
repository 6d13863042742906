"""The makers' own libraries, and plain HTTP, as the environment of a program leads them."""

from typing import Any

import anthropic
import httpx
import openai
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy

from tests.support.waiting import PATIENCE_S


def openai_client(proxy: ModelProxy, episode: ProgramEpisode, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's library."""
    env = proxy.env_of(episode)
    return openai.AsyncOpenAI(
        base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"], **options
    )


def anthropic_client(
    proxy: ModelProxy, episode: ProgramEpisode, **options: Any
) -> anthropic.AsyncAnthropic:
    """Anthropic's library."""
    env = proxy.env_of(episode)
    return anthropic.AsyncAnthropic(
        base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"], **options
    )


def http_client(proxy: ModelProxy, episode: ProgramEpisode, **headers: str) -> httpx.AsyncClient:
    """Plain HTTP with the episode's key."""
    told = {"authorization": f"Bearer {episode.key}", **headers}
    return httpx.AsyncClient(base_url=proxy.base_url, headers=told, timeout=PATIENCE_S)


def chat_body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A request of Chat Completions."""
    return {"model": "any", "messages": [{"role": "user", "content": text}], **fields}


def response_body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A request of Responses."""
    return {"model": "any", "input": text, **fields}


def messages_body(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A request of Messages."""
    return {**chat_body(text), "max_tokens": 100, **fields}
