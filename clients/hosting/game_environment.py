"""Games that run inside the user's own process, and reach the pool through one connection.

`GameEnvironment` hosts any game class, also one defined in a notebook: nothing is pickled, the
class is played here by the same host that the pool's environment actors run. The host lives in a
thread with an event loop of its own, so that it serves whatever the user's program does meanwhile.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...schemas.config.job import EnvConfig
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ConfigError, MessageError
from ..address import JobAddress, parse_server_url
from ..compat.arguments import as_tree
from ..compat.opentinker_keys import translate
from ..pool_client import open_broker
from ..sync.loop_thread import LoopThread
from ..sync.single_error import single_errors
from .host import hosted

if TYPE_CHECKING:
    from ...envs import AbstractGame

STOP_DEADLINE_S = 40.0


class HasServerUrl(Protocol):
    """A client of one job, such as `ServiceClient`."""

    @property
    def server_url(self) -> str:
        """The job's URL."""
        ...


class GameEnvironment:
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
        self._api_key = api_key
        self.game_class = game_class
        self.game_kwargs = dict(game_kwargs or {})
        self.job_id = job_id
        self.reward_function = reward_function
        self._tree = _read_env(config)
        if reward_function is not None:
            self._tree["env"]["reward"] = {
                **self._tree["env"].get("reward", {}),
                "source": "function",
                "function": f"{reward_function.__module__}:{reward_function.__qualname__}",
            }
        self._loop: LoopThread | None = None
        self._stopping: asyncio.Event | None = None
        self._hosting: Future[None] | None = None

    def get_config(self) -> dict[str, Any]:
        """Return the part of the job's configuration that this environment decides."""
        game = f"{self.game_class.__module__}:{self.game_class.__qualname__}"
        env = {**self._tree["env"], "game": game, "hosts": 0, "kwargs": _shown(self.game_kwargs)}
        return {**self._tree, "env": {**env, **self.data_config()}}

    def data_config(self) -> dict[str, Any]:
        """Return the keys that name data: none for a game that generates its states."""
        return {}

    def setup(self, client: "HasServerUrl | str") -> None:
        """Start hosting for the job of `client` (or of a server_url); harmless when it runs.

        Raises GameError or DataError when the game cannot be played, BrokerError.
        """
        self.check()
        if self._hosting is not None:
            return
        url = client if isinstance(client, str) else client.server_url
        address = parse_server_url(url)
        if self.job_id not in (None, address.scope.job):
            raise ConfigError(
                f"this environment was made for job {self.job_id}, the client is that of job "
                f"{address.scope.job}",
                hint="give both the job_id that submit_job returned",
            )
        self._loop = LoopThread("tinkermq-games")
        ready: Future[None] = Future()
        self._hosting = self._loop.start(self._host(address, ready))
        try:
            _first_of(ready, self._hosting)
        except BaseException:
            self.cleanup()
            raise

    def check(self) -> None:
        """Raise what ended the host, if it has ended by itself."""
        if self._hosting is not None and self._hosting.done():
            hosting, self._hosting = self._hosting, None
            hosting.result()

    @property
    def hosting(self) -> "Future[None] | None":
        """The host's end: a future that is done when it stopped or failed."""
        return self._hosting

    def cleanup(self) -> None:
        """Stop hosting, after the episodes that run have ended; harmless when nothing runs."""
        hosting, self._hosting = self._hosting, None
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if hosting is not None and not hosting.done():
            loop.call(self._stop)
            try:
                hosting.result(STOP_DEADLINE_S)
            except TimeoutError:
                hosting.cancel()
        loop.close()

    def __enter__(self) -> "GameEnvironment":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    async def _host(self, address: JobAddress, ready: "Future[None]") -> None:
        from ...envs.serving.host import EnvironmentHost

        self._stopping = asyncio.Event()
        config = EnvConfig.model_validate({**self.get_config()["env"], "kwargs": self.game_kwargs})
        async with await open_broker(address.broker_url, self._api_key) as broker:
            host = EnvironmentHost(
                broker,
                address.scope,
                config,
                seed=int(self._tree.get("seed", 0)),
                game_class=self.game_class,
                reward_function=self.reward_function,
            )
            async with hosted(host):
                ready.set_result(None)
                await self._stopping.wait()


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


def _first_of(ready: "Future[None]", hosting: "Future[None]") -> None:
    """Wait until the host serves; raise what it raised instead."""
    hosting.add_done_callback(lambda _: ready.done() or ready.set_result(None))
    ready.result()
    if hosting.done():
        with single_errors():
            hosting.result()


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
