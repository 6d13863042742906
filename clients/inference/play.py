"""Play the episodes of an inference concurrently, and store their results."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import structlog
from pydantic import ValidationError

from ...envs.evaluation import Scored, summarize, task_seed
from ...schemas.config.job import EnvConfig
from ...schemas.infer import PlayRequest
from ...schemas.local.disk import append_lines, is_full, with_room
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ConfigError, StorageError
from ...schemas.wire.message import summarize as brief

if TYPE_CHECKING:
    from ...envs import AbstractGame


# The results of an inference on disk: one JSON object per line, in the order in which they end.
#
# A repeated inference continues the file: it plays only missing and failed episodes, and drops an
# incomplete last line. Each line has a digest of the settings, so that a file never has results of
# two different inferences.

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

Key = tuple[int, int]
"""Task and number of the sample."""


@dataclass(frozen=True)
class EpisodeResult:
    """One episode of an inference."""

    task: int
    """Row of the data, or seed of a generated game."""
    sample: int
    """Number of the episode within its task."""
    reward: float
    """Return of the episode."""
    success: bool
    """Whether it counts as solved."""
    rewards: list[float] = field(default_factory=list[float])
    """Reward of each turn."""
    type: str = ""
    """Type of the task, or source of its data."""
    finish: str = ""
    """Why it ended: `done`, `turns`, or `length` if the last answer was cut."""
    num_turns: int = 0
    """Answers of the policy."""
    num_tokens: int = 0
    """Tokens that the policy generated."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The conversation."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """`info` of the game's last step."""
    model: str = ""
    """The model: `run@step`, or the name of the job."""
    token_ids: list[int] | None = None
    """Tokens of the whole conversation, if requested."""
    mask: list[int] | None = None
    """1 where the policy generated the token."""
    error: str | None = None
    """Why the episode failed; then reward and success have no meaning."""

    @property
    def key(self) -> Key:
        """Task and sample."""
        return self.task, self.sample

    @property
    def scored(self) -> Scored:
        """The values that a summary uses."""
        return Scored(self.task, self.sample, self.reward, self.success, self.type)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        if self.error is not None:
            return {key: fields[key] for key in ("task", "sample", "model", "error")}
        return fields


class ResultFile:
    """A JSONL file of results; without a path nothing is written."""

    def __init__(self, path: str | Path | None, settings: Mapping[str, Any]) -> None:
        """Read the results of an earlier inference with the same settings from `path`.

        Raises ConfigError for a file with other settings, StorageError.
        """
        self._path = None if path is None else Path(path).expanduser()
        self._digest = hashlib.sha256(pack(dict(settings))).hexdigest()[:12]
        self.done: dict[Key, EpisodeResult] = {}
        """Episodes that need not be played again."""
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                append_lines(self._path, [])
            except OSError as error:
                raise _unwritable(self._path, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: each result is on disk already."""

    def add(self, result: EpisodeResult) -> None:
        """Append one result; it is on disk when this returns."""
        if result.error is None:
            self.done[result.key] = result
        if self._path is None:
            return
        line = json.dumps({**_plain(result.to_dict()), "settings": self._digest})
        try:
            append_lines(self._path, [line])
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):  # an incomplete line
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(raw[:whole].splitlines(), 1):
            if line.startswith(b"{") and not line.endswith(b"}"):  # the line of a process that died
                _log.warning("line_cut", file=str(path), line=number)
                continue
            self._read_line(line, f"line {number} of {path}")

    def _read_line(self, line: bytes, where: str) -> None:
        try:
            fields = cast("dict[str, Any]", json.loads(line))
            digest = fields.pop("settings")
            if fields.get("error") is not None:
                return
            result = EpisodeResult(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where} is not a result of an inference",
                hint="choose another output_path; nothing was changed",
            ) from error
        if digest != self._digest:
            raise ConfigError(
                f"{where} was made with other settings (model, game, data or sampling)",
                hint="choose another output_path, or use those settings to continue the file",
            )
        self.done[result.key] = result


def _unwritable(path: Path, error: OSError) -> StorageError:
    message = f"{path} cannot be written: {error.strerror}"
    refusal = StorageError(message, hint="choose another path, or free space there")
    refusal.is_full = is_full(error)
    return refusal


def _plain(value: Any) -> Any:
    """Return a value with arrays as lists, for JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else value


# Which episodes an inference plays, and how the game for them is hosted.


@dataclass(frozen=True)
class Tasks:
    """The episodes to play."""

    split: str
    """Data set of the rows."""
    tasks: Sequence[int]
    """Rows, or seeds of a generated game."""
    rows: bool
    """Whether tasks are rows."""
    seed: int
    """Seed from which the seeds of rows and validation tasks follow."""
    numbered: bool = False
    """Whether tasks are numbers of seeds, as in the validation of a generated game."""

    def start(self, task: int) -> dict[str, Any]:
        """Return the fields of a play request for the episode's start."""
        if self.rows or self.numbered:
            return {"split": self.split, "sample": task, "seed": task_seed(self.seed, task)}
        return {"split": self.split, "sample": None, "seed": task}


def hosted_env(
    game_class: "type[AbstractGame] | None",
    data_path: str | Path | Sequence[str | Path] | None,
    game_kwargs: Mapping[str, Any] | None,
) -> EnvConfig | None:
    """Return the configuration of a game hosted in this process; None: the pool hosts it."""
    if game_class is None:
        if data_path is not None or game_kwargs:
            raise ConfigError(
                "data_path and game_kwargs need a game hosted in this process",
                hint="give game_class as well",
            )
        return None
    paths: Sequence[str | Path] = []
    if data_path is not None:
        paths = [data_path] if isinstance(data_path, str | Path) else data_path
    return EnvConfig(
        game=f"{game_class.__module__}:{game_class.__qualname__}",
        kwargs=dict(game_kwargs or {}),
        train_data=[str(Path(path).expanduser().resolve()) for path in paths],
        num_val=0,
    )


def chosen_tasks(
    tasks: Sequence[int] | None, num_rows: int | None, max_samples: int | None
) -> Sequence[int]:
    """Return the rows or seeds to play; `num_rows` is None without data."""
    if tasks is None:
        if num_rows is None:
            if max_samples is None:
                raise ConfigError(
                    "the game generates its states, so the number of episodes must be given",
                    hint="give max_samples, or tasks: a list of seeds",
                )
            return range(max_samples)
        return range(num_rows if max_samples is None else min(num_rows, max_samples))
    unknown = [task for task in tasks if task < 0 or (num_rows is not None and task >= num_rows)]
    if unknown:
        raise ConfigError(
            f"task {unknown[0]} does not exist"
            + ("" if num_rows is None else f": there are {num_rows} rows"),
            hint="tasks are rows of the data, from 0, or seeds of a generated game",
        )
    unique = list(dict.fromkeys(tasks))
    return unique if max_samples is None else unique[:max_samples]


@dataclass(frozen=True)
class PlayOptions:
    """The episodes to play, and their sampling; None: as the job is configured."""

    game_class: "type[AbstractGame] | None" = None
    """The game, hosted in this process; None: the job's own, hosted by the pool."""
    game_kwargs: Mapping[str, Any] | None = None
    """Arguments of its constructor."""
    data_path: str | Path | Sequence[str | Path] | None = None
    """Parquet or JSONL files of its rows; None: it generates its states from seeds."""
    output_path: str | Path | None = None
    """JSONL file of the results, which is continued."""
    tasks: Sequence[int] | None = None
    """A fixed list of rows or seeds."""
    max_samples: int | None = None
    """Largest number of tasks."""
    samples_per_task: int = 1
    """Episodes per task; over 1 gives pass@k."""
    seed: int = 0
    """Determines the seeds of the rows."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    max_turns: int | None = None
    """Answers of the policy per episode."""
    max_tokens_per_turn: int | None = None
    """Generated tokens per turn."""
    max_tokens: int | None = None
    """Tokens after the first prompt, including observations."""
    success_reward: float = 0.5
    """An episode with a larger return is solved, unless its game sets `info["success"]`."""
    max_concurrent: int = 256
    """Concurrent episodes."""
    token_ids: bool = False
    """Keep the token ids in the results."""
    on_start: Callable[[int, int], None] | None = None
    """Called with the number of episodes, and the number of those already in the file."""
    on_result: Callable[[EpisodeResult], None] | None = None
    """Called with each episode."""

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid numbers."""
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
        if self.max_samples is not None and self.max_samples < 1:
            raise ConfigError(f"max_samples={self.max_samples} must be at least 1")
        try:
            PlayRequest(request="checked", **self.limits)
        except ValidationError as error:
            raise ConfigError(brief(error)) from error

    @property
    def limits(self) -> dict[str, Any]:
        """The sampling and the limits, as the fields of a `PlayRequest`."""
        fields = self.sampling
        fields["max_turn_tokens"] = fields.pop("max_tokens_per_turn")
        fields["max_response_tokens"] = fields.pop("max_tokens")
        return fields

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling of all episodes of a result file."""
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
    """The result of an inference."""

    results: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """The episodes by task and sample, including those already in the file."""
    failed: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    """Failed episodes, with `error`."""
    samples: int = 1

    def __repr__(self) -> str:
        reward = f", mean reward {self.summary['mean_reward']:.3f}" if self.results else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"InferenceReport({len(self.results)} episodes{reward}{failed})"

    def __iter__(self) -> Iterator[EpisodeResult]:
        """Yield the episodes."""
        return iter(self.results)

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.results)

    @property
    def summary(self) -> dict[str, Any]:
        """Mean reward and accuracy with 95 % intervals, pass@k, in total and by type."""
        scores = summarize((result.scored for result in self.results), self.samples)
        return {**scores, "failed_episodes": len(self.failed)}


async def play_all(
    chosen: Tasks,
    options: PlayOptions,
    settings: Mapping[str, Any],
    play: Callable[[int, int], Awaitable[EpisodeResult]],
) -> InferenceReport:
    """Play the episodes without a result in the file, whose results all have the same `settings`.

    `play` is called with task and sample. Raises ConfigError for a file with other settings,
    StorageError, and errors of `play` in a group.
    """
    keys = [(task, sample) for task in chosen.tasks for sample in range(options.samples_per_task)]
    failed: list[EpisodeResult] = []
    with ResultFile(options.output_path, settings) as file:
        if options.on_start is not None:
            options.on_start(len(keys), sum(key in file.done for key in keys))
        left = iter([key for key in keys if key not in file.done])

        async def play_next() -> None:
            for task, sample in left:
                result = await play(task, sample)
                await _store_results(file, result)
                if result.error is not None:
                    failed.append(result)
                if options.on_result is not None:
                    options.on_result(result)

        async with asyncio.TaskGroup() as group:
            for number in range(min(options.max_concurrent, len(keys))):
                group.create_task(play_next(), name=f"player {number}")
    results = [file.done[key] for key in keys if key in file.done]
    return InferenceReport(results, failed, options.samples_per_task)


async def _store_results(file: ResultFile, result: EpisodeResult) -> None:
    """Write a result; wait while the disk is full."""

    async def add() -> None:
        file.add(result)

    await with_room(add, f"the result of task {result.task}")
