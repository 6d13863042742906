"""Games are found by name or path, and a wrong one is explained."""

import sys

import pytest
from tinkermq.envs.registry import companion, list_games, load_game
from tinkermq.schemas.wire.errors import GameError


def error_of(game):
    with pytest.raises(GameError) as error:
        load_game(game)
    return error.value


def test_registered_games_are_listed_with_their_first_line():
    games = {game.name: game for game in list_games()}
    assert {"addition", "calculator", "bandit", "guess"} <= set(games)
    assert games["addition"].description == "Add two numbers of one digit."
    assert games["addition"].available


def test_a_game_is_found_by_name_and_by_path():
    by_path = load_game("tinkermq.envs.games.guess:GuessGame")
    assert load_game("guess") is by_path


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_game.py").write_text(
        "from tinkermq.envs.games.guess import GuessGame\nclass Mine(GuessGame): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_game("my_own_game:Mine").__name__ == "Mine"


def test_an_unknown_name_names_the_closest():
    error = error_of("calculater")
    assert error.message == "there is no game 'calculater'"
    assert error.hint.startswith("did you mean calculator? registered are addition, ")


def test_a_module_that_is_not_there_is_named():
    error = error_of("no_such_module:Game")
    assert error.message == (
        "game 'no_such_module:Game' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_module_that_raises_is_explained_by_its_last_line(tmp_path, monkeypatch):
    (tmp_path / "raising_game.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert error_of("raising_game:Game").message.endswith("ZeroDivisionError: division by zero")


def test_a_class_that_is_not_there_names_those_that_are():
    error = error_of("tinkermq.envs.games.guess:Gues")
    assert error.message == "module tinkermq.envs.games.guess has no game 'Gues'"
    assert "GuessGame" in error.hint


def test_a_class_that_is_no_game_says_what_a_game_is():
    error = error_of("collections:OrderedDict")
    assert "does not derive from tinkermq.envs.AbstractGame" in error.message


def test_a_games_data_maker_stands_beside_it():
    assert callable(companion(load_game("addition"), "make_data"))
    with pytest.raises(GameError, match="GuessGame has no make_data"):
        companion(load_game("guess"), "make_data")
