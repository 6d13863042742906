"""What OpenTinker's scripts give to `run_inference` means the same here."""

import inspect

import pytest
from tinkermq.clients import run_inference, run_inference_async
from tinkermq.clients.inference.play import PlayOptions
from tinkermq.clients.opentinker import NeedlessWarning, translate_inference
from tinkermq.schemas.wire.errors import ConfigError

OURS = ("temperature", "max_turns", "seed", "game_kwargs")


class Board:
    def __init__(self, board_size: int = 9, seed: int = 0, **others: int) -> None: ...


def test_the_smaller_limit_of_turns_that_is_one_counts() -> None:
    turns = {"max_user_turns": 0, "max_assistant_turns": 7}
    assert translate_inference(turns, None, OURS) == {"max_turns": 7}
    turns["max_user_turns"] = 3
    assert translate_inference(turns, None, OURS) == {"max_turns": 3}
    assert translate_inference({"max_user_turns": 0}, None, OURS) == {}
    with pytest.raises(ConfigError, match="max_turns=2 and max_user_turns"):
        translate_inference({"max_turns": 2, "max_user_turns": 3}, None, OURS)


def test_what_the_games_constructor_names_goes_to_it_unless_we_name_it() -> None:
    given = {"board_size": 5, "seed": 3, "temperature": 1.0, "game_kwargs": {"more": 1}}
    assert translate_inference(given, Board, OURS) == {
        "seed": 3,
        "temperature": 1.0,
        "game_kwargs": {"more": 1, "board_size": 5},
    }
    assert translate_inference({"bord_size": 5}, Board, OURS) == {"bord_size": 5}  # refused later


def test_what_needs_no_saying_is_left_out_with_one_warning() -> None:
    given = {"env_endpoint": "http://localhost:8088", "tokenizer_path": "x", "temperature": 0.0}
    with pytest.warns(NeedlessWarning, match="env_endpoint") as caught:
        assert translate_inference(given, None, OURS) == {"temperature": 0.0}
    assert len(caught) == 1
    assert translate_inference({"tensor_parallel_size": None}, None, OURS) == {}


def test_the_function_has_every_option_of_the_episodes_with_its_default() -> None:
    options = inspect.signature(PlayOptions).parameters
    for function in (run_inference, run_inference_async):
        told = inspect.signature(function).parameters
        assert {name: told[name].default for name in options} == {
            name: one.default for name, one in options.items()
        }
    assert list(inspect.signature(run_inference).parameters) == list(told)
