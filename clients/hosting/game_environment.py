"""Games that run inside the user's own process, and reach the pool through one connection.

`GameEnvironment` hosts any game class, also one defined in a notebook: nothing is pickled, the
class is played here by the same host that the pool's environment actors run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.config.job import EnvConfig
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ConfigError, MessageError
from ..address import JobAddress
from ..compat.arguments import as_tree
from ..compat.opentinker_keys import translate
from .hosted_environment import HostedEnvironment

if TYPE_CHECKING:
    from ...broker.client.connection import Broker
    from ...envs import AbstractGame
    from ...envs.host import EnvironmentHost


class GameEnvironment(HostedEnvironment):
    """A game that generates its own states, hosted in this process for one job.

    `config` is the same object that is given to `set_config`; of it only the keys of `env` are
    read here (`val_batch_size`, `env.workers`, `seed` …). `game_kwargs` go to the game's
    constructor. Use it as a context manager, or call `cleanup` at the end.
    """

    def __init__(
        self,
        game_class: "type[AbstractGame]",
        config: Any = None,
        game_kwargs: dict[str, Any] | None = None,
        job_id: str | None = None,
        api_key: str | None = None,
        reward_function: Callable[..., Any] | None = None,
    ) -> None:
        """Prepare to host `game_class`; hosting starts with `setup`.

        `reward_function` is called here at the end of each episode, as `env.reward` says it.
        Without `api_key` that of $TINKERMQ_API_KEY counts.
        """
        super().__init__(job_id, api_key)
        self.game_class = game_class
        self.game_kwargs = dict(game_kwargs or {})
        self.reward_function = reward_function
        self._tree = _read_env(config)
        if reward_function is not None:
            self._tree["env"]["reward"] = {
                **self._tree["env"].get("reward", {}),
                "source": "function",
                "function": f"{reward_function.__module__}:{reward_function.__qualname__}",
            }

    def get_config(self) -> dict[str, Any]:
        """Return the part of the job's configuration that this environment decides."""
        game = f"{self.game_class.__module__}:{self.game_class.__qualname__}"
        env = {**self._tree["env"], "game": game, "hosts": 0, "kwargs": _shown(self.game_kwargs)}
        return {**self._tree, "env": {**env, **self.data_config()}}

    def data_config(self) -> dict[str, Any]:
        """Return the keys that name data: none for a game that generates its states."""
        return {}

    async def make_host(self, broker: "Broker", address: JobAddress) -> "EnvironmentHost":
        """Return the host of the game."""
        from ...envs.host import EnvironmentHost

        config = EnvConfig.model_validate({**self.get_config()["env"], "kwargs": self.game_kwargs})
        return EnvironmentHost(
            broker,
            address.scope,
            config,
            seed=int(self._tree.get("seed", 0)),
            game_class=self.game_class,
            reward_function=self.reward_function,
        )


class MathGameEnvironment(GameEnvironment):
    """A game whose tasks are rows of a dataset, hosted in this process for one job."""

    def __init__(
        self,
        game_class: "type[AbstractGame]",
        config: Any = None,
        data_paths: str | Path | Sequence[str | Path] = (),
        val_data_paths: str | Path | Sequence[str | Path] | None = None,
        game_kwargs: dict[str, Any] | None = None,
        job_id: str | None = None,
        api_key: str | None = None,
        reward_function: Callable[..., Any] | None = None,
    ) -> None:
        """Prepare to host `game_class` on parquet or JSONL files of this machine."""
        super().__init__(game_class, config, game_kwargs, job_id, api_key, reward_function)
        self.data_paths = _paths(data_paths)
        self.val_data_paths = _paths(val_data_paths or ())
        if not self.data_paths:
            raise ConfigError(
                "data_paths is empty", hint="give the parquet or JSONL files of the training data"
            )

    def data_config(self) -> dict[str, Any]:
        """Return the absolute paths of the files; they are read in this process."""
        return {"train_data": self.data_paths, "val_data": self.val_data_paths}


def create_game_environment(
    game_class: "type[AbstractGame]", config: Any = None, **game_kwargs: Any
) -> GameEnvironment:
    """Return a `GameEnvironment` of a game with these constructor arguments."""
    return GameEnvironment(game_class, config, game_kwargs=game_kwargs)


def _read_env(config: Any) -> dict[str, Any]:
    """Return seed and `env` section of a configuration; the rest is for `set_config`."""
    tree = as_tree(config)
    known = {
        key: value
        for key, value in tree.items()
        if key in {"env", "seed", "val_batch_size"} or key.startswith("env.")
    }
    translated = translate(known)
    translated.setdefault("env", {})
    return translated


def _shown(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return constructor arguments for the job's record; what cannot travel by its repr."""
    shown: dict[str, Any] = {}
    for key, value in kwargs.items():
        try:
            pack(value)
        except MessageError:
            shown[key] = repr(value)
        else:
            shown[key] = value
    return shown


def _paths(paths: "str | Path | Sequence[str | Path]") -> list[str]:
    many = [paths] if isinstance(paths, (str, Path)) else paths
    return [str(Path(path).expanduser().resolve()) for path in many]
