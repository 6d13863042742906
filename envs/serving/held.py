"""What a host remembers of one episode: its reply, its turn, and when it was last touched."""

import asyncio
import time
from dataclasses import dataclass, field

from ...schemas.wire.errors import StateError
from ..game import ChatMessage, StepResult
from .seats import Player


@dataclass
class Held:
    """One episode; an episode that has ended is kept so that its last answer can be repeated."""

    opening: "asyncio.Future[list[ChatMessage]]"
    """The first prompt, for those who ask again with the same id."""
    player: Player
    """What plays its actions."""
    turn: int = 0
    """Number of the next turn."""
    answer: "asyncio.Future[StepResult] | None" = None
    """The game's answer to the last turn."""
    trace: str = ""
    """Trace id of the task, for the log."""
    ended: bool = False
    """Whether the game is done, or has failed."""
    touched: float = field(default_factory=time.monotonic)
    """When it was last asked for or answered."""

    def touch(self) -> None:
        """Renew the lease."""
        self.touched = time.monotonic()

    def is_repeat(self, turn: int) -> bool:
        """Whether `turn` is the last one over again; StateError for one out of order."""
        if self.answer is not None and turn == self.turn - 1:
            return True
        if turn != self.turn:
            raise StateError(
                f"turn {turn} is out of order: the next turn of this episode is {self.turn}",
                hint="step each turn once, in order; the last may be repeated",
            )
        if self.ended:
            raise StateError(
                f"the episode has ended after turn {self.turn - 1}",
                hint="close it and reset another",
            )
        if self.answer is not None and not self.answer.done():
            raise StateError(
                f"turn {turn} was asked for while turn {self.turn - 1} is being played",
                hint="wait for the answer of a turn before the next",
            )
        return False

    def is_idle(self, now: float, lease_s: float) -> bool:
        """Whether the lease has run out; never while the game is busy with it."""
        busy = (
            self.player.in_use
            or not self.opening.done()
            or (self.answer is not None and not self.answer.done())
        )
        return not busy and now - self.touched > lease_s
