"""Play the episodes of an inference, many at once, and keep what they came to."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...broker.disk import with_room
from ...envs.evaluation import summarize
from ...schemas.wire.errors import ConfigError
from .inference_tasks import Tasks
from .results import EpisodeResult, ResultFile

if TYPE_CHECKING:
    from ...envs import AbstractGame


@dataclass(frozen=True)
class PlayOptions:
    """Which episodes are played, and how; None means as the job is configured."""

    game_class: "type[AbstractGame] | None" = None
    """The game, hosted here; None: the job's own, hosted by the pool."""
    game_kwargs: Mapping[str, Any] | None = None
    """Arguments of its constructor."""
    data_path: str | Path | Sequence[str | Path] | None = None
    """Parquet or JSONL files of its rows; None: it generates its states from seeds."""
    output_path: str | Path | None = None
    """JSONL file of the results, which is gone on with."""
    tasks: Sequence[int] | None = None
    """A fixed list of rows or seeds."""
    max_samples: int | None = None
    """Tasks that are played at most."""
    samples_per_task: int = 1
    """Episodes of a task; over 1 gives pass@k."""
    seed: int = 0
    """Seed from which those of the rows follow."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    max_turns: int | None = None
    """Answers of the policy per episode."""
    max_tokens_per_turn: int | None = None
    """Tokens that the policy may generate in one turn."""
    max_tokens: int | None = None
    """Tokens after the first prompt, observations included."""
    success_reward: float = 0.5
    """An episode whose return is above this is solved, unless its game says so itself."""
    max_concurrent: int = 256
    """Episodes that are played at the same time."""
    token_ids: bool = False
    """Keep the token ids in the results."""
    on_start: Callable[[int, int], None] | None = None
    """Called with the number of episodes, and of those that are there already."""
    on_result: Callable[[EpisodeResult], None] | None = None
    """Called with each episode."""

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers that make no sense."""
        if self.samples_per_task < 1 or self.max_concurrent < 1:
            raise ConfigError(
                f"samples_per_task={self.samples_per_task} and "
                f"max_concurrent={self.max_concurrent} must be at least 1"
            )
        if self.samples_per_task > 1 and self.temperature == 0:
            raise ConfigError(
                f"samples_per_task={self.samples_per_task} with temperature=0 plays the same "
                "episode again",
                hint="set a temperature, or samples_per_task=1",
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """How episodes are sampled; results of other sampling are kept apart."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_turns": self.max_turns,
            "max_tokens_per_turn": self.max_tokens_per_turn,
            "max_tokens": self.max_tokens,
        }


@dataclass
class InferenceReport:
    """What an inference came to."""

    results: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """The episodes, by task and sample; also those of an earlier start."""
    failed: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """Episodes that could not be played; `error` says why."""
    samples: int = 1

    def __iter__(self) -> Iterator[EpisodeResult]:
        """Return the episodes one by one."""
        return iter(self.results)

    def __len__(self) -> int:
        """Return the number of episodes that were played."""
        return len(self.results)

    @property
    def summary(self) -> dict[str, Any]:
        """Mean reward and accuracy with 95 % intervals, pass@k, the same by type."""
        scores = summarize((result.scored for result in self.results), self.samples)
        return {**scores, "failed_episodes": len(self.failed)}


async def play_all(
    chosen: Tasks,
    options: PlayOptions,
    settings: Mapping[str, Any],
    play: Callable[[int, int], Awaitable[EpisodeResult]],
) -> InferenceReport:
    """Play what is not in the file of results yet; `settings` say what may stand in one file.

    `play` is called with task and sample. Raises ConfigError for a file of other settings,
    StorageError, and what `play` raises, in a group.
    """
    wanted = [(task, sample) for task in chosen.tasks for sample in range(options.samples_per_task)]
    failed: list[EpisodeResult] = []
    with ResultFile(options.output_path, settings) as file:
        if options.on_start is not None:
            options.on_start(len(wanted), sum(key in file.done for key in wanted))
        left = iter([key for key in wanted if key not in file.done])

        async def play_next() -> None:
            for task, sample in left:
                result = await play(task, sample)
                await _keep(file, result)
                if result.error is not None:
                    failed.append(result)
                if options.on_result is not None:
                    options.on_result(result)

        async with asyncio.TaskGroup() as group:
            for number in range(min(options.max_concurrent, len(wanted))):
                group.create_task(play_next(), name=f"player {number}")
    results = [file.done[key] for key in wanted if key in file.done]
    return InferenceReport(results, failed, options.samples_per_task)


async def _keep(file: ResultFile, result: EpisodeResult) -> None:
    """Write a result as soon as there is room for it."""

    async def add() -> None:
        file.add(result)

    await with_room(add, f"the result of task {result.task}", lambda _: contextlib.nullcontext())
