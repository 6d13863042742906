"""Episodes of programs elsewhere: leased with a key on request, ended with a reward."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...broker.client.connection import Broker
from ...broker.client.fair_queue import end_tasks
from ...schemas.agent import GiveReply, GiveRequest
from ...schemas.config.agent import AgentConfig
from ...schemas.wire.errors import BusyError, NotFoundError, RewardError, StateError
from ...schemas.wire.subjects import JobScope
from ..game import ChatMessage, StepResult
from ..running.episodes import GameFacts, Opening, retrieve_error
from .episode import ProgramEpisode
from .programs.agent_run import (
    Ending,
    How,
    check_counts,
    checked_number,
    earns_failed_reward,
)
from .programs.environment import prompt_of, task_input
from .programs.launcher import ModelEndpoint
from .programs.runner import NoFreeSlot, ProgramRunner

_NAME = "agent"
_LONGEST_LOOK_S = 1.0


class OuterEndpoint(ModelEndpoint, Protocol):
    """A proxy that programs elsewhere can reach."""

    @property
    def outer_url(self) -> str:
        """Its URL for them, without `/v1`."""
        ...

    def new_key(self, episode: str) -> str:
        """Return a key for an episode that begins."""
        ...


class Slots(Protocol):
    """Bounds the episodes of a host: a semaphore, or the callers' requests."""

    async def acquire(self) -> object:
        """Wait for a place."""
        ...

    def release(self) -> None:
        """Release a place."""
        ...


@dataclass(eq=False)
class EpisodeLease:
    """One try of an episode, for its runner; used in the host's event loop."""

    episode: ProgramEpisode
    """Its key, its task, and its posts."""
    prompt: list[ChatMessage]
    """The chat messages that identify its task."""
    base_url: str
    """The URL of the model for its program, without `/v1`."""
    variables: dict[str, str]
    """The environment variables for its program."""
    error: str = ""
    """The error that ended its program, if any."""
    on_drop: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Called when the episode is over, even if its program still runs."""

    def crash(self, error: str) -> None:
        """Record that its program has ended with an error."""
        self.error = error or "an error"
        self.episode.said_end.set()


class LeaseRunner:
    """Runs the episodes of one host for callers in this process."""

    def __init__(
        self,
        config: AgentConfig,
        endpoint: OuterEndpoint,
        give: Callable[[EpisodeLease], None],
        *,
        max_tries: int = 1,
        job: str = "",
        places: Slots | None = None,
    ) -> None:
        """`give` is called on the event loop with each episode that starts.

        `places` bounds the episodes; by default `agent.per_host` does.
        """
        self._config = config
        self._endpoint = endpoint
        self._give = give
        self._max_tries = max_tries
        self._job = job
        self._opened = contextlib.AsyncExitStack()
        self.places = config.per_host
        """Episodes at the same time."""
        self._places = asyncio.Semaphore(config.per_host) if places is None else places
        self._running: dict[str, asyncio.Task[StepResult]] = {}

    async def start(self) -> GameFacts:
        """Open the endpoint of the model."""
        await self._opened.enter_async_context(self._endpoint)
        return GameFacts(_NAME, [], [])

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Start an episode once a place is free; raises NoFreeSlot after a while."""
        return self._reset(opening)

    async def _reset(self, opening: Opening) -> list[ChatMessage]:
        config = self._config
        try:
            async with asyncio.timeout(config.setup_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise NoFreeSlot(
                f"no place for an episode became free within {config.setup_timeout_s:g} s: "
                f"agent.per_host={config.per_host} are running, or no caller requests more",
                hint="end them sooner, or raise agent.per_host",
            ) from None
        try:
            lease = self._lease(opening)
        except BaseException:
            self._places.release()
            raise
        running = asyncio.create_task(self._live(lease), name=f"episode {opening.episode}")
        running.add_done_callback(lambda _: self._places.release())  # even if it never began
        running.add_done_callback(retrieve_error)
        self._running[opening.episode] = running
        return lease.prompt

    def _lease(self, opening: Opening) -> EpisodeLease:
        config, prompt, name = self._config, prompt_of(opening), opening.episode
        episode = ProgramEpisode(name, task_input(opening), opening.seed, opening.split, self._job)
        episode.key = self._endpoint.new_key(name)
        episode.deadline = time.monotonic() + config.timeout_s
        url = self._endpoint.outer_url
        return EpisodeLease(episode, prompt, url, self._endpoint.env_of(episode, url))

    async def step(self, episode: str, action: str) -> StepResult:
        """Wait for the episode's end."""
        running = self._running.get(episode)
        if running is None:
            raise NotFoundError(f"episode {episode!r} is not running here")
        return await asyncio.shield(running)

    async def finish(self, episode: str) -> StepResult:
        """Raise an error: limits of games do not apply to programs."""
        raise StateError(f"the program of episode {episode!r} has no turns to be cut")

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Raise an error: programs have no roles."""
        raise StateError(f"the program of episode {episode!r} plays no role")

    def drop(self, episode: str) -> None:
        """End an episode, and forget it."""
        if (running := self._running.pop(episode, None)) is not None:
            running.cancel()

    def end_overdue(self) -> None:
        """Do nothing: each episode has its own deadline."""

    async def stop(self) -> None:
        """End all episodes."""
        await end_tasks(self._running.values())
        await self._opened.aclose()

    async def _live(self, lease: EpisodeLease) -> StepResult:
        episode = lease.episode
        try:
            self._endpoint.open(episode)
            self._give(lease)
            how = await self._until_over(episode)
        finally:
            episode.over = episode.over or "it has ended"
            for dropped in lease.on_drop:
                dropped()
            self._endpoint.close(episode.episode)
        ending = Ending("exit", 1, lease.error) if lease.error else Ending(how, 0, "")
        outcome = check_counts(ending, episode, self._config, self._max_tries)
        info = {**episode.to_info(), "outcome": outcome}
        if lease.error:
            info["output"] = lease.error
        if episode.reward is not None:
            whose = repr(episode.reward)
            reward = checked_number(episode.reward, whose, "the program")
        elif earns_failed_reward(outcome):
            reward = self._config.failed_reward
        elif episode.has_partial_rewards:
            reward = 0.0  # its calls have theirs
        else:
            raise RewardError(
                "the episode has ended without a reward",
                hint="end it with a reward: `episode.end(1.0)`, or return a number",
            )
        return StepResult("", reward, done=True, info=info)

    async def _until_over(self, episode: ProgramEpisode) -> How:
        """Wait until the caller ends it, or until its deadline."""
        while True:
            now = time.monotonic()
            if episode.said_end.is_set():
                return "said"
            if now >= episode.deadline:
                return "timeout"
            if not episode.num_open and now - episode.last_call >= self._config.idle_s:
                return "stuck"
            try:
                async with asyncio.timeout(min(_LONGEST_LOOK_S, episode.deadline - now)):
                    await episode.said_end.wait()
            except TimeoutError:
                continue


# An episode starts when one is requested.


class LeaseRequests:
    """Requests for episodes: each one is a place of the host."""

    def __init__(self, most: int) -> None:
        """Allow at most so many requests and episodes."""
        self._most = most
        self._unclaimed: deque[EpisodeLease] = deque()
        self._waiters: deque[asyncio.Future[EpisodeLease]] = deque()
        self._named: dict[str, EpisodeLease] = {}
        self._num_open = 0
        self._num_requested = 0
        self._changed = asyncio.Event()

    async def acquire(self) -> None:
        """Wait for a request."""
        while not self._num_requested:
            self._changed.clear()
            await self._changed.wait()
        self._num_requested -= 1
        self._num_open += 1

    def release(self) -> None:
        """Count an ended episode."""
        self._num_open -= 1

    def give(self, lease: EpisodeLease) -> None:
        """Give a started episode to a waiting caller; keep it for the next if none waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(lease)
                return
        self._unclaimed.append(lease)

    async def answer(self, request: GiveRequest) -> GiveReply:
        """Return the next episode, or none after a while; the same name gets the same one again.

        Raises BusyError beyond the bound.
        """
        lease = self._named.get(request.name) if request.name else None
        if lease is None or lease.episode.over:
            lease = await self._next(request.wait_s)
        if lease is None:
            return GiveReply()
        if request.name and request.name not in self._named:
            self._named[request.name] = lease
            lease.on_drop.append(lambda: self._named.pop(request.name, None))
        episode = lease.episode
        return GiveReply(
            episode=episode.episode,
            key=episode.key,
            task=episode.task_input,
            prompt=lease.prompt,
            seed=episode.seed,
            split=episode.split,
            left_s=max(0.0, episode.deadline - time.monotonic()),
        )

    async def _next(self, wait_s: float) -> EpisodeLease | None:
        while self._unclaimed:
            lease = self._unclaimed.popleft()
            if not lease.episode.over:
                return lease
        if self._num_open + self._num_requested >= self._most:
            num = self._num_open + self._num_requested
            raise BusyError(
                f"{num} episodes are open or requested, as many as agent.per_host={self._most} "
                "allows",
                hint="end some, or raise agent.per_host",
            )
        waiter: asyncio.Future[EpisodeLease] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._num_requested += 1
        self._changed.set()
        try:
            await asyncio.wait({waiter}, timeout=wait_s)
            return waiter.result() if waiter.done() else None
        finally:
            if not waiter.done():  # an episode that starts later waits for the next request
                waiter.cancel()
                self._num_requested -= bool(self._num_requested)
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)


# The runners of an environment host, with the proxy for their programs.

_ANYWHERE = "http://gateway"
"""Programs use the gateway's address that their user has used."""


def make_program_runner(
    config: AgentConfig,
    broker: Broker,
    scope: JobScope,
    *,
    max_tries: int = 1,
    private: Sequence[Path] = (),
    has_tasks: bool = False,
    builds: bool = True,
    may_read: Callable[[Path], None] = lambda _: None,
) -> ProgramRunner:
    """Return the runner of a job's programs; see `ProgramRunner`.

    Raises ConfigError if the packages of the proxy are not installed.
    """
    from .proxy.proxy import ModelProxy  # hosts of games need no HTTP server

    proxy = ModelProxy(broker, scope)
    return ProgramRunner(
        config,
        proxy,
        max_tries=max_tries,
        job=scope.job,
        private=private,
        has_tasks=has_tasks,
        builds=builds,
        may_read=may_read,
    )


def make_lease_runner(
    config: AgentConfig, broker: Broker, scope: JobScope, *, max_tries: int = 1
) -> tuple[LeaseRunner, LeaseRequests]:
    """Return the leases of a job's episodes, and their requests."""
    from .proxy.proxy import ModelProxy  # hosts of games need no HTTP server

    requests = LeaseRequests(config.per_host)
    proxy = ModelProxy(broker, scope, gateway=_ANYWHERE)
    runner = LeaseRunner(
        config, proxy, requests.give, max_tries=max_tries, job=scope.job, places=requests
    )
    return runner, requests
