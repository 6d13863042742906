"""`env check` finds what is wrong with a game, each fault by its own question."""

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.write_data import write_rows
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


def rows_of(folder, *rows):
    good = {"prompt": "1+1=", "answer": "2"}
    return [str(write_rows(folder / "train.jsonl", [good] * 20 + list(rows)))]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+2=", "answer": None}, "has no gold answer"),
        ({"prompt": "1+2=", "answer": "3", "extra_info": "hard"}, "column extra_info of row 20"),
        ({"prompt": "1+2=", "answer": "3", "images": ["cat.png"]}, "image 0 in column images"),
        ({"prompt": 7, "answer": "3"}, "the prompt of row 20"),
        ({"answer": "3"}, "row 20"),
        ({"prompt": "<image>", "answer": "3", "images": [b"a", b"b"]}, "row 20"),
    ],
)
def test_every_row_is_read_and_the_one_that_cannot_be_is_named(tmp_path, row, words):
    if "images" in row and isinstance(row["images"][0], bytes):
        row["images"] = ["data:image/png;base64,AAAA"] * 2
    found = failures(game="addition", train_data=rows_of(tmp_path, row))["each row can be read"]
    assert words in found.detail
    assert "row 20 of" in found.detail
    assert "train.jsonl" in found.detail


def test_validation_rows_are_read_too(tmp_path):
    val = str(write_rows(tmp_path / "val.jsonl", [{"prompt": "1+2=", "answer": ""}]))
    found = failures(game="addition", train_data=rows_of(tmp_path), val_data=[val])
    assert "row 0 of" in found["each row can be read"].detail


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "raised"),
        ("says_nothing", "no finite reward"),
        ("says_text", "no finite reward"),
        ("says_nan", "no finite reward"),
        ("hangs", "no reward came within 0.3 s"),
        ("not_there", "cannot be imported"),
    ],
)
def test_a_reward_function_that_would_fail_each_episode_is_told(function, words):
    reward = {"source": "function", "function": f"reward_functions:{function}", "timeout_s": 0.3}
    found = failures(game="broken_games:CountingGame", reward=reward)
    assert words in found["the reward function answers"].detail


@pytest.mark.parametrize("per", ["episode", "turn"])
def test_a_sound_reward_function_is_called_as_by_a_host(tmp_path, per):
    reward = {"source": "function", "function": "reward_functions:verl_style", "per": per}
    config = EnvConfig.model_validate(
        {"game": "addition", "train_data": rows_of(tmp_path), "reward": reward}
    )
    (found,) = [one for one in check_game(config) if one.name == "the reward function answers"]
    assert found.ok
    assert found.detail.startswith("8 episodes earn ")


def test_a_judge_that_is_not_told_how_to_answer_is_found():
    reward = {"source": "judge", "judge": "x", "judge_prompt": "Grade $answer."}
    found = failures(game="broken_games:CountingGame", reward=reward)
    assert "$form" in found["the judge's prompt demands a score"].hint
