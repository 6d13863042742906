"""Play a game with a model behind an OpenAI-compatible URL, without a pool.

The games run in this process as in an environment host. The conversations are sent as text, so the
endpoint renders and tokenises them. To play with the same tokens as in training, serve the model
with `tinkermq serve` and play with `tinkermq infer`.
"""

import asyncio
import contextlib
import json
import os
import ssl
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import stamina

from ...envs.data import HostData
from ...envs.evaluation import is_success, kind_of
from ...envs.game import AbstractGame, ChatMessage
from ...envs.proxies import SyncProxiedTransport
from ...envs.running.episodes import LOOK_S, Opening
from ...envs.running.runners import Runner, make_runner
from ...schemas.chat_messages import with_text_arguments
from ...schemas.config.job import EnvConfig
from ...schemas.wire import errors
from ...schemas.wire.images import with_data_urls
from .play import (
    EpisodeResult,
    InferenceReport,
    PlayOptions,
    Tasks,
    chosen_tasks,
    hosted_env,
    play_all,
)

# A model behind an OpenAI-compatible URL.

KEY_VARIABLE = "OPENAI_API_KEY"
ANSWER_TIMEOUT_S = 300.0
_ATTEMPTS = 6
_SHOWN = 300


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible API."""

    url: str
    """Base URL: `http://host:8000/v1`."""
    model: str
    """Name of the model at that URL."""

    @classmethod
    def find(cls, url: str, model: str | None) -> "Endpoint":
        """Return the endpoint of `model`, or of the only model that it serves.

        The key is $OPENAI_API_KEY. Raises ConfigError, NotFoundError, AuthError.
        """
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise errors.ConfigError(f"{url!r} must be a URL", hint="write http://HOST:PORT/v1")
        if model is not None:
            return cls(url, model)
        served = [
            str(model_info["id"]) for model_info in _send(f"{url}/models", None).get("data", [])
        ]
        if len(served) != 1:
            raise errors.ConfigError(
                f"{url} serves {len(served)} models: {', '.join(served) or 'none'}",
                hint="name one: --model-name NAME",
            )
        return cls(url, served[0])

    def answer(self, messages: "Sequence[ChatMessage]", options: Mapping[str, Any]) -> "ChatAnswer":
        """Return the model's answer to a conversation. Raises as `find` does, EngineError."""
        conversation = [with_text_arguments(message) for message in with_data_urls(messages)]
        body = {"model": self.model, "messages": conversation, **options}
        reply = _send(f"{self.url}/chat/completions", body)
        try:
            choice = reply["choices"][0]
            usage: dict[str, Any] = reply.get("usage") or {}
            tokens = int(usage.get("completion_tokens") or 0)
            text = str(choice["message"].get("content") or "")
            cut = choice.get("finish_reason") == "length"
            return ChatAnswer(text, tokens, str(reply.get("model") or self.model), cut)
        except (KeyError, IndexError, TypeError) as error:
            raise errors.EngineError(f"{self.url} gave no answer: {str(reply)[:_SHOWN]}") from error


@dataclass(frozen=True)
class ChatAnswer:
    """One answer of a model."""

    text: str
    num_tokens: int
    model: str
    cut: bool = False
    """Whether it was cut by its token limit."""


class _Transient(Exception):
    """A failed call that a retry may repair."""


def _send(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Call an endpoint, with retries while it is busy; return its JSON answer."""
    try:
        for attempt in stamina.retry_context(on=_Transient, attempts=_ATTEMPTS, timeout=None):
            with attempt:
                return _send_once(url, body)
    except _Transient as error:
        raise errors.NotFoundError(
            f"{url} does not answer: {error}", hint="check that the model is served at this URL"
        ) from error
    raise AssertionError("an attempt returns or raises")


def _send_once(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    try:
        with httpx.Client(
            transport=SyncProxiedTransport(url, verify=_trusted()),
            timeout=ANSWER_TIMEOUT_S,
            follow_redirects=True,
            headers=headers,
        ) as client:
            reply = client.get(url) if body is None else client.post(url, json=body)
        if reply.status_code >= 300:
            raise _refusal(url, reply.status_code, reply.text[:_SHOWN])
        return reply.json()
    except httpx.TransportError as error:
        raise _Transient(str(error)) from error
    except TypeError as error:
        raise errors.ConfigError(
            f"the conversation has content other than text: {error}",
            hint="serve the model with `tinkermq serve` and play with `tinkermq infer`",
        ) from error
    except json.JSONDecodeError as error:
        raise errors.EngineError(f"{url} did not answer with JSON: {error}") from error


@cache
def _trusted() -> ssl.SSLContext:
    """Return the trusted certificate authorities; cached, since loading takes milliseconds."""
    return httpx.create_ssl_context()


def _refusal(url: str, code: int, body: str) -> Exception:
    if code == 429 or code >= 500:
        return _Transient(f"{code} {body}")
    if code in (401, 403):
        return errors.AuthError(f"{url} refuses the key: {body}", hint=f"set ${KEY_VARIABLE}")
    return errors.ConfigError(
        f"{url} answered {code}: {body}", hint="see the endpoint's own documentation"
    )


async def play_with_endpoint(endpoint: Endpoint, options: PlayOptions) -> InferenceReport:
    """Play episodes of `options.game_class` concurrently.

    Raises ConfigError, DataError, GameError for a game that cannot be created, and the errors of
    `Endpoint.answer`. Episodes whose game fails are listed in the report.
    """
    game_class = options.game_class
    env = hosted_env(game_class, options.data_path, options.game_kwargs)
    assert env is not None
    assert game_class is not None
    settings = {
        "model": endpoint.model,
        "url": endpoint.url,
        "env": env.model_dump(),
        "sampling": options.sampling,
        "seed": options.seed,
    }
    with contextlib.closing(HostData(env, options.seed)) as data:
        numbers = chosen_tasks(options.tasks, data.num_train, options.max_samples)
        chosen = Tasks("train", numbers, data.num_train is not None, options.seed)
        with ThreadPoolExecutor(options.max_concurrent, "endpoint") as threads:
            async with _running(env, game_class) as runner:
                player = _Player(endpoint, options, chosen, data, runner, threads)
                return await play_all(chosen, options, settings, player.play)


@contextlib.asynccontextmanager
async def _running(env: EnvConfig, game_class: type[AbstractGame]) -> AsyncIterator[Runner]:
    """Run games as an environment host does."""
    runner = make_runner(env, game_class)

    async def end_overdue() -> None:
        while True:
            runner.end_overdue()
            await asyncio.sleep(LOOK_S)

    facts = await runner.start()
    if facts.tools or facts.roles:
        await runner.stop()
        what = "roles" if facts.roles else "tools, which each endpoint renders in its own way"
        raise errors.ConfigError(
            f"{facts.name} has {what}: it cannot be played with a URL",
            hint="serve the model in a pool: `tinkermq serve`, then `tinkermq eval` or `infer`",
        )
    ending = asyncio.create_task(end_overdue(), name="end overdue calls")
    try:
        yield runner
    finally:
        ending.cancel()
        await runner.stop()


class _Player:
    """Plays episodes, each with a conversation of its own."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: PlayOptions,
        chosen: Tasks,
        data: HostData,
        runner: Runner,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._chosen = chosen
        self._data = data
        self._runner = runner
        self._threads = threads

    async def play(self, task: int, sample: int) -> EpisodeResult:
        """Play one episode; a failure of the game becomes its result."""
        start, options = self._chosen.start(task), self._options
        name, loop = uuid.uuid4().hex, asyncio.get_running_loop()
        record = self._data.record(start["split"], start["sample"])
        request = self._request(start["seed"] + sample)
        rewards: list[float] = []
        num_tokens = 0
        try:
            messages = list(await self._runner.reset(Opening(name, start["seed"], record)))
            while True:
                answer = await loop.run_in_executor(
                    self._threads, self._endpoint.answer, messages, request
                )
                messages = [*messages, {"role": "assistant", "content": answer.text}]
                last = await self._runner.step(name, answer.text)
                rewards.append(last.reward)
                num_tokens += answer.num_tokens
                if last.done or len(rewards) == options.max_turns:
                    break
                messages = [*messages, *last.messages()]
        except errors.GameError as error:
            model = self._endpoint.model
            return EpisodeResult(task, sample, 0.0, False, model=model, error=error.message)
        finally:
            self._runner.drop(name)
        reward = sum(rewards)
        return EpisodeResult(
            task=task,
            sample=sample,
            reward=reward,
            success=is_success(reward, last.info, options.success_reward),
            rewards=rewards,
            type=kind_of(last.info, record.data_source if record else ""),
            finish="length" if answer.cut else "done" if last.done else "turns",
            num_turns=len(rewards),
            num_tokens=num_tokens,
            messages=messages,
            info=last.info,
            model=answer.model,
        )

    def _request(self, seed: int) -> dict[str, Any]:
        """Return the request's fields besides the conversation."""
        options = self._options
        request: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p}
        if options.temperature > 0:
            request["seed"] = seed % 2**31
        if options.max_tokens_per_turn is not None:
            request["max_tokens"] = options.max_tokens_per_turn
        return request
