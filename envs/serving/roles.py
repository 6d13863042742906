"""What an episode of a host is: a game of its own, or a seat at a game with several roles.

At a table every role has a seat, and a seat is an episode of its own to its caller: its reset is
answered with the role's first prompt when its first turn comes, its step when its next turn comes
or the game has ended. So each role is played by an ordinary agent loop that knows nothing of the
others.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...schemas.wire.errors import GameError, NotFoundError, StateError, TinkermqError
from ...schemas.wire.foreign import words_of
from ..game import ChatMessage, StepResult
from ..running.episodes import Opening
from ..running.runner import Runner


class Player(Protocol):
    """One episode that a host holds."""

    @property
    def in_use(self) -> bool:
        """Whether others need it, so that no lease of its own ends it."""
        ...

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Play one action."""
        ...

    def leave(self) -> None:
        """Nobody will play it any more."""
        ...


class Solo:
    """A game for one."""

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

    def leave(self) -> None:
        """Forget the game."""
        self._runner.drop(self._episode)


class Seat:
    """One role of a game with several."""

    in_use = False

    def __init__(self, table: "Table", role: str) -> None:
        self.role = role
        self.prompt: asyncio.Future[list[ChatMessage]] = _promise()
        """Its first prompt; empty if the game ended before its first turn."""
        self.answer: asyncio.Future[StepResult] | None = None
        """What its last action led to, at its next turn."""
        self.reward = 0.0
        """What it was given since it was last answered."""
        self.taken = False
        """Whether somebody plays it."""
        self._table = table

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Play one action; answered when the next turn comes."""
        self.answer = _promise()
        self._table.play(self, action)
        return self.answer

    def leave(self) -> None:
        """Give the seat up, as one whose tokens are used up does: the game ends for all others."""
        self.taken = False
        self._table.lose(self.role)

    def settle(self, result: StepResult) -> None:
        """Answer the last action, if it has not been answered, with what the seat was given."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(replace(result, reward=self.reward, rewards={}))
            self.reward = 0.0

    def fail(self, error: TinkermqError) -> None:
        """Answer whatever is open with an error."""
        for promise in (self.prompt, self.answer):
            if promise is not None and not promise.done():
                promise.set_exception(error)


class Table:
    """A game with several roles: whose turn it is, and who waits for what."""

    def __init__(self, runner: Runner, episode: str, roles: Sequence[str]) -> None:
        self._runner = runner
        self._episode = episode
        self._seats = {role: Seat(self, role) for role in roles}
        self._over = False
        self._error: TinkermqError | None = None
        self._last = StepResult("", 0.0, done=False)
        self._steps: set[asyncio.Task[None]] = set()

    @property
    def in_use(self) -> bool:
        """Whether somebody plays a seat: the seats have leases of their own."""
        return any(seat.taken for seat in self._seats.values())

    async def begin(self, opening: Opening) -> list[ChatMessage]:
        """Start the game; the prompts are those of the seats."""
        await self._runner.reset(opening)
        await self._pass_on()
        return []

    def sit(self, role: str) -> Seat:
        """Take a seat; NotFoundError for a role that the game does not have."""
        seat = self._seats.get(role)
        if seat is None:
            raise NotFoundError(
                f"the game has no role {role!r}", hint=f"its roles are {', '.join(self._seats)}"
            )
        seat.taken = True
        return seat

    def step(self, action: str) -> "asyncio.Future[StepResult]":
        """Refuse: actions are played at the seats."""
        raise StateError(
            f"the game has roles ({', '.join(self._seats)}): its table takes no action {action!r}",
            hint="reset an episode for each role, with `table` and `role`",
        )

    def leave(self) -> None:
        """End the game for whoever still plays it."""
        self._fail(NotFoundError(f"table {self._episode!r} was closed"))
        self._runner.drop(self._episode)

    def play(self, seat: Seat, action: str) -> None:
        """Play the action of a seat whose turn it is."""
        if self._error is not None:
            seat.fail(self._error)
        elif self._over:  # somebody left meanwhile: there is no game any more
            seat.settle(self._last)
        else:
            task = asyncio.create_task(self._step(seat, action), name=f"table {self._episode}")
            self._steps.add(task)
            task.add_done_callback(self._steps.discard)

    def lose(self, role: str) -> None:
        """End the game because a role has left."""
        if not self._over:
            self._last = StepResult("", 0.0, done=True, info={**self._last.info, "left_by": role})
            self._end()
            self._runner.drop(self._episode)

    async def _step(self, seat: Seat, action: str) -> None:
        try:
            result = await self._runner.step(self._episode, action)
            if self._over:
                return
            self._last = result
            seat.reward += result.reward
            for role, reward in result.rewards.items():
                self._seats[role].reward += reward
            if result.done:
                self._end()
            else:
                await self._pass_on()
        except TinkermqError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a game whose roles change breaks the table
            self._fail(GameError(f"the table of the game's roles broke: {words_of(error)}"))

    async def _pass_on(self) -> None:
        """Give the turn to the role whose it is: its first prompt, or the answer it waits for."""
        role, prompt = await self._runner.turn(self._episode)
        if self._over:
            return
        if prompt:
            self._seats[role].prompt.set_result(prompt)
        else:
            self._seats[role].settle(self._last)

    def _end(self) -> None:
        self._over = True
        for seat in self._seats.values():
            if not seat.prompt.done():
                seat.prompt.set_result([])
            seat.settle(self._last)

    def _fail(self, error: TinkermqError) -> None:
        self._over, self._error = True, error
        for seat in self._seats.values():
            seat.fail(error)


def _promise() -> "asyncio.Future[Any]":
    """Return a future whose error nobody needs to look at."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_seen)
    return future


def _seen(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
