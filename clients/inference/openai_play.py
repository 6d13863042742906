"""Play a game with a model behind an OpenAI-compatible URL, without a pool.

The games run in this process as in an environment host; the conversations travel as text, so the
endpoint renders and tokenises each of them anew. For the tokens of training serve the model with
`tinkermq serve` and play with `tinkermq infer`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...envs.data.host_data import HostData
from ...envs.evaluation import is_success, kind_of
from ...envs.game import AbstractGame, ChatMessage, StepResult
from ...envs.running.episodes import Opening
from ...envs.running.runner import Runner, make_runner
from ...schemas.config.job import EnvConfig
from ...schemas.wire.errors import ConfigError, GameError
from .inference import InferenceReport, InferenceSampling
from .inference_tasks import Tasks, chosen_tasks, hosted_env
from .openai_endpoint import Endpoint
from .results import EpisodeResult, Key, ResultFile

_REAP_S = 0.1


async def play_with_endpoint(
    endpoint: Endpoint,
    game_class: type[AbstractGame],
    data_path: Sequence[str | Path] | None = None,
    *,
    sampling: InferenceSampling,
    game_kwargs: Mapping[str, Any] | None = None,
    tasks: Sequence[int] | None = None,
    max_samples: int | None = None,
    samples_per_task: int = 1,
    seed: int = 0,
    success_reward: float = 0.5,
    max_concurrent: int = 64,
    output_path: str | Path | None = None,
    on_result: Callable[[EpisodeResult], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
) -> InferenceReport:
    """Play episodes, many at once; see `run_inference` for the options.

    Raises ConfigError, DataError, GameError for a game that cannot be made, and what
    `Endpoint.answer` raises. An episode whose game fails is told in the report.
    """
    env = hosted_env(game_class, data_path, game_kwargs)
    assert env is not None
    settings = {
        "model": endpoint.model,
        "url": endpoint.url,
        "env": env.model_dump(),
        "sampling": vars(sampling),
        "seed": seed,
    }
    with contextlib.closing(HostData(env, seed)) as data, ResultFile(output_path, settings) as file:
        rows = data.num_train is not None
        chosen = Tasks("train", chosen_tasks(tasks, data.num_train, max_samples), rows, seed)
        wanted = [(task, sample) for task in chosen.tasks for sample in range(samples_per_task)]
        if on_start is not None:
            on_start(len(wanted), sum(key in file.done for key in wanted))
        failed: list[EpisodeResult] = []
        with ThreadPoolExecutor(max_concurrent, "endpoint") as threads:
            async with _running(env, game_class) as runner:
                players = _Players(endpoint, sampling, success_reward, data, runner, threads)
                async for result in players.play(chosen, wanted, file, max_concurrent):
                    if result.error is not None:
                        failed.append(result)
                    if on_result is not None:
                        on_result(result)
    results = [file.done[key] for key in wanted if key in file.done]
    return InferenceReport(results, failed, samples_per_task)


@contextlib.asynccontextmanager
async def _running(env: EnvConfig, game_class: type[AbstractGame]) -> AsyncIterator[Runner]:
    """Run games as an environment host does."""
    runner = make_runner(env, game_class)

    async def reap() -> None:
        while True:
            runner.reap()
            await asyncio.sleep(_REAP_S)

    facts = await runner.start()
    if facts.tools or facts.roles:
        await runner.stop()
        what = "roles" if facts.roles else "tools, which the endpoint would render in its own way"
        raise ConfigError(
            f"{facts.name} has {what}: it cannot be played with a URL",
            hint="serve the model in a pool: `tinkermq serve`, then `tinkermq eval` or `infer`",
        )
    reaping = asyncio.create_task(reap(), name="reap games")
    try:
        yield runner
    finally:
        reaping.cancel()
        await runner.stop()


class _Players:
    """Plays the episodes of one evaluation."""

    def __init__(
        self,
        endpoint: Endpoint,
        sampling: InferenceSampling,
        success_reward: float,
        data: HostData,
        runner: Runner,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._endpoint = endpoint
        self._sampling = sampling
        self._success_reward = success_reward
        self._data = data
        self._runner = runner
        self._threads = threads

    async def play(
        self, chosen: Tasks, wanted: Sequence[Key], file: ResultFile, max_concurrent: int
    ) -> AsyncIterator[EpisodeResult]:
        """Play what is wanted and not there yet; yield each result once it is on disk."""
        left = iter([key for key in wanted if key not in file.done])
        done: asyncio.Queue[EpisodeResult | None] = asyncio.Queue()

        async def work() -> None:
            for task, sample in left:
                result = await self._episode(chosen, task, sample)
                file.add(result)
                done.put_nowait(result)

        async def all_of_them() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for number in range(min(max_concurrent, len(wanted))):
                        group.create_task(work(), name=f"player {number}")
            finally:
                done.put_nowait(None)

        playing = asyncio.create_task(all_of_them(), name="players")
        try:
            while (result := await done.get()) is not None:
                yield result
            await playing
        finally:
            playing.cancel()

    async def _episode(self, chosen: Tasks, task: int, sample: int) -> EpisodeResult:
        start = chosen.start(task)
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
            success=is_success(reward, played.last.info, self._success_reward),
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
        options = self._options(seed)
        loop = asyncio.get_running_loop()
        rewards: list[float] = []
        num_tokens = 0
        while True:
            answer = await loop.run_in_executor(
                self._threads, self._endpoint.answer, messages, options
            )
            messages = [*messages, {"role": "assistant", "content": answer.text}]
            result = await self._runner.step(name, answer.text)
            rewards.append(result.reward)
            num_tokens += answer.num_tokens
            if result.done or len(rewards) == self._sampling.max_turns:
                return _Played(messages, rewards, result, num_tokens, answer.model, answer.cut)
            messages = [*messages, {"role": result.role, "content": result.observation}]

    def _options(self, seed: int) -> dict[str, Any]:
        sampling = self._sampling
        options: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.temperature > 0:
            options["seed"] = seed % 2**31
        if sampling.max_tokens_per_turn is not None:
            options["max_tokens"] = sampling.max_tokens_per_turn
        return options


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
