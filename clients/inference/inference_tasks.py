"""Which episodes an inference plays, and how the game for them is hosted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...envs.evaluation import task_seed
from ...schemas.config.job import EnvConfig
from ...schemas.wire.errors import ConfigError

if TYPE_CHECKING:
    from ...envs import AbstractGame


@dataclass(frozen=True)
class Tasks:
    """Which episodes are played."""

    split: str
    """Data that the rows are of."""
    tasks: Sequence[int]
    """Rows, or seeds of a generated game."""
    rows: bool
    """Whether tasks are rows."""
    seed: int
    """Seed from which those of rows and of validation tasks follow."""
    numbered: bool = False
    """Tasks only number the seeds: the validation of a generated game."""

    def start(self, task: int) -> dict[str, Any]:
        """Return the fields of a play request that say what the episode starts from."""
        if self.rows or self.numbered:
            return {"split": self.split, "sample": task, "seed": task_seed(self.seed, task)}
        return {"split": self.split, "sample": None, "seed": task}


def hosted_env(
    game_class: "type[AbstractGame] | None",
    data_path: str | Path | Sequence[str | Path] | None,
    game_kwargs: Mapping[str, Any] | None,
) -> EnvConfig | None:
    """Return how the game is hosted here, or None where the pool hosts it."""
    if game_class is None:
        if data_path is not None or game_kwargs:
            raise ConfigError(
                "data_path and game_kwargs need a game that is hosted here",
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
    tasks: Sequence[int] | None, there: int | None, max_samples: int | None
) -> Sequence[int]:
    """Return the rows or seeds to play; `there` is the number of rows, None without data."""
    if tasks is None:
        if there is None:
            if max_samples is None:
                raise ConfigError(
                    "the game generates its states, and it was not said how many to play",
                    hint="give max_samples, or tasks: a list of seeds",
                )
            return range(max_samples)
        return range(there if max_samples is None else min(there, max_samples))
    wrong = [task for task in tasks if task < 0 or (there is not None and task >= there)]
    if wrong:
        raise ConfigError(
            f"task {wrong[0]} does not exist"
            + ("" if there is None else f": there are {there} rows"),
            hint="tasks are rows of the data, from 0, or seeds of a generated game",
        )
    unique = list(dict.fromkeys(tasks))
    return unique if max_samples is None else unique[:max_samples]
