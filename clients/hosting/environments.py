"""Games hosted in the user's own process, with one connection to the pool.

The pool's environment actors run the same host. Here it runs in a thread with its own event loop,
so that the user's program does not block it.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from ...schemas.config.job import EnvConfig
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ConfigError, MessageError
from ..base import JobAddress, LoopThread, open_broker, parse_server_url, unwrap_error_groups
from ..opentinker import as_tree, translate

if TYPE_CHECKING:
    from ...broker.client.connection import Broker
    from ...envs import AbstractGame
    from ...envs.host import EnvironmentHost


# A game's host inside the client's own process.


@contextlib.asynccontextmanager
async def run_environment_host(host: "EnvironmentHost") -> AsyncIterator[None]:
    """Run a host for the duration of the block, which starts once episodes can be reset.

    Reading its data has no time limit; the start of its game has that of a reset. Raises GameError
    or DataError if the game cannot be played. A later error of the host cancels the block. Errors
    come in an exception group.
    """
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(host.run(stopping), name="environment host")
        ready = group.create_task(host.ready.wait(), name="host ready")
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if host.ready.is_set():
                yield
        finally:
            ready.cancel()
            stopping.set()


_STOP_DEADLINE_S = 40.0


class HasServerUrl(Protocol):
    """A client of one job, such as `ServiceClient`."""

    @property
    def server_url(self) -> str:
        """The job's URL."""
        ...


class HostedEnvironment(ABC):
    """An environment that this process hosts for one job: a context manager, or call `cleanup`."""

    def __init__(self, job_id: str | None, api_key: str | None) -> None:
        """Prepare to host; `api_key` is by default $TINKERMQ_API_KEY."""
        self.job_id = job_id
        self._api_key = api_key
        self._loop: LoopThread | None = None
        self._stopping: asyncio.Event | None = None
        self._hosting: Future[None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(job_id={self.job_id!r})"

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the part of the job's configuration that this environment decides."""

    @abstractmethod
    async def make_host(self, broker: "Broker", address: JobAddress) -> "EnvironmentHost":
        """Return the host; called in its own thread."""

    async def wait_until_over(
        self, broker: "Broker", address: JobAddress, stopping: asyncio.Event
    ) -> None:
        """Wait until hosting should end."""
        del broker, address
        await stopping.wait()

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
            _wait_until_ready(ready, self._hosting)
        except BaseException:
            self.cleanup()
            raise

    def check(self) -> None:
        """Raise the error that ended the host, if there is one."""
        if self._hosting is not None and self._hosting.done():
            hosting, self._hosting = self._hosting, None
            hosting.result()

    @property
    def hosting(self) -> "Future[None] | None":
        """A future that is done once the host has stopped or failed."""
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
                hosting.result(_STOP_DEADLINE_S)
            except TimeoutError:
                hosting.cancel()
        loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def _stop(self) -> None:
        if self._stopping is not None:
            self._stopping.set()

    async def _host(self, address: JobAddress, ready: "Future[None]") -> None:
        self._stopping = asyncio.Event()
        async with (
            await open_broker(address.broker_url, self._api_key, address.scope.user) as broker,
            run_environment_host(await self.make_host(broker, address)),
        ):
            ready.set_result(None)
            await self.wait_until_over(broker, address, self._stopping)


def _wait_until_ready(ready: "Future[None]", hosting: "Future[None]") -> None:
    """Wait until the host is ready; raise its error if it fails."""
    hosting.add_done_callback(lambda _: ready.done() or ready.set_result(None))
    ready.result()
    if hosting.done():
        with unwrap_error_groups():
            hosting.result()


# Games in the user's own process, with one connection to the pool.
#
# `GameEnvironment` hosts any game class, also one defined in a notebook: nothing is pickled, since
# the class is played here, by the same host as in the pool.


class GameEnvironment(HostedEnvironment):
    """A game that generates its own states, hosted in this process for one job.

    `config` is the object for `set_config`; only its keys of `env` are read here (`val_batch_size`,
    `env.workers`, `seed` …). `game_kwargs` go to the game's constructor. Use it as a context
    manager, or call `cleanup` at the end.
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

        `reward_function` is called here, as `env.reward` configures it. `api_key` is by default
        $TINKERMQ_API_KEY.
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
        """Prepare to host `game_class` with parquet or JSONL files of this machine."""
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
    """Return constructor arguments for the job's record; unserialisable ones as their repr."""
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
