"""What a source of rewards is: it is shown a case and says a score."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from ...schemas.wire.errors import ConfigError, MessageError, RewardError
from ...schemas.wire.foreign import plain_value, shown
from ..game import ChatMessage

_VALUE_KEYS = ("score", "reward")


@dataclass
class Case:
    """What a source judges: the policy's answer, and all that is known of the episode."""

    data_source: str
    """What the row of the data says of its origin."""
    ground_truth: Any
    """The row's gold answer; None for a game that generates its states."""
    extra_info: dict[str, Any]
    """Whatever else the row says."""
    messages: list[ChatMessage]
    """The conversation so far."""
    solution_str: str = ""
    """The policy's last answer."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the game said in `info` at its last step."""
    game_return: float = 0.0
    """Sum of the game's own rewards."""

    def arguments(self) -> dict[str, Any]:
        """Return what functions and endpoints are given."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            "messages": self.messages,
            "info": self.info,
        }


@dataclass(frozen=True)
class Score:
    """What a source says."""

    value: float
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else it tells; numbers become metrics."""


class SourceUnusableError(ConfigError):
    """A source that would fail every episode for the same reason: the job is to end with it."""


class Source(Protocol):
    """Says what a case is worth."""

    async def start(self) -> None:
        """Get ready; raises what makes the source unusable."""
        ...

    async def score(self, case: Case) -> Score:
        """Judge a case; RewardError when that is not possible, SourceUnusableError for any."""
        ...

    async def stop(self) -> None:
        """Give back what it holds."""
        ...


def read_score(answer: Any, whose: str) -> Score:
    """Read what a function returned or an endpoint answered: a number, or a map with one.

    The map holds it as `score` (verl's name) or `reward`. Raises RewardError for anything else,
    naming `whose` answer it is.
    """
    value, info = answer, cast("dict[str, Any]", {})
    if isinstance(answer, Mapping):
        info = dict(cast("Mapping[Any, Any]", answer))
        value = next((info.pop(key) for key in _VALUE_KEYS if key in info), None)
    number = _number(value)
    if not math.isfinite(number):
        told = shown(cast("object", answer))
        raise RewardError(
            f"{whose} answered {told}, which is no finite reward",
            hint="answer a number, or a map whose `score` or `reward` is one",
        )
    try:
        return Score(number, plain_value(info, "info") if info else {})
    except MessageError as error:
        raise RewardError(
            f"what {whose} answered beside the reward cannot travel: {error.message}",
            hint=error.hint,
        ) from error


def _number(value: Any) -> float:
    """Return a number of any kind, NumPy's and torch's too, as a float; NaN for what is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
