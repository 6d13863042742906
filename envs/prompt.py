"""How the first prompt of an episode is made: here and nowhere else.

One instance of the game is reset and makes the prompt, so the two always agree. A generated game
is reset first and describes itself afterwards: a game whose description resets it again has then
described the state that it is in.
"""

import random
from typing import Any

from ..schemas.errors import DataError
from .game import AbstractGame, ChatMessage, check_map, check_text, join_texts
from .record import Record


def open_game(
    game: AbstractGame, *, seed: int, record: Record | None, kwargs: dict[str, Any]
) -> list[ChatMessage]:
    """Start an episode of `game` and return the chat messages of its first prompt.

    `record` is the row of a dataset game, None for a game that generates its states; `kwargs` are
    further arguments of `reset`.
    """
    game.rng = random.Random(seed)  # noqa: S311 - a game's dice, not a secret
    if record is None:
        messages = _open_generated(game, kwargs)
    else:
        messages = _open_record(game, record, kwargs)
    if not messages:
        raise DataError(
            f"{type(game).__name__} makes an empty prompt",
            hint="return a text from get_initial_user_message, reset, or put it in the data",
        )
    return messages


def address(game: AbstractGame, observation: str) -> list[ChatMessage]:
    """Return the first prompt of the role whose turn it is, when the game has begun already."""
    opening = check_text(game, "get_initial_user_message", game.get_initial_user_message())
    return [*_system(game), {"role": "user", "content": join_texts(opening, observation)}]


def _open_generated(game: AbstractGame, kwargs: dict[str, Any]) -> list[ChatMessage]:
    state = {
        **check_map(game, "generate_initial_state", game.generate_initial_state()),
        **kwargs,
    }
    return _describe(game, check_text(game, "reset", game.reset(**state)), state)


def _describe(game: AbstractGame, opening: str, state: dict[str, Any]) -> list[ChatMessage]:
    """Return the messages of a game that words its own prompt; `opening` is what it reset to."""
    if _describes_itself(type(game)):
        user = game.get_user_message_with_state(**state)
    else:
        user = join_texts(game.get_initial_user_message(), opening)
    user = check_text(game, "get_user_message_with_state", user)
    return [*_system(game), *([{"role": "user", "content": user}] if user else [])]


def _open_record(game: AbstractGame, record: Record, kwargs: dict[str, Any]) -> list[ChatMessage]:
    arguments = {
        "ground_truth": record.ground_truth,
        "data_source": record.data_source or game.get_interaction_name(),
        "extra_info": record.extra_info,
        **({"images": record.images} if record.images else {}),
        **kwargs,
    }
    opening = check_text(game, "reset", game.reset(**arguments))
    if not record.prompt:
        return _describe(game, opening, arguments)
    messages = record.messages()
    if messages and messages[0]["role"] == "system":
        return messages
    return [*_system(game), *messages]


def _system(game: AbstractGame) -> list[ChatMessage]:
    text = check_text(game, "get_system_prompt", game.get_system_prompt())
    return [{"role": "system", "content": text}] if text else []


def _describes_itself(game_class: type[AbstractGame]) -> bool:
    """Whether the class words its first state otherwise than by the text of `reset`."""
    return (
        game_class.get_user_message_with_state is not AbstractGame.get_user_message_with_state
        or game_class.render_state_for_prompt is not AbstractGame.render_state_for_prompt
    )
