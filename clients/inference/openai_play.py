"""Play a game with a model behind an OpenAI-compatible URL, without a pool.

The games run in this process as in an environment host; the conversations travel as text, so the
endpoint renders and tokenises each of them anew. For the tokens of training serve the model with
`tinkermq serve` and play with `tinkermq infer`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ...envs.data import HostData
from ...envs.evaluation import is_success, kind_of
from ...envs.game import AbstractGame, ChatMessage, StepResult
from ...envs.running.episodes import LOOK_S, Opening
from ...envs.running.runners import Runner, make_runner
from ...schemas.config.job import EnvConfig
from ...schemas.wire.errors import ConfigError, GameError
from .inference_tasks import Tasks, chosen_tasks, hosted_env
from .openai_endpoint import Endpoint
from .play import InferenceReport, PlayOptions, play_all
from .results import EpisodeResult


async def play_with_endpoint(endpoint: Endpoint, options: PlayOptions) -> InferenceReport:
    """Play episodes of `options.game_class`, many at once.

    Raises ConfigError, DataError, GameError for a game that cannot be made, and what
    `Endpoint.answer` raises. An episode whose game fails is told in the report.
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
        what = "roles" if facts.roles else "tools, which the endpoint would render in its own way"
        raise ConfigError(
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
        """Play one episode; one whose game fails says so."""
        start = self._chosen.start(task)
        name = uuid.uuid4().hex
        record = self._data.record(start["split"], start["sample"])
        try:
            messages = await self._runner.reset(Opening(name, start["seed"], record))
            played = await self._turns(name, list(messages), seed=start["seed"] + sample)
        except GameError as error:
            model = self._endpoint.model
            return EpisodeResult(task, sample, 0.0, False, model=model, error=error.message)
        finally:
            self._runner.drop(name)
        reward = sum(played.rewards)
        return EpisodeResult(
            task=task,
            sample=sample,
            reward=reward,
            success=is_success(reward, played.last.info, self._options.success_reward),
            rewards=played.rewards,
            type=kind_of(played.last.info, record.data_source if record else ""),
            finish="length" if played.cut else "done" if played.last.done else "turns",
            num_turns=len(played.rewards),
            num_tokens=played.num_tokens,
            messages=played.messages,
            info=played.last.info,
            model=played.model,
        )

    async def _turns(self, name: str, messages: list[ChatMessage], *, seed: int) -> "_Played":
        """Let model and game take turns until one of them is done."""
        request = self._request(seed)
        loop = asyncio.get_running_loop()
        rewards: list[float] = []
        num_tokens = 0
        while True:
            answer = await loop.run_in_executor(
                self._threads, self._endpoint.answer, messages, request
            )
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            result = await self._runner.step(name, answer.text)
            rewards.append(result.reward)
            num_tokens += answer.num_tokens
            if result.done or len(rewards) == self._options.max_turns:
                return _Played(messages, rewards, result, num_tokens, answer.model, answer.cut)
            messages = [*messages, {"role": result.role, "content": result.observation}]

    def _request(self, seed: int) -> dict[str, Any]:
        """Return what the endpoint is asked besides the conversation."""
        options = self._options
        request: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p}
        if options.temperature > 0:
            request["seed"] = seed % 2**31
        if options.max_tokens_per_turn is not None:
            request["max_tokens"] = options.max_tokens_per_turn
        return request


@dataclass(frozen=True)
class _Played:
    """An episode that has ended."""

    messages: list[ChatMessage]
    rewards: list[float]
    last: StepResult
    num_tokens: int
    model: str
    cut: bool
    """The last answer was."""
