"""Parses what a program or its reward command writes: a number, or an object with `reward`."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, cast

from ....schemas.wire.errors import MessageError, RewardError
from ....schemas.wire.foreign import plain_value

_SHOWN_CHARS = 200
_FORM = 'a number, or {"reward": number, "success": true or false, "info": {…}}'


@dataclass(frozen=True)
class ProgramReward:
    """A reward, and what else was written about the episode."""

    reward: float
    success: bool | None = None
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def facts(self) -> dict[str, Any]:
        """Return what the generator gets besides the reward."""
        return self.info if self.success is None else {**self.info, "success": self.success}


def parse_reward(text: str, whose: str) -> ProgramReward:
    """Parse what `whose` wrote; RewardError for what is no reward."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _refusal(text, whose, "is neither a number nor JSON") from None
    if not isinstance(value, dict):
        return ProgramReward(checked_number(value, text, whose))
    fields = cast("dict[str, Any]", value)
    if unknown := sorted(set(fields) - {"reward", "success", "info"}):
        raise _refusal(text, whose, f"has the key {unknown[0]!r}, which means nothing")
    success, info = fields.get("success"), fields.get("info", {})
    if not isinstance(success, bool | None):
        raise _refusal(text, whose, f"has success={success!r}")
    if not isinstance(info, dict):
        raise _refusal(text, whose, f"has info={info!r}")
    reward = checked_number(fields.get("reward"), text, whose)
    try:
        plain = plain_value(cast("dict[str, Any]", info), "info")
    except MessageError as error:
        raise _refusal(text, whose, f"cannot travel ({error.message})") from error
    return ProgramReward(reward, success, plain)


def checked_number(value: Any, text: str, whose: str) -> float:
    """Return a reward as a number; RewardError for what is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(text, whose, f"gives the reward {value!r}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(text, whose, "gives a reward that is not finite")
    return number


def _refusal(text: str, whose: str, why: str) -> RewardError:
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return RewardError(f"what {whose} wrote {why}: {shown!r}", hint=f"write {_FORM}")
