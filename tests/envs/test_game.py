"""The game class and the checks of what a game returns."""

from typing import Any

import numpy as np
import pytest
from broken_games import CountingGame
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.game import check_result, game_failure
from tinkermq.schemas.wire.errors import GameError


def told(*fields: Any) -> StepResult:
    """Return a result as a game without types may make it."""
    return StepResult(*fields)


def test_the_interaction_name_is_the_class_name_without_game():
    assert CountingGame().get_interaction_name() == "counting"


def test_a_game_that_never_calls_our_init_has_a_generator_of_its_own():
    assert CountingGame().rng is not CountingGame().rng


def test_the_default_first_message_is_initial_message_and_state():
    assert CountingGame().get_user_message_with_state(start=3) == "Go.\n\nfrom 3"


def test_numpy_numbers_become_plain_ones():
    result = check_result(CountingGame(), told("x", np.float32(0.5), np.bool_(True)))
    assert (type(result.reward), result.reward, result.done) == (float, 0.5, True)


def test_what_info_holds_arrives_as_the_codec_brings_it():
    result = check_result(CountingGame(), StepResult("x", 1, True, {"pair": (1, 2)}))
    assert result.info == {"pair": [1, 2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("x", 1.0, True, {}), "CountingGame.step is ('x', 1.0, True, {}) (tuple), it must be a"),
        (None, "CountingGame.step is None (NoneType)"),
        (told(None, 1.0, True), "CountingGame.step's observation is None (NoneType)"),
        (told("", "1", True), "CountingGame.step's reward is '1' (str), it must be a number"),
        (StepResult("", float("inf"), True), "step's reward is inf (float), it must be a finite"),
        (told("", 1.0, "yes"), "CountingGame.step's done is 'yes' (str), it must be a bool"),
        (told("", 1.0, True, [1]), "CountingGame.step's info is [1] (list), it must be a"),
        (told("", 1.0, True, {1: 2}), "CountingGame.step's info cannot travel"),
        (StepResult("", 1.0, True, {"s": {1}}), "CountingGame.step's info cannot travel"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(value, message):
    with pytest.raises(GameError) as error:
        check_result(CountingGame(), value)
    assert message in error.value.message


def test_a_failure_carries_the_last_frames_of_the_game():
    try:
        CountingGame().step("raise")
    except ValueError as raised:
        failure = game_failure("CountingGame", "step", raised)
    assert failure.message.startswith("CountingGame raised in step: ValueError: boom at 42\n")
    assert 'raise ValueError("boom at 42")' in failure.message


def test_an_abstract_game_cannot_be_made():
    class Half(AbstractGame):
        pass

    with pytest.raises(TypeError, match="get_system_prompt"):
        Half()  # pyright: ignore[reportAbstractUsage]
