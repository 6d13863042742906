"""The environment host: serves one job's game over the broker.

All hosts of the job share the subject of resets, and one of them takes each; steps and closes go to
the host that holds the episode. A repeated request gets the same answer again, so a caller may
repeat it after a lost connection. The games run in a `Runner`, off the event loop; a failure there
fails only its episode. The same class serves in an actor of the pool and in a client's process.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

import structlog
from cachetools import FIFOCache

from ..broker.client.connection import Broker
from ..broker.client.rpc import RequestContext, Service
from ..schemas import env
from ..schemas.config.job import EnvConfig
from ..schemas.local.process import owned
from ..schemas.profile import TimeUse
from ..schemas.wire import errors
from ..schemas.wire.codec import most_bytes
from ..schemas.wire.foreign import words_of
from ..schemas.wire.message import Empty
from ..schemas.wire.subjects import JobScope
from ..schemas.wire.trace import trace_of
from .data import HostData
from .dataset import Record
from .game import AbstractGame, ChatMessage, StepResult
from .host_replies import ResetAnswer, StepAnswer, wait_for_some
from .rewards import make_rewards
from .running.episodes import LOOK_S, GameFacts, Opening, retrieve_error
from .running.runners import BoundedRunner, Runner, TimedRunner, make_runner


class HostGone(errors.GameError):
    """The host of an episode does not answer any more: the episode starts again elsewhere."""

    code = "host_gone"


# Games with roles: each role is an episode of its own to its caller.
#
# The reset of a role returns its first prompt when its first turn comes; a step returns when its
# next turn comes or the game has ended. So an ordinary agent loop plays each role.


class SinglePlayer:
    """A single-player game."""

    in_use = False

    def __init__(self, runner: Runner, episode: str) -> None:
        self._runner = runner
        self._episode = episode

    async def begin(self, opening: Opening) -> list[ChatMessage]:
        """Start the game; return its first prompt."""
        return await self._runner.reset(opening)

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Play one action."""
        return asyncio.ensure_future(self._runner.step(self._episode, action))

    def finish(self) -> "asyncio.Future[StepResult]":
        """Return the reward of an episode that a limit ends."""
        return asyncio.ensure_future(self._runner.finish(self._episode))

    def leave(self) -> None:
        """Forget the game."""
        self._runner.drop(self._episode)


class RolePlayer:
    """One role of a game with several."""

    in_use = False

    def __init__(self, match: "Match", role: str) -> None:
        self.role = role
        self.prompt: asyncio.Future[list[ChatMessage]] = _promise()
        """Its first prompt; empty if the game ended before its first turn."""
        self.answer: asyncio.Future[StepResult] | None = None
        """The result of its last action, known at its next turn."""
        self.reward = 0.0
        """Its rewards since its last answer."""
        self.is_played = False
        """Whether a generator plays it."""
        self._match = match

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Play one action; the future is done when the next turn comes."""
        self.answer = _promise()
        self._match.play(self, action)
        return self.answer

    def finish(self) -> "asyncio.Future[StepResult]":
        """Return a reward of 0: in a game with roles all rewards are those of turns."""
        finished = _promise()
        finished.set_result(StepResult("", 0.0, done=True))
        return finished

    def leave(self) -> None:
        """Leave the game, which ends it for all; called for a player without tokens left."""
        self.is_played = False
        self._match.lose(self.role)

    def settle(self, result: StepResult) -> None:
        """Answer the last action, if it is still open, with the rewards since then."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(replace(result, reward=self.reward, rewards={}))
            self.reward = 0.0

    def fail(self, error: errors.TinkermqError) -> None:
        """Fail all open futures with an error."""
        for promise in (self.prompt, self.answer):
            if promise is not None and not promise.done():
                promise.set_exception(error)


class Match:
    """A game with several roles: their turns and open requests."""

    def __init__(self, runner: Runner, episode: str, roles: Sequence[str]) -> None:
        self._runner = runner
        self._episode = episode
        self._players = {role: RolePlayer(self, role) for role in roles}
        self._over = False
        self._error: errors.TinkermqError | None = None
        self._last = StepResult("", 0.0, done=False)
        self._steps: set[asyncio.Task[None]] = set()

    @property
    def in_use(self) -> bool:
        """Whether a role is played; its players have their own leases."""
        return any(player.is_played for player in self._players.values())

    async def begin(self, opening: Opening) -> list[ChatMessage]:
        """Start the game; each player has its own prompt."""
        await self._runner.reset(opening)
        await self._pass_on()
        return []

    def join(self, role: str) -> RolePlayer:
        """Return the player of a role; NotFoundError for a role that the game does not have."""
        player = self._players.get(role)
        if player is None:
            raise errors.NotFoundError(
                f"the game has no role {role!r}", hint=f"its roles are {', '.join(self._players)}"
            )
        player.is_played = True
        return player

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Raise an error: actions are played by roles."""
        raise errors.StateError(
            f"the game has roles ({', '.join(self._players)}): "
            f"its table takes no action {action!r}",
            hint="reset an episode for each role, with `table` and `role`",
        )

    def finish(self) -> "asyncio.Future[StepResult]":
        """Raise an error: actions are played by roles."""
        return self.step("")

    def leave(self) -> None:
        """End the game for its remaining players."""
        self._fail(errors.NotFoundError(f"table {self._episode!r} was closed"))
        self._drop()

    def play(self, player: RolePlayer, action: str) -> None:
        """Play the action of the player whose turn it is."""
        if self._error is not None:
            player.fail(self._error)
        elif self._over:  # a player left meanwhile: the game is over
            player.settle(self._last)
        else:
            task = asyncio.create_task(self._step(player, action), name=f"table {self._episode}")
            self._steps.add(task)
            task.add_done_callback(self._steps.discard)

    def lose(self, role: str) -> None:
        """End the game because a role has left."""
        if not self._over:
            self._last = StepResult("", 0.0, done=True, info={**self._last.info, "left_by": role})
            self._end()
            self._drop()

    def _drop(self) -> None:
        for step in self._steps:
            step.cancel()
        self._runner.drop(self._episode)

    async def _step(self, player: RolePlayer, action: str) -> None:
        try:
            result = await self._runner.step(self._episode, action)
            if self._over:
                return
            self._last = result
            player.reward += result.reward
            for role, reward in result.rewards.items():
                self._players[role].reward += reward
            if result.done:
                self._end()
            else:
                await self._pass_on()
        except errors.TinkermqError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a game whose roles change breaks the table
            self._fail(errors.GameError(f"the table of the game's roles broke: {words_of(error)}"))

    async def _pass_on(self) -> None:
        """Give the turn to the next role: set its first prompt, or its last action's answer."""
        role, prompt = await self._runner.turn(self._episode)
        if self._over:
            return
        if prompt:
            self._players[role].prompt.set_result(prompt)
        else:
            self._players[role].settle(self._last)

    def _end(self) -> None:
        self._over = True
        for player in self._players.values():
            if not player.prompt.done():
                player.prompt.set_result([])
            player.settle(self._last)

    def _fail(self, error: errors.TinkermqError) -> None:
        self._over, self._error = True, error
        for player in self._players.values():
            player.fail(error)


Player: TypeAlias = SinglePlayer | RolePlayer | Match


def _promise() -> "asyncio.Future[Any]":
    """Return a future whose error need not be retrieved."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(retrieve_error)
    return future


@dataclass
class HostedEpisode:
    """One episode; it stays after its end so that its last answer can be repeated."""

    opening: "asyncio.Future[list[ChatMessage]]"
    """The first prompt, for repeated requests with the same id."""
    player: Player
    """The player of its actions."""
    turn: int = 0
    """Number of the next turn."""
    answer: "asyncio.Future[StepResult] | None" = None
    """The game's answer to the last turn."""
    trace: str = ""
    """Trace id of the task, for the log."""
    ended: bool = False
    """Whether the game is done or has failed."""
    touched: float = field(default_factory=time.monotonic)
    """Time of its last request or answer."""

    def touch(self) -> None:
        """Renew the lease."""
        self.touched = time.monotonic()

    def leave(self) -> None:
        """Give the game back, even if it still begins or plays."""
        self.ended = True
        self.player.leave()
        for call in (self.opening, self.answer):
            if call is not None:
                call.cancel()

    def is_repeat(self, turn: int) -> bool:
        """Return whether `turn` repeats the last one; StateError for one out of order."""
        if self.answer is not None and turn == self.turn - 1:
            return True
        if turn != self.turn:
            raise errors.StateError(
                f"turn {turn} is out of order: the next turn of this episode is {self.turn}",
                hint="step each turn once, in order; the last may be repeated",
            )
        if self.ended:
            raise errors.StateError(
                f"the episode has ended after turn {self.turn - 1}",
                hint="close it and reset another",
            )
        if self.answer is not None and not self.answer.done():
            raise errors.StateError(
                f"turn {turn} was asked for while turn {self.turn - 1} is being played",
                hint="wait for the answer of a turn before the next",
            )
        return False

    def is_idle(self, now: float, lease_s: float) -> bool:
        """Return whether the lease has expired; never while the game computes."""
        busy = (
            self.player.in_use
            or not self.opening.done()
            or (self.answer is not None and not self.answer.done())
        )
        return not busy and now - self.touched > lease_s


MAX_EPISODES = 4096
MAX_CLOSED = 4 * MAX_EPISODES
"""Closed episodes that a host remembers."""
MAX_ACTION_BYTES = 256 << 20
"""Bytes of the actions that are played or queued."""
DRAIN_S = 30.0
_LEASE_CHECKS = 10
_LAST_REPLIES_S = 1.0
"""Time for callers to receive the reason of the host's end."""

_log = structlog.get_logger()


@dataclass
class HostCounts:
    """Counts of a host, for heartbeats and logs."""

    resets: int = 0
    steps: int = 0
    failures: int = 0
    expired: int = 0


def host_name() -> str:
    """Return a unique name that may stand in a subject."""
    return f"env-{uuid4().hex[:10]}"


class EnvironmentHost:
    """Runs the episodes of one job's game until stopped."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        config: EnvConfig,
        *,
        name: str = "",
        seed: int = 0,
        game_class: type[AbstractGame] | None = None,
        reward_function: Callable[..., Any] | None = None,
        judge_job: str | None = None,
        max_episodes: int = MAX_EPISODES,
        max_action_bytes: int = MAX_ACTION_BYTES,
        drain_s: float = DRAIN_S,
        programs: BoundedRunner | None = None,
    ) -> None:
        """Prepare a host.

        A client that hosts its own game passes `game_class` in place of `config.game`, and
        `reward_function` in place of `config.reward.function`. `judge_job` is the id of the job
        that `config.reward.judge` names, if it is known. With `programs`, episodes are runs of a
        program and not of a game. `seed` is the job's: it selects the validation rows, which must
        be the same on every host.
        """
        self.name = name or host_name()
        self.counts = HostCounts()
        self.time_use = TimeUse("full", "play", rest="idle")
        self.ready = asyncio.Event()
        """Set once episodes can be reset."""
        self._broker = broker
        self._scope = scope
        self._config = config
        self._seed = seed
        self._max_episodes = max_episodes
        self._max_action_bytes = max_action_bytes
        self._action_bytes = 0
        self._drain_s = drain_s
        self._needs_answers = programs is None
        self._runner = programs or make_runner(config, game_class)
        places = config.workers if programs is None else programs.places
        self._games = TimedRunner(self._runner, config, places, self.time_use)
        self._rewards = make_rewards(config.reward, broker, scope.user, reward_function, judge_job)
        self._held: dict[str, HostedEpisode] = {}
        self._closed = FIFOCache[str, bool](MAX_CLOSED)
        """Episodes that were closed: a request that is late must not begin them again."""
        self._changed = asyncio.Event()
        self._data: HostData
        self._facts = GameFacts(config.game, [], [])

    @property
    def num_running(self) -> int:
        """Number of episodes that have not ended."""
        return sum(not held.ended for held in self._held.values())

    @property
    def num_train(self) -> int | None:
        """Number of training rows, once the data is open; None for a game that generates its
        states."""
        return self._data.num_train

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then finish the present episodes and return.

        Raises GameError or DataError at once if the game or its data cannot be used, and
        ConfigError once the source of rewards refuses every episode.
        """
        self._broker.availability.set_patient(True)
        open_data = partial(HostData, self._config, self._seed, needs_answers=self._needs_answers)
        self._data = await owned(asyncio.to_thread(open_data), HostData.close)
        try:
            async with asyncio.TaskGroup() as tasks:
                keeper = tasks.create_task(self._keep(), name="env_keep")
                forget = self._broker.on_reconnect(self._renew)
                try:
                    self._facts = await self._runner.start()
                    async with self._rewards or contextlib.nullcontext():
                        await self._serve(stopping)
                finally:
                    forget()
                    keeper.cancel()
                    await self._runner.stop()
        finally:
            self._data.close()

    async def _serve(self, stopping: asyncio.Event) -> None:
        async with await self._service("episodes") as episodes:
            for verb, request, handler in (
                ("reset", env.ResetRequest, self._reset),
                ("step", env.StepRequest, self._step),
                ("close", env.CloseRequest, self._close),
            ):
                await episodes.endpoint(verb, self._scope.env(self.name, verb), request, handler)
            async with await self._service("resets") as resets:
                await resets.endpoint(
                    "describe", self._scope.env_describe, env.DescribeRequest, self._describe
                )
                await resets.endpoint("reset", self._scope.env_reset, env.ResetRequest, self._reset)
                self.ready.set()
                _log.info("host_ready", host=self.name, game=self._facts.name)
                unusable = await self._until_stopped(stopping)
            await self._drain(self._drain_s if unusable is None else _LAST_REPLIES_S)
            if unusable is not None:
                raise unusable

    async def _until_stopped(self, stopping: asyncio.Event) -> errors.TinkermqError | None:
        """Wait until the host ends; return the error if its rewards end it."""
        if self._rewards is None:
            await stopping.wait()
            return None
        waits = [
            asyncio.ensure_future(event.wait()) for event in (stopping, self._rewards.given_up)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._rewards.unusable

    async def _service(self, what: str) -> Service:
        return await Service.start(
            self._broker,
            name=f"tinkermq-{what}",
            description=f"{what} of {self._facts.name} at {self.name}, job {self._scope.job}",
            metadata={"host": self.name, "user": self._scope.user, "job": self._scope.job},
        )

    async def _drain(self, limit_s: float) -> None:
        """Continue the running episodes until they end, for `limit_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.num_running:
                    self._changed.clear()
                    await self._changed.wait()
        _log.info("host_drained", host=self.name, abandoned=self.num_running)

    async def _keep(self) -> None:
        """End hung games, and free episodes with expired leases."""
        next_check = 0.0
        while True:
            self._runner.end_overdue()
            now = time.monotonic()
            if now >= next_check and self._broker.is_connected:
                self._expire(now)
                next_check = now + min(1.0, self._config.lease_s / _LEASE_CHECKS)
            await asyncio.sleep(LOOK_S)

    def _renew(self) -> None:
        """Renew all leases, since no step could arrive while the broker was away."""
        for held in self._held.values():
            held.touch()

    def _expire(self, now: float) -> None:
        lease_s = self._config.lease_s
        idle = [name for name, held in self._held.items() if held.is_idle(now, lease_s)]
        for episode in idle:
            if not self._held[episode].ended:
                self.counts.expired += 1
                trace = self._held[episode].trace
                _log.warning("episode_expired", episode=episode, lease_s=lease_s, trace=trace)
            self._free(episode)

    def _free(self, episode: str) -> None:
        held = self._held.pop(episode, None)
        if held is not None:
            held.leave()
        if self._rewards is not None:
            self._rewards.forget(episode)
        self._changed.set()

    async def _describe(self, _: env.DescribeRequest) -> env.DescribeReply:
        return env.DescribeReply(
            game=self._facts.name,
            num_train=self._data.num_train,
            num_val=self._data.num_val,
            host=self.name,
            roles=self._facts.roles,
        )

    @property
    def _most_bytes(self) -> int:
        """Bytes of one episode in an answer that fit a message beside a megabyte of others."""
        return most_bytes(self._broker.max_payload_bytes) * 3 // 4

    async def _reset(self, request: env.ResetRequest, context: RequestContext) -> env.ResetReply:
        """Start the episodes that are not running yet; return those that are ready, and errors."""
        trace = trace_of(context.traceparent)
        held = self._hold_all(request, trace)
        await wait_for_some([episode.opening for episode in held], request.wait_s)
        answer = ResetAnswer(self._most_bytes)
        for episode, begun in zip(request.episodes, held, strict=True):
            if not answer.add(begun.opening) and self._held.get(episode) is begun:
                self._free(episode)
        return env.ResetReply(
            host=self.name,
            episodes=answer.episodes,
            prompts=answer.prompts,
            tools=self._tools_of(request),
            rewards_ends=self._facts.rewards_ends,
            data_source=self._data.source(request.split, request.sample),
            lease_s=self._config.lease_s,
        )

    def _tools_of(self, request: env.ResetRequest) -> list[dict[str, Any]]:
        """Return the tools of a row, which all episodes of a request share."""
        if not self._facts.environments:
            return self._facts.tools
        try:
            record = self._data.record(request.split, request.sample)
        except errors.DataError:
            return []  # the start of the episode raises the error
        return self._facts.tools_of(record)

    def _hold_all(self, request: env.ResetRequest, trace: str) -> list[HostedEpisode]:
        """Start the episodes of a request that are not running yet: all of them, or none."""
        fresh = [episode for episode in request.episodes if episode not in self._held]
        try:
            return [self._hold(episode, request, trace) for episode in request.episodes]
        except BaseException:
            for episode in fresh:
                self._free(episode)
            raise

    def _hold(self, episode: str, request: env.ResetRequest, trace: str) -> HostedEpisode:
        held = self._held.get(episode)
        if held is None and (request.only_held or episode in self._closed):
            raise self._not_held(episode)
        if held is None:
            self._make_room()
            begin = self._join if request.table else self._begin
            held = begin(episode, request)
            held.trace = trace
            held.opening.add_done_callback(retrieve_error)
            self._held[episode] = held
        held.touch()
        return held

    def _join(self, episode: str, request: env.ResetRequest) -> HostedEpisode:
        """Join a role of a match on this host."""
        match = self._held.get(request.table or "")
        if match is None or not isinstance(match.player, Match):
            raise errors.NotFoundError(f"host {self.name} holds no table {request.table!r}")
        player = match.player.join(request.role)
        record = self._data.record(request.split, request.sample)
        return HostedEpisode(
            asyncio.ensure_future(self._opened(episode, record, player.prompt)), player
        )

    def _begin(self, episode: str, request: env.ResetRequest) -> HostedEpisode:
        """Start a game: an episode, or the table of a game with roles."""
        if self._facts.roles:
            player: SinglePlayer | Match = Match(self._games, episode, self._facts.roles)
        else:
            player = SinglePlayer(self._games, episode)
        return HostedEpisode(asyncio.ensure_future(self._open(episode, request, player)), player)

    async def _open(
        self, episode: str, request: env.ResetRequest, player: SinglePlayer | Match
    ) -> list[ChatMessage]:
        self.counts.resets += 1
        try:
            record = self._data.record(request.split, request.sample)
            opening = Opening(episode, request.seed, record, request.kwargs, request.split)
            return await self._opened(episode, record, player.begin(opening))
        except asyncio.CancelledError:
            player.leave()
            raise
        except BaseException:
            self.counts.failures += 1
            self._held.pop(episode, None)
            self._changed.set()
            player.leave()
            raise

    async def _opened(
        self, episode: str, record: Record | None, opening: Awaitable[list[ChatMessage]]
    ) -> list[ChatMessage]:
        """Return the first prompt of an episode, and start to reward it."""
        messages = await opening
        if self._rewards is not None and messages:
            self._rewards.begin(episode, record, messages)
        return messages

    def _make_room(self) -> None:
        if len(self._held) < self._max_episodes:
            return
        for episode in [name for name, held in self._held.items() if held.ended]:
            self._free(episode)
        if len(self._held) >= self._max_episodes:
            raise errors.StateError(
                f"host {self.name} holds {self._max_episodes} episodes, its limit",
                hint="add an environment host, or lower generator.max_episodes",
            )

    async def _step(self, request: env.StepRequest) -> env.StepReply:
        """Play the actions; return the results that are ready, and errors."""
        columns = zip(
            request.episodes, request.turns, request.actions, request.is_final, strict=True
        )
        answers = [self._play(*action) for action in columns]
        await wait_for_some([a for a in answers if isinstance(a, asyncio.Future)], request.wait_s)
        collected = StepAnswer(self._most_bytes)
        for answer in answers:
            collected.add(answer)
        return collected.reply()

    def _play(
        self, episode: str, turn: int, action: str, final: bool
    ) -> "asyncio.Future[StepResult] | errors.TinkermqError":
        held = self._held.get(episode)
        if held is None:
            return self._not_held(episode)
        held.touch()
        try:
            if not held.is_repeat(turn):
                num_bytes = self._fitting_bytes(action)
                held.answer = self._answer(held.player, episode, action, final)
                self._action_bytes += num_bytes
                held.answer.add_done_callback(partial(self._settle, held, num_bytes))
                held.turn += 1
                self.counts.steps += 1
        except errors.TinkermqError as error:
            return error
        assert held.answer is not None
        return held.answer

    def _fitting_bytes(self, action: str) -> int:
        """Return the bytes in memory of an action to play; StateError without room."""
        num_bytes = sys.getsizeof(action)
        if self._action_bytes and self._action_bytes + num_bytes > self._max_action_bytes:
            raise errors.StateError(
                f"host {self.name} holds {self._action_bytes:,} bytes of actions that wait for "
                f"their games, and {self._max_action_bytes:,} are its limit",
                hint="add an environment host or workers, or lower generator.max_episodes",
            )
        return num_bytes

    def _not_held(self, episode: str) -> errors.NotFoundError:
        return errors.NotFoundError(
            f"host {self.name} holds no episode {episode!r}",
            hint=f"it was closed, or freed after {self._config.lease_s:g} s without a step",
        )

    def _answer(
        self, player: Player, episode: str, action: str, final: bool
    ) -> "asyncio.Future[StepResult]":
        """Play an action, or only reward an episode; return the game's answer with the rewards."""
        if self._rewards is None and not final:
            return player.step(action)
        if final:
            return self._finish(player, episode)
        assert self._rewards is not None
        played = player.step(action)
        return asyncio.ensure_future(self._rewards.step(episode, action, played))

    def _finish(self, player: Player, episode: str) -> "asyncio.Future[StepResult]":
        """Reward an episode that a limit ends."""
        if self._rewards is None and not self._facts.rewards_ends:
            raise errors.StateError("the episode is to be rewarded, but its turns have earned all")
        finishing = player.finish() if self._facts.rewards_ends else None
        if self._rewards is not None:
            return asyncio.ensure_future(self._rewards.finish(episode, finishing))
        assert finishing is not None
        return finishing

    def _settle(
        self, held: HostedEpisode, num_bytes: int, answer: "asyncio.Future[StepResult]"
    ) -> None:
        """Record the game's answer; an episode of a failed game has ended."""
        self._action_bytes -= num_bytes
        if answer.cancelled() or answer.exception() is not None:
            self.counts.failures += not held.ended
            held.ended = True
        else:
            held.ended = held.ended or answer.result().done
            held.touch()
        self._changed.set()

    async def _close(self, request: env.CloseRequest) -> Empty:
        self._closed[request.episode] = True
        self._free(request.episode)
        return Empty()
