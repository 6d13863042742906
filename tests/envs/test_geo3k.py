"""The two geometry3k games: what answers and tries are worth, and the data with its drawings."""

import io

import pytest
from PIL import Image
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Dataset, Record
from tinkermq.envs.games import geo3k
from tinkermq.envs.games.geo3k import Geo3KGame, Geo3KToolGame
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import DataError
from tinkermq.schemas.wire.images import images_of, plain_text

RIGHT, WRONG = r"So \boxed{3}", r"So \boxed{4}"


@pytest.mark.parametrize("name", ["geo3k", "geo3k_tool"])
def test_every_check_of_the_game_passes(name, tmp_path):
    train, val = geo3k.make_data(tmp_path, 4, 2, seed=3)
    results = check_game(EnvConfig(game=name, train_data=[str(train)], val_data=[str(val)]))
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (r"<think>three sides</think>\boxed{3}", 1.0),
        (RIGHT, 0.9),
        (r"<think>three sides</think>\boxed{4}", 0.1),
        (WRONG, 0.0),
        ("It is 3.", 0.0),  # the right answer within a text earns nothing
    ],
)
def test_one_turn_earns_accuracy_and_format(action, reward):
    game = Geo3KGame()
    game.reset(ground_truth="3")
    result = game.step(action)
    assert result.done
    assert result.reward == pytest.approx(reward)
    assert result.info["success"] == (reward >= 0.9)


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([RIGHT], [1.0]),
        ([WRONG, RIGHT], [-0.05, 1.0]),
        ([WRONG, "no", RIGHT], [-0.05, -0.05, 1.0]),
        ([WRONG, WRONG, WRONG], [-0.05, -0.05, 0.0]),
    ],
)
def test_each_try_that_is_no_better_costs_something(actions, rewards):
    game = Geo3KToolGame()
    game.reset(ground_truth="3")
    results = [game.step(action) for action in actions]
    assert [result.reward for result in results] == pytest.approx(rewards)
    assert [result.done for result in results] == [False] * (len(actions) - 1) + [True]
    assert results[-1].info["tries"] == len(actions)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (WRONG, "4"),
        (r"\boxed{\frac{1}{2}} or \boxed{2\sqrt{3}}", r"2\sqrt{3}"),
        ("4", "(no boxed answer)"),
    ],
)
def test_the_policy_is_told_what_was_read_of_its_answer(action, answer):
    game = Geo3KToolGame()
    game.reset(ground_truth="3")
    assert game.step(action).observation == f"Current parsed answer={answer} reward=0.0"


def test_the_drawing_of_a_row_stands_in_the_first_prompt(tmp_path):
    train, _ = geo3k.make_data(tmp_path, 3, 1)
    record = Dataset([train]).record(0)
    messages = open_game(Geo3KGame(), seed=0, record=record, kwargs={})
    assert plain_text(messages[0]["content"]) == "[image]Corners?"
    (encoded,) = images_of(messages)
    assert Image.open(io.BytesIO(encoded)).size == (geo3k.SIDE, geo3k.SIDE)


def test_an_image_that_no_tag_names_is_refused():
    record = Record([{"role": "user", "content": "<image>What?"}], "4", images=[b"a", b"b"])
    with pytest.raises(DataError, match="has 2 images, its prompt names 1"):
        record.messages()
