"""How long a call of a game may take, and whether it has run past that.

A runner is asked to `end_overdue` a few times a second. What it does with an overdue call follows
from how it plays: a thread is given up and replaced, a process killed, a coroutine cancelled. The
limit counts from when the game began, not from when it was asked.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schemas.config.job import EnvConfig
from ...schemas.wire.errors import GameError
from ..game import StepResult

if TYPE_CHECKING:
    import asyncio

LOOK_S = 0.1
"""Seconds between two looks for overdue calls."""
_OF_STEPS = frozenset({"step", "turn", "drop"})


class GameHung(GameError):
    """A call of a game that ran past its limit."""


@dataclass
class TimedOut(StepResult):
    """The end of an episode whose last action took the game too long (`env.on_step_timeout`)."""


def end_of_hung(config: EnvConfig, error: GameHung) -> TimedOut:
    """Return what stands for the answer to an action that hung; raises `error` for `retry`."""
    if config.on_step_timeout == "retry":
        raise error
    is_penalty = config.on_step_timeout == "penalty"
    return TimedOut("", config.step_timeout_reward if is_penalty else 0.0, done=True)


class TimeLimits(NamedTuple):
    """Seconds that calls of a game may take."""

    reset_s: float
    """A reset, and the making of a game."""
    step_s: float
    """A step, and whatever else an episode is asked."""

    def of(self, verb: str) -> float:
        """Return the limit of a kind of call."""
        return self.step_s if verb in _OF_STEPS else self.reset_s


@dataclass
class Call:
    """One call of a game, and who waits for it."""

    verb: str
    episode: str
    limit_s: float
    future: "asyncio.Future[Any]"
    started: float | None = field(default=None, kw_only=True)
    """When the game began with it, by the monotonic clock; None: it waits for its turn."""

    @property
    def is_overdue(self) -> bool:
        """Whether the game has been at it for longer than it may."""
        return self.started is not None and time.monotonic() - self.started >= self.limit_s

    def hung(self, game: str) -> GameHung:
        """Return the error that ends it."""
        return hung(game, self.verb, self.limit_s)


def hung(game: str, verb: str, limit_s: float) -> GameHung:
    """Return the error of a game that ran past its limit."""
    key = "env.step_timeout_s" if verb in _OF_STEPS else "env.reset_timeout_s"
    return GameHung(
        f"{game} hung in {verb} for {limit_s:g} s",
        hint=f"mend the game, or raise {key} if it may take longer",
    )
