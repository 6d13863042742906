"""The game that a command means: by name, by class, or by the `env` of a YAML file."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....envs.game import game_failure
from ....envs.registry import companion, load_game
from ....schemas.config.job import EnvConfig, JobConfig
from ....schemas.config.load_config import apply_override, load_config
from ....schemas.wire.errors import ConfigError, GameError
from ....schemas.wire.foreign import blaming


@dataclass(frozen=True)
class ChosenGame:
    """A game with its arguments and data."""

    env: EnvConfig
    """How it is hosted."""
    seed: int = 0
    """The job's seed."""
    job: JobConfig | None = None
    """The whole configuration, where a YAML file was named."""


@contextlib.contextmanager
def choosing_game(
    game: str,
    arguments: Sequence[str] = (),
    train_data: Sequence[str] = (),
    val_data: Sequence[str] = (),
) -> Iterator[ChosenGame]:
    """Yield the game that the words of a command line mean.

    `arguments` are `key=value`: of the game's constructor, or of the YAML file. A registered
    dataset game without data makes some for as long as the block runs. Raises ConfigError.
    """
    chosen = _from_yaml(game, arguments) if game.endswith((".yaml", ".yml")) else None
    if chosen is not None:
        if train_data or val_data:
            raise ConfigError("a YAML file names its own data", hint="leave --train-data out")
        yield chosen
        return
    kwargs: dict[str, Any] = {}
    for argument in arguments:
        apply_override(kwargs, argument, None)
    env = EnvConfig(game=game, kwargs=kwargs, train_data=list(train_data), val_data=list(val_data))
    with tempfile.TemporaryDirectory(prefix="tinkermq-data-") as folder:
        yield ChosenGame(_with_data(env, folder))


def _from_yaml(path: str, overrides: Sequence[str]) -> ChosenGame:
    job = load_config(Path(path), overrides)
    if job.agent.runs_programs:
        raise ConfigError(
            f"{path} is the configuration of an agent job: there is no game",
            hint=f"try its program: `tinkermq agent check {path}`, `tinkermq agent play {path}`",
        )
    return ChosenGame(job.env, job.seed, job)


def _with_data(env: EnvConfig, folder: str) -> EnvConfig:
    if env.train_data:
        return env
    try:
        make_data = companion(load_game(env.game), "make_data")
    except GameError:
        return env  # it generates its states, or whoever plays it says why it cannot be imported
    with blaming(lambda error: game_failure(env.game, "make_data", error)):
        train, val = make_data(folder, num_train=64, num_val=16)
    return env.model_copy(update={"train_data": [str(train)], "val_data": [str(val)]})
