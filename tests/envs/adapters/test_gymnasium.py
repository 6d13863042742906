"""Gymnasium's environments, from the real package, are games like all others."""

import pytest
from text_environments import SPACES
from tinkermq.envs.adapters.gymnasium import GymnasiumGame, name_colours
from tinkermq.envs.check import check_game
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

LAKE = {
    "env_id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["down", "down", "right", "right", "down", "right"]


def opened(seed=0, **arguments):
    game = GymnasiumGame(**arguments)
    return game, open_game(game, seed=seed, record=None, kwargs={})[-1]["content"]


@pytest.mark.parametrize(
    "arguments",
    [LAKE, {"env_id": "Taxi-v4"}, {"env_id": "CliffWalking-v1"}, {"env_id": "Blackjack-v1"}],
    ids=lambda arguments: arguments["env_id"],
)
def test_every_check_of_an_environment_passes(arguments):
    results = check_game(EnvConfig(game="gymnasium", kwargs=arguments))
    assert [result for result in results if not result.ok] == []


def test_the_policy_sees_the_lake_and_walks_to_its_goal():
    game, prompt = opened(**LAKE)
    assert prompt.endswith("Actions: left, down, right, up.\n\n<red>S</red>FFF\nFHFH\nFFFH\nHFFG")
    results = [game.step(f"I go <action>{action}</action>") for action in WAY]
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[-1].info == {"type": "FrozenLake-v1", "success": True, "invalid": False}


def test_what_is_no_action_is_told_and_not_played():
    game, _ = opened(**LAKE, invalid_reward=-0.5)
    refused = game.step("jump")
    assert (refused.observation, refused.reward, refused.done, refused.info["invalid"]) == (
        "That is not an action. Actions: left, down, right, up.",
        -0.5,
        False,
        True,
    )
    assert [game.step(action).reward for action in WAY][-1] == 1


def test_falling_into_a_hole_is_no_success():
    game, _ = opened(**LAKE)
    game.step("right")
    result = game.step("down")
    assert (result.done, result.info["success"]) == (True, False)


def test_another_seed_is_another_state():
    prompts = {opened(seed=seed, env_id="Taxi-v4")[1] for seed in range(8)}
    assert len(prompts) > 4


@pytest.mark.parametrize(("action", "valid"), [("1", True), ("2", False), ("one", False)])
def test_a_discrete_space_takes_its_numbers(action, valid):
    game, prompt = opened(env_id="Blackjack-v1")
    assert "Actions: the numbers 0 to 1." in prompt
    assert game.step(action).info["invalid"] is not valid


def test_spaces_of_text_and_of_arrays_are_written_as_text_and_as_json():
    game, prompt = opened(env_id="text_environments:Echo-v0")
    assert prompt.endswith("say something")
    assert game.step("hello").observation == "hello"
    assert game.step("HÉ").info["invalid"] is True
    game, prompt = opened(env_id="text_environments:Sum-v0")
    assert "Actions are JSON in MultiDiscrete" in prompt
    assert game.step("[1, 2]").reward == 3.0
    assert game.step("[9, 9]").info["invalid"] is True


@pytest.mark.parametrize(
    ("space", "action"),
    [
        ("map", '{"key": 1, "arrow": [0.5, 0]}'),
        ("pair", '[1, {"arrow": [0.5, 0]}]'),
        ("numbers", "[2, 1]"),
        ("bits", "[1, 0]"),
        ("bytes", "[255, 0]"),
        ("arrow", "[0.25, 1]"),
    ],
)
def test_an_action_of_any_space_is_written_as_json(space, action):
    game, _ = opened(env_id="text_environments:Take-v0", kwargs={"space": space})
    assert game.step(action).info["invalid"] is False


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    "action",
    [
        *("99999999999999999999", "[99999999999999999999, 1]", "[1e400, 1]", "[300, -300]", "null"),
        *('"x"', "1.5", "[1.5, 1]", "[[]]", "{}", '{"key": 1}', '{"key": 0.5, "arrow": [0, 0]}'),
        *('{"key": 1, "arrow": [0, 0], "more": 1}', '[1, {"arrow": null}]', "[1, {}, 1]"),
    ],
)
def test_what_is_no_action_of_a_space_is_told_whatever_it_is(space, action):
    game, _ = opened(env_id="text_environments:Take-v0", kwargs={"space": space})
    assert game.step(action).info["invalid"] is True


def test_an_unknown_environment_is_refused_with_the_closest_known_one():
    with pytest.raises(GameError, match="FrozenLake-v9"):
        GymnasiumGame("FrozenLake-v9")


def test_colours_of_a_terminal_become_tags():
    assert name_colours("a\x1b[41mS\x1b[0mb \x1b[34;1mR\x1b[0m\x1b[0m") == (
        "a<red>S</red>b <blue>R</blue>"
    )
