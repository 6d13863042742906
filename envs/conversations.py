"""Play a game with roles in one process, without a host: the conversation of each role."""

from collections.abc import Callable
from typing import Any

from ..schemas.wire.errors import GameError
from .game import AbstractGame, ChatMessage, StepResult
from .running.episodes import Episodes, Opening

Act = Callable[[str, list[ChatMessage]], str]
"""Returns the action of a role for its conversation so far."""


def converse(
    game_class: type[AbstractGame],
    act: Act,
    *,
    seed: int = 0,
    kwargs: dict[str, Any] | None = None,
    reset_kwargs: dict[str, Any] | None = None,
) -> tuple[dict[str, list[ChatMessage]], list[tuple[str, StepResult]]]:
    """Play one episode; return the conversation of each role, and each action's role and result.

    A role that never had a turn has no conversation. Raises GameError, also for a game without
    roles.
    """
    episodes = Episodes(game_class, kwargs or {})
    episodes.reset(Opening("", seed, kwargs=reset_kwargs or {}))
    try:
        return _played(episodes, game_class, act)
    finally:
        episodes.drop_all()


def _played(
    episodes: Episodes, game_class: type[AbstractGame], act: Callable[[str, list[ChatMessage]], str]
) -> tuple[dict[str, list[ChatMessage]], list[tuple[str, StepResult]]]:
    if not episodes.running("").roles:
        raise GameError(
            f"{game_class.__name__} has no roles, and converse plays the roles of a game",
            hint="play it with `tinkermq env play`, or call its reset and step",
        )
    conversations: dict[str, list[ChatMessage]] = {}
    results: list[tuple[str, StepResult]] = []
    observation = ""
    while True:
        role, prompt = episodes.turn("")
        if prompt:
            conversations[role] = list(prompt)
        else:
            conversations[role].append({"role": "user", "content": observation})
        action = act(role, conversations[role])
        conversations[role].append({"role": "assistant", "content": action})
        result = episodes.step("", action)
        results.append((role, result))
        if result.done:
            return conversations, results
        observation = result.observation


def returns(results: list[tuple[str, StepResult]]) -> dict[str, float]:
    """Return the sum of each role's rewards in an episode."""
    totals: dict[str, float] = {}
    for role, result in results:
        totals[role] = totals.get(role, 0.0) + result.reward
        for other, reward in result.rewards.items():
            totals[other] = totals.get(other, 0.0) + reward
    return totals
