"""A package of an extra is imported when it is needed, and named when it is missing."""

import random

import pytest
from tinkermq.envs.registry import extra, import_quietly, list_games
from tinkermq.schemas.wire.errors import GameError


def test_a_package_that_is_missing_says_what_installs_it():
    with pytest.raises(GameError, match="no_such_package is not installed") as caught:
        extra("no_such_package", "some-extra").load()
    assert caught.value.hint == "install it there: pip install 'tinkermq[some-extra]'"


def test_an_import_leaves_the_global_generator_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "careless_package.py").write_text("import random\nrandom.seed(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = random.getstate()
    import_quietly("careless_package")
    assert random.getstate() == before


def test_a_game_whose_package_is_missing_is_listed_with_the_remedy():
    games = {game.name: game for game in list_games()}
    assert games["textarena"].available
    for name in ("alfworld", "android_world", "reasoning_gym", "verifiers"):
        game = games[name]
        assert game.available or "install it there: pip install 'tinkermq[" in game.description
