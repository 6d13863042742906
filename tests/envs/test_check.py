"""`env check` finds what is wrong with a game, each fault by its own question."""

import pytest
from tinkermq.envs.check import check_game
from tinkermq.schemas.config.job import EnvConfig


def failures(**config):
    results = check_game(EnvConfig(**config))
    return {result.name: result for result in results if not result.ok}


@pytest.mark.parametrize(
    ("game", "question", "detail"),
    [
        ("broken_games:Nowhere", "the game imports", "has no game 'Nowhere'"),
        ("broken_games:RaisesInInit", "the game can be made", "the emulator is not installed"),
        ("broken_games:Abstract", "the game can be made", "abstract method"),
        ("broken_games:RaisesInReset", "types are right", "raised in reset: KeyError"),
        ("broken_games:ReturnsNoText", "types are right", "reset is 7 (int)"),
        ("broken_games:ReturnsTuple", "types are right", "must be a StepResult"),
        ("broken_games:QuitsThePython", "types are right", "raised in step: SystemExit: 3"),
        ("broken_games:UsesGlobalGenerator", "the global generator is not used", "draws from ran"),
        ("broken_games:UsesGlobalGenerator", "a seed reproduces an episode", "seed 0 gave two"),
        ("broken_games:GoldIsWrong", "gold answers score full marks", "score 3, full marks are 1"),
        ("broken_games:GoldFails", "gold answers score full marks", "score 3, full marks are 1"),
    ],
)
def test_a_fault_fails_its_question(game, question, detail):
    result = failures(game=game)[question]
    assert detail in result.detail


def test_the_hints_say_what_to_do():
    found = failures(game="broken_games:UsesGlobalGenerator")
    assert "draw from self.rng" in found["the global generator is not used"].hint


@pytest.mark.parametrize("game", ["CountingGame", "GoldSucceeds"])
def test_a_sound_game_has_no_failures(game):
    assert failures(game=f"broken_games:{game}") == {}


def test_missing_data_is_told_by_its_path(tmp_path):
    path = str(tmp_path / "train.parquet")
    result = failures(game="addition", train_data=[path])["the data can be read"]
    assert result.detail == f"there is no dataset file {path!r}"


def test_a_dataset_game_without_data_is_told_to_set_it():
    result = failures(game="addition")["types are right"]
    assert "ground_truth" in result.detail
    assert "set env.train_data" in result.hint


@pytest.mark.parametrize(
    ("game", "limits", "detail"),
    [
        ("broken_games:HangsInReset", {"reset_timeout_s": 0.3}, "HangsInReset hung in reset for"),
        ("broken_games:HangsInStep", {"step_timeout_s": 0.3}, "HangsInStep hung in step for"),
    ],
)
def test_a_game_that_hangs_does_not_hang_the_check(game, limits, detail):
    assert detail in failures(game=game, **limits)["reset and step are in time"].detail
