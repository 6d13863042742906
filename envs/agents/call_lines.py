"""The tree of a program's calls as text lines, from its main row."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

_MAX_CHARS = 200
_MAX_LINES = 1000
_MAX_DEPTH = 8
WHY_NOT = {
    "apart": "nothing of it reached the outcome",
    "other": "not of the main conversation",
    "pattern": "left out by the pattern of agent.train",
    "undelivered": "its answer did not arrive",
    "left out": "taken out by the program",
    "cut": "behind the longest row",
}
"""Why a call is not trained, in words."""
_BRANCHES = {
    "sample": "another answer to the same request",
    "edited": "the history was edited",
    "template": "the template writes the history anew",
    "system": "another system message",
    "tools": "other tools",
    "compacted": "a compacted history",
    "apart": "a history of its own",
}


@dataclass(frozen=True)
class CallLine:
    """One call of the model."""

    call: int
    """Its number in the episode."""
    depth: int
    """How many branches lie above it."""
    branch: str
    """Why it is not the only continuation of what came before; empty: it is."""
    row: int | None
    """In which row of the episode it is trained; None: in none."""
    why_not: str
    """Why it is not trained; empty: it is."""
    tokens: int
    """Tokens that were generated."""
    given_tokens: int
    """Tokens that were new in its prompt."""
    reward: float | None
    """A reward of its own; None: it has none."""
    branch_reward: float | None
    """What the branch that begins with it was rewarded with; None: nothing."""
    name: str
    """What the program calls the branch that begins with it."""
    finish: str
    """Why it ended: stop or length."""
    text: str
    """The beginning of its answer."""
    tools: list[str]
    """Names of the tools that it called."""


def call_lines(info: Mapping[str, Any]) -> list[CallLine]:
    """Return the calls of an episode of a program, in order; none of any other episode.

    `info` is that of its main row; whatever in it is no call is passed over.
    """
    calls = info.get("calls")
    if not isinstance(calls, list):
        return []
    lines: list[CallLine] = []
    depths: dict[int, int] = {}
    for call in cast("list[Any]", calls)[:_MAX_LINES]:
        if isinstance(call, dict) and isinstance(cast("dict[str, Any]", call).get("call"), int):
            line = _line(cast("dict[str, Any]", call), depths)
            depths[line.call] = line.depth
            lines.append(line)
    return lines


def _line(call: Mapping[str, Any], depths: Mapping[int, int]) -> CallLine:
    branch = str(call.get("branch") or "")
    parent = call.get("parent")
    if parent is None:
        parent = call.get("follows")
    above = depths.get(parent, 0) if isinstance(parent, int) else 0
    row, why = call.get("row"), str(call.get("untrained") or "")
    tools = call.get("tools")
    return CallLine(
        call=int(call["call"]),
        depth=min(above + bool(branch), _MAX_DEPTH),
        branch=_BRANCHES.get(branch, branch[:_MAX_CHARS]),
        row=row if isinstance(row, int) else None,
        why_not=WHY_NOT.get(why, why[:_MAX_CHARS]),
        tokens=_whole(call.get("tokens")),
        given_tokens=_whole(call.get("given_tokens")),
        reward=_number(call.get("reward")),
        branch_reward=_number(call.get("branch_reward")),
        name=str(call.get("name") or "")[:_MAX_CHARS],
        finish=str(call.get("finish") or "")[:_MAX_CHARS],
        text=str(call.get("text") or "")[:_MAX_CHARS],
        tools=[str(name)[:_MAX_CHARS] for name in cast("list[Any]", tools)]
        if isinstance(tools, list)
        else [],
    )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None
