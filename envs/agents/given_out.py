"""Episodes that somebody else runs: given out with a key, taken back with a reward."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...schemas.config.agent import AgentConfig
from ...schemas.wire.errors import NotFoundError, RewardError, StateError
from ..game import ChatMessage, StepResult
from ..running.episodes import GameFacts, Opening
from .episode import ProgramEpisode
from .programs.agent_run import Ending, How, check_counts, earns_failed_reward
from .programs.environment import prompt_of, task_input
from .programs.launcher import ModelEndpoint
from .programs.reward_parsing import checked_number
from .programs.runner import NoPlace

_NAME = "agent"
_LONGEST_LOOK_S = 1.0


class OuterEndpoint(ModelEndpoint, Protocol):
    """One that programs elsewhere may find, too."""

    @property
    def outer_url(self) -> str:
        """Its URL for them, without `/v1`."""
        ...

    def new_key(self, episode: str) -> str:
        """Return a key for an episode that begins."""
        ...


class Places(Protocol):
    """What bounds the episodes of a host: a semaphore, or who asks for them."""

    async def acquire(self) -> object:
        """Wait for a place."""
        ...

    def release(self) -> None:
        """Give a place back."""
        ...


@dataclass(eq=False)
class GivenEpisode:
    """One try of an episode, for whoever runs it; of the host's event loop."""

    episode: ProgramEpisode
    """Its key, its task, and what is posted for it."""
    prompt: list[ChatMessage]
    """The chat messages by which its task is known."""
    base_url: str
    """Where its program finds the model, without `/v1`."""
    variables: dict[str, str]
    """The environment variables by which programs find it."""
    error: str = ""
    """What ended its program, if it was an error."""
    on_drop: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Called when the episode is over, whether or not its program is."""

    def crash(self, error: str) -> None:
        """Say that its program has ended with an error."""
        self.error = error or "an error"
        self.episode.said_end.set()


class GivenOutRunner:
    """Gives the episodes of one host to who runs them in this process, or from here."""

    def __init__(
        self,
        config: AgentConfig,
        endpoint: OuterEndpoint,
        give: Callable[[GivenEpisode], None],
        *,
        max_tries: int = 1,
        job: str = "",
        places: Places | None = None,
    ) -> None:
        """`give` is called on the event loop with each episode that starts.

        `places` are waited for in place of as many as `agent.per_host` says.
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
        """Open the endpoint at which the model is found."""
        await self._opened.enter_async_context(self._endpoint)
        return GameFacts(_NAME, [], [])

    def reset(self, opening: Opening) -> Awaitable[list[ChatMessage]]:
        """Give an episode out once there is a place; raises NoPlace when there is none in time."""
        return self._reset(opening)

    async def _reset(self, opening: Opening) -> list[ChatMessage]:
        config = self._config
        try:
            async with asyncio.timeout(config.setup_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise NoPlace(
                f"no place for an episode became free within {config.setup_timeout_s:g} s: "
                f"agent.per_host={config.per_host} are under way, or nobody asks for more",
                hint="end them sooner, or raise agent.per_host",
            ) from None
        try:
            return self._begin(opening)
        except BaseException:
            self._places.release()
            raise

    def _begin(self, opening: Opening) -> list[ChatMessage]:
        config, prompt, name = self._config, prompt_of(opening), opening.episode
        episode = ProgramEpisode(name, task_input(opening), opening.seed, opening.split, self._job)
        episode.key = self._endpoint.new_key(name)
        episode.deadline = time.monotonic() + config.timeout_s
        url = self._endpoint.outer_url
        given = GivenEpisode(episode, prompt, url, self._endpoint.env_of(episode, url))
        self._running[name] = asyncio.create_task(self._live(given), name=f"episode {name}")
        self._running[name].add_done_callback(_seen)
        return prompt

    async def step(self, episode: str, action: str) -> StepResult:
        """Wait for the episode's end."""
        running = self._running.get(episode)
        if running is None:
            raise NotFoundError(f"episode {episode!r} is not under way here")
        return await asyncio.shield(running)

    async def turn(self, episode: str) -> tuple[str, list[ChatMessage]]:
        """Refuse: programs have no roles."""
        raise StateError(f"the program of episode {episode!r} plays no role")

    def drop(self, episode: str) -> None:
        """End an episode, and forget it."""
        if (running := self._running.pop(episode, None)) is not None:
            running.cancel()

    def end_overdue(self) -> None:
        """Do nothing: each episode looks after its own time."""

    async def stop(self) -> None:
        """End all episodes."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._opened.aclose()

    async def _live(self, given: GivenEpisode) -> StepResult:
        episode = given.episode
        try:
            self._endpoint.open(episode)
            self._give(given)
            how = await self._until_over(episode)
        finally:
            self._places.release()
            episode.over = episode.over or "it has ended"
            for dropped in given.on_drop:
                dropped()
            self._endpoint.close(episode.episode)
        ending = Ending("exit", 1, given.error) if given.error else Ending(how, 0, "")
        outcome = check_counts(ending, episode, self._config, self._max_tries)
        told = {**episode.told(), "outcome": outcome}
        if given.error:
            told["output"] = given.error
        if episode.reward is not None:
            whose = repr(episode.reward)
            reward = checked_number(episode.reward, whose, "the program")
        elif earns_failed_reward(outcome):
            reward = self._config.failed_reward
        elif episode.has_partial_rewards:
            reward = 0.0  # its calls have theirs
        else:
            raise RewardError(
                "the episode has ended, and nothing says what it is worth",
                hint="end it with a reward: `episode.end(1.0)`, or return a number",
            )
        return StepResult("", reward, done=True, info=told)

    async def _until_over(self, episode: ProgramEpisode) -> How:
        """Wait until who runs it says that it has ended, or its time is over."""
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


def _seen(task: "asyncio.Task[StepResult]") -> None:
    """Look at an error that nobody may ask for any more."""
    if not task.cancelled():
        task.exception()
