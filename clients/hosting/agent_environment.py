"""Custom agent programs: functions in this process, or programs started by it.

    async def run(task, model):
        client = model.async_openai()
        ...
        return reward

    with AgentEnvironment(run, config) as environment: ...

    for episode in AgentEpisodes(job):
        environment = {**os.environ, **episode.variables}
        subprocess.run(["my-agent", episode.prompt[-1]["content"]], env=environment)
        episode.end(grade(...))

Model calls go through a proxy in this process and one outgoing connection to the broker.
"""

import asyncio
import contextlib
import inspect
import math
import queue
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast
from urllib.parse import urlsplit

from ...schemas.config.agent import IMPLIED_OF_ENV, AgentConfig
from ...schemas.config.job import JobConfig
from ...schemas.job import FINAL_STATES
from ...schemas.local.proxies import proxy_of
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import BrokerError, ConfigError, DeadlineError
from ...schemas.wire.foreign import clean_text, ends_this_task, lines_of, plain_value, shown
from ..base import JobAddress
from ..opentinker import as_tree, translate
from ..pool import Pool
from .environments import HasServerUrl, HostedEnvironment

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

    from ...broker.client.connection import Broker
    from ...envs.agents.leases import EpisodeLease
    from ...envs.host import EnvironmentHost


class ClientOptions(TypedDict, total=False):
    """Options of a package's client; None: the package's default."""

    timeout: float | None
    """Time limit of a call in seconds."""
    max_retries: int | None
    """Maximum number of retries of a failed call."""
    default_headers: Mapping[str, str] | None
    """Headers of every call."""
    default_query: Mapping[str, object] | None
    """Query parameters of every call."""
    http_client: Any
    """The client that sends the calls: of `httpx`, or of another kind that the package accepts."""


class SdkClients:
    """Clients of the packages of OpenAI and Anthropic, pointed at the model of one episode.

    A package is imported when a client of it is made.
    """

    api_key: str
    """Valid for this episode only."""
    openai_base_url: str
    """For programs that speak Chat Completions or Responses."""
    anthropic_base_url: str
    """For programs that speak Messages."""

    def openai(self, **options: Unpack[ClientOptions]) -> "OpenAI":
        """Return a client of the `openai` package for this episode."""
        return self._make_client("openai", "OpenAI", self.openai_base_url, options)

    def async_openai(self, **options: Unpack[ClientOptions]) -> "AsyncOpenAI":
        """Return an async client of the `openai` package for this episode."""
        return self._make_client("openai", "AsyncOpenAI", self.openai_base_url, options)

    def anthropic(self, **options: Unpack[ClientOptions]) -> "Anthropic":
        """Return a client of the `anthropic` package for this episode."""
        return self._make_client("anthropic", "Anthropic", self.anthropic_base_url, options)

    def async_anthropic(self, **options: Unpack[ClientOptions]) -> "AsyncAnthropic":
        """Return an async client of the `anthropic` package for this episode."""
        return self._make_client("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)

    def _make_client(self, package: str, name: str, base_url: str, options: ClientOptions) -> Any:
        """Return a client of a package; options of None are left out, since packages read None."""
        sdk = import_module(package)
        chosen = {option: value for option, value in options.items() if value is not None}
        if "http_client" not in chosen:
            is_async = name.startswith("Async")
            http_class = sdk.DefaultAsyncHttpxClient if is_async else sdk.DefaultHttpxClient
            # Clients share one context: loading the certificates takes a tenth of a second.
            is_tls = base_url.startswith("https:")
            is_elsewhere = is_tls or proxy_of(base_url) is not None
            chosen["http_client"] = http_class(verify=is_tls, trust_env=is_elsewhere)
        return getattr(sdk, name)(base_url=base_url, api_key=self.api_key, **chosen)


_LOOK_S = 2.0
_TOLD_CHARS = 8000
Reward = float | dict[str, Any] | None
Program = Callable[[dict[str, Any], "AgentEpisode"], "Awaitable[Reward] | Reward"]
"""`run(task, model) -> reward`, async or not: a number, an object with `reward` and perhaps
`success` and `info`, or None if it was reported by `model.end`."""


class AgentEpisode(SdkClients):
    """One episode: its task, the URLs of its model, and its reward."""

    def __init__(self, lease: "EpisodeLease", loop: asyncio.AbstractEventLoop) -> None:
        """Wrap an episode that the host has leased on its event loop."""
        self._lease = lease
        self._loop = loop
        self._episode = lease.episode
        self.id: str = self._episode.episode
        """Its id, unique in the job."""
        self.task: dict[str, Any] = self._episode.task_input
        """The row of the data without its gold answer; empty where the job has no data."""
        self.prompt: list[dict[str, Any]] = lease.prompt
        """The chat messages of the task's prompt."""
        self.seed: int = self._episode.seed
        """The same for all episodes of a task."""
        self.split: str = self._episode.split
        """`train`: the episode is trained; `val`: it only counts in a validation."""
        self.api_key = self._episode.key
        self.openai_base_url = f"{lease.base_url}/v1"
        self.anthropic_base_url = lease.base_url
        self.variables: dict[str, str] = dict(lease.variables)
        """Environment variables with the model, the key and the task for programs."""

    @property
    def is_over(self) -> bool:
        """Return whether the episode has ended; its calls are no longer answered."""
        return bool(self._episode.over)

    def reward(self, reward: float, call: int | None = None, *, branch: int | None = None) -> None:
        """Give the whole episode a reward, or one call of the model by its number, or the branch
        that begins with a call."""
        if call is not None and branch is not None:
            raise ValueError("a reward is that of a call or of a branch: give two")
        self._soon(partial(self._reward, _number(reward), call, branch))

    def end(
        self,
        reward: float | None = None,
        *,
        success: bool | None = None,
        info: dict[str, Any] | None = None,
        failed: bool = False,
    ) -> None:
        """End the episode, with its reward if it has none yet; harmless when it is over.

        Raises ValueError for a reward that is not finite, or `info` that cannot be serialised.
        """
        value = None if reward is None else _number(reward)
        details = plain_value(dict(info or {}), "info")
        succeeded = None if success is None else bool(success)
        self._soon(partial(self._end, value, succeeded, details, failed=failed))

    def fail(self, error: str) -> None:
        """End the episode as failed: it is tried again."""
        self._soon(partial(self._lease.crash, error))

    def _soon(self, change: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(change)

    def _reward(self, reward: float, call: int | None, branch: int | None) -> None:
        if branch is not None:
            self._episode.branch_rewards[branch] = reward
        elif call is not None:
            self._episode.call_rewards[call] = reward
        else:
            self._episode.reward = reward
        self._episode.changed.set()

    def _end(
        self,
        reward: float | None,
        success: bool | None,
        info: dict[str, Any],
        *,
        failed: bool,
    ) -> None:
        episode = self._episode
        if episode.said_end.is_set() or episode.over:
            return
        if reward is not None:
            episode.reward = reward
        if success is not None:
            episode.info["success"] = success
        episode.info.update(info)
        episode.status = "failed" if failed else "done"
        episode.said_end.set()
        episode.changed.set()


class _LeasingEnvironment(HostedEnvironment):
    """Hosts the episodes of a job whose programs are run by this process."""

    def __init__(
        self, config: Any, job_id: str | None, api_key: str | None, gateway: str = ""
    ) -> None:
        super().__init__(job_id, api_key)
        self._gateway = gateway
        tree = translate(as_tree(config)) if config is not None else {}
        self._tree = {key: value for key, value in tree.items() if key in ("env", "agent", "seed")}

    def get_config(self) -> dict[str, Any]:
        """Return the part of the job's configuration that this environment decides."""
        env = {**self._tree.get("env", {}), "game": "agent", "hosts": 0}
        return {**self._tree, "env": env, "agent": {**self._tree.get("agent", {}), "client": True}}

    async def make_host(self, broker: "Broker", address: JobAddress) -> "EnvironmentHost":
        """Return the host, which calls `start_episode` for each episode."""
        from ...envs.agents.leases import LeaseRunner
        from ...envs.agents.proxy.proxy import ModelProxy
        from ...envs.host import EnvironmentHost

        record = await Pool(broker).find(address.scope.job)
        config = _hosted_config(record.config, self.get_config())
        loop = asyncio.get_running_loop()

        def give(lease: "EpisodeLease") -> None:
            self.start_episode(AgentEpisode(lease, loop), lease)

        proxy = ModelProxy(broker, address.scope, gateway=self._gateway)
        tries, job = config.rollout.max_tries, address.scope.job
        programs = LeaseRunner(config.agent, proxy, give, max_tries=tries, job=job)
        return EnvironmentHost(
            broker, address.scope, config.env, seed=config.seed, programs=programs
        )

    def start_episode(self, episode: AgentEpisode, lease: "EpisodeLease") -> None:
        """Handle a started episode, on the host's event loop."""
        raise NotImplementedError


class AgentEnvironment(_LeasingEnvironment):
    """A function that is an agent's program, hosted in this process for one job.

    `config` is the object for `set_config`; its keys of `env` and `agent` are used here and
    override those of the job. If the function raises, its episode is tried again.
    """

    def __init__(
        self,
        program: Program,
        config: Any = None,
        job_id: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """Prepare to host `program`; hosting starts with `setup`."""
        super().__init__(config, job_id, api_key)
        self._program = program
        self._tasks: set[asyncio.Task[None]] = set()

    def start_episode(self, episode: AgentEpisode, lease: "EpisodeLease") -> None:
        """Run the function on an episode."""
        task = asyncio.create_task(self._run(episode), name=f"program {episode.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        lease.on_drop.append(task.cancel)

    async def _run(self, episode: AgentEpisode) -> None:
        try:
            result, failure = await self._call_program(episode)
            if failure:
                episode.fail(failure)
            elif isinstance(result, dict):
                episode.end(**cast("dict[str, Any]", result))
            else:
                episode.end(result)
        except BaseException as error:  # a user's function may raise anything
            if ends_this_task(error):
                raise
            episode.fail(_traceback(error))

    async def _call_program(self, episode: AgentEpisode) -> tuple[Any, str]:
        """Return the function's result, or the traceback of its exception."""
        if inspect.iscoroutinefunction(self._program):
            return await self._program(episode.task, episode), ""

        def call() -> tuple[Any, str]:
            try:
                return self._program(episode.task, episode), ""
            except BaseException as error:  # noqa: BLE001 - asyncio hands on no StopIteration
                return None, _traceback(error)

        result, failure = await asyncio.to_thread(call)
        return (await result if inspect.isawaitable(result) else result), failure


def _number(reward: Any) -> float:
    """Return a reward as a float; ValueError if it is not a finite number."""
    if isinstance(reward, str | bytes):
        raise ValueError(f"a reward is a number, not {shown(reward)}")
    try:
        number = float(reward)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a reward is a number, not {shown(reward)}") from error
    if not math.isfinite(number):
        raise ValueError(f"a reward is finite, not {number}")
    return number


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error, limit=-8))
    except BaseException:  # noqa: BLE001 - what was raised fails as it is looked at
        return lines_of(error)
    return clean_text(text, _TOLD_CHARS, keep_end=True)


class AgentEpisodes(_LeasingEnvironment):
    """The episodes of a job, one after another, for programs that this process starts.

    Iterate over it (`for` or `async for`) while the job trains. End each episode with `end` within
    `agent.timeout_s`. Several may run at once. Their programs reach the model in this process or,
    with `gateway`, at the pool's gateway: for sandboxes, containers and other machines.
    """

    def __init__(
        self,
        job: "HasServerUrl | str",
        config: AgentConfig | dict[str, Any] | None = None,
        api_key: str | None = None,
        *,
        gateway: str = "",
    ) -> None:
        """Host the episodes of a job: its client, or its server_url.

        Keys of `config` override those of the job's section `agent`. `gateway` is the URL of the
        pool's gateway (https://pool), for programs elsewhere. Raises ConfigError for an invalid
        URL.
        """
        tree = {"agent": dict(config)} if config is not None else None
        super().__init__(tree, None, api_key, _checked_url(gateway))
        self._episodes: queue.SimpleQueue[AgentEpisode | None] = queue.SimpleQueue()
        self.setup(job)
        assert self.hosting is not None
        self.hosting.add_done_callback(self._end_of_host)

    async def wait_until_over(
        self, broker: "Broker", address: JobAddress, stopping: asyncio.Event
    ) -> None:
        """Host until the job has ended."""
        pool = Pool(broker)
        while not stopping.is_set():
            with contextlib.suppress(BrokerError, DeadlineError):  # away for a while
                if (await pool.find(address.scope.job)).state in FINAL_STATES:
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await stopping.wait()

    def start_episode(self, episode: AgentEpisode, lease: "EpisodeLease") -> None:
        """Queue an episode for the iterator."""
        self._episodes.put(episode)

    def __iter__(self) -> Iterator[AgentEpisode]:
        """Yield episodes until hosting ends; raises the error that ended it."""
        while (episode := self._episodes.get()) is not None:
            if not episode.is_over:
                yield episode
        self._episodes.put(None)
        self.check()

    async def __aiter__(self) -> AsyncIterator[AgentEpisode]:
        """Yield episodes until hosting ends; raises the error that ended it."""
        while (episode := await asyncio.to_thread(self._episodes.get)) is not None:
            if not episode.is_over:
                yield episode
        self._episodes.put(None)
        self.check()

    def _end_of_host(self, _: "Future[None]") -> None:
        self._episodes.put(None)


def agent(program: Program) -> Program:
    """Mark a function as an agent's program; ConfigError for a wrong signature."""
    names = list(inspect.signature(program).parameters)
    if len(names) != 2:
        raise ConfigError(
            f"{program.__qualname__} takes {len(names)} arguments, an agent's program takes two",
            hint="write `async def run(task, model)` and return a reward",
        )
    return program


def _hosted_config(stored: Mapping[str, Any], own: Mapping[str, Any]) -> JobConfig:
    """Return the part of a job's configuration that a host uses: `own` overrides `stored`."""
    env, agent, rollout = (dict(stored.get(name) or {}) for name in ("env", "agent", "rollout"))
    tree: dict[str, Any] = {
        "model": {"path": "-"},
        "seed": stored.get("seed", 0),
        "env": {key: value for key, value in env.items() if key not in IMPLIED_OF_ENV},
        "agent": agent,
        "rollout": {key: rollout[key] for key in ("max_tries",) if key in rollout},
    }
    return JobConfig.model_validate(merged(tree, own))


def _checked_url(gateway: str) -> str:
    """Return the URL of a gateway; ConfigError if it is not one."""
    parts = urlsplit(gateway)
    if gateway and (parts.scheme not in ("http", "https") or not parts.netloc or parts.query):
        raise ConfigError(
            f"gateway is {gateway!r}, not the URL of a gateway",
            hint="give it as programs reach it, such as https://pool.example.org",
        )
    return gateway.rstrip("/")
