"""The first prompt of an episode.

One instance of the game is reset and makes the prompt, so the two always agree. A generated game is
reset first and then describes its state, so a description that resets the game again matches the
present state.
"""

import inspect
import random
from typing import Any

from ..schemas.wire.errors import DataError
from .dataset import Record
from .game import AbstractGame, ChatMessage, check_map, check_text, join_texts


def open_game(
    game: AbstractGame, *, seed: int, record: Record | None, kwargs: dict[str, Any]
) -> list[ChatMessage]:
    """Start an episode of `game` and return the chat messages of its first prompt.

    `record` is the row of a dataset game, None for a game that generates its states; `kwargs` are
    further arguments of `reset`.
    """
    state = _prepare(game, seed, record, kwargs)
    return _describe(game, record, state, game.reset(**state))


async def open_async_game(
    game: AbstractGame, *, seed: int, record: Record | None, kwargs: dict[str, Any]
) -> list[ChatMessage]:
    """Do the same as `open_game` for a game whose `reset` may be a coroutine."""
    state = _prepare(game, seed, record, kwargs)
    return _describe(game, record, state, await resolve(game.reset(**state)))


async def resolve(answer: Any) -> Any:
    """Return the result of a method, which may be a coroutine."""
    return await answer if inspect.isawaitable(answer) else answer


def _prepare(
    game: AbstractGame, seed: int, record: Record | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Seed the game and return the arguments of its `reset`."""
    game.rng = random.Random(seed)  # noqa: S311 - a game's dice, not a secret
    if record is None:
        state = check_map(game, "generate_initial_state", game.generate_initial_state())
        return {**state, **kwargs}
    if game.takes_rows:
        return {"row": record.columns, **kwargs}
    return {
        "ground_truth": record.ground_truth,
        "data_source": record.data_source or game.get_interaction_name(),
        "extra_info": record.extra_info,
        **({"images": record.images} if record.images else {}),
        **kwargs,
    }


def _describe(
    game: AbstractGame, record: Record | None, state: dict[str, Any], opening: Any
) -> list[ChatMessage]:
    """Return the first prompt of a game whose reset returned `opening`."""
    opening = check_text(game, "reset", opening)
    messages = record.messages() if record is not None and record.prompt else []
    if messages:
        messages = game.complete_prompt(messages, opening)
    else:
        messages = _generated(game, state, opening)
    if not (messages and messages[0]["role"] == "system"):
        messages = [*_system(game), *messages]
    if not messages:
        row = f" of {record.where}" if record is not None and record.where else ""
        raise DataError(
            f"{type(game).__name__} makes an empty prompt{row}",
            hint="return a text from get_initial_user_message, reset, or put it in the data",
        )
    return messages


def address(game: AbstractGame, observation: str) -> list[ChatMessage]:
    """Return the first prompt of the role whose turn it is in a started game."""
    return [*_system(game), {"role": "user", "content": join_texts(_initial(game), observation)}]


def _generated(game: AbstractGame, state: dict[str, Any], opening: str) -> list[ChatMessage]:
    if _describes_itself(type(game)):
        user = game.get_user_message_with_state(**state)
    else:
        user = join_texts(_initial(game), opening)
    user = check_text(game, "get_user_message_with_state", user)
    return [{"role": "user", "content": user}] if user else []


def _initial(game: AbstractGame) -> str:
    message: Any = game.get_initial_user_message()
    return "" if message is None else check_text(game, "get_initial_user_message", message)


def _system(game: AbstractGame) -> list[ChatMessage]:
    message: Any = game.get_system_prompt()
    text = "" if message is None else check_text(game, "get_system_prompt", message)
    return [{"role": "system", "content": text}] if text else []


def _describes_itself(game_class: type[AbstractGame]) -> bool:
    """Return whether the class describes its first state in a different text than `reset`."""
    return (
        game_class.get_user_message_with_state is not AbstractGame.get_user_message_with_state
        or game_class.render_state_for_prompt is not AbstractGame.render_state_for_prompt
    )
