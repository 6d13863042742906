"""TextArena's games, from the real package, are games like all others."""

import itertools
import random

import pytest
from opponents import any_free
from tinkermq.envs.adapters.textarena import TextArenaGame
from tinkermq.envs.check import check_game
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError


def opened(seed=0, **arguments):
    game = TextArenaGame(**arguments)
    return game, open_game(game, seed=seed, record=None, kwargs={})[-1]["content"]


@pytest.mark.parametrize("env_id", ["GuessTheNumber-v0", "Mastermind-v0", "FrozenLake-v0-random"])
def test_every_check_of_a_game_passes(env_id):
    results = check_game(EnvConfig(game="textarena", kwargs={"env_id": env_id}))
    assert [result for result in results if not result.ok] == []


def test_halving_the_range_guesses_the_number():
    game, prompt = opened(env_id="GuessTheNumber-v0")
    assert prompt.startswith("You are Player 0. You are playing Guess The Number.")
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        result = game.step(f"Let me try [{guess}].")
        if result.done:
            break
        assert result.reward == 0
        low, high = (guess + 1, high) if "higher" in result.observation else (low, guess - 1)
    assert result.reward == 1
    assert result.info["success"] is True
    assert result.info["type"] == "GuessTheNumber-v0"


def test_an_observation_holds_what_is_new_and_nothing_twice():
    game, _ = opened(env_id="TowerOfHanoi-v0")
    first = game.step("[A C]").observation
    assert first.startswith("You moved disk 1 from A to C.")
    assert "[A C]" not in first
    assert "disk 1" not in game.step("[A B]").observation


def test_a_move_of_bad_form_is_told_and_a_second_one_ends_the_game():
    game, _ = opened(env_id="TowerOfHanoi-v0")
    told = game.step("[X Y]")
    ended = game.step("[X Y]")
    assert (told.done, "invalid move" in told.observation) == (False, True)
    assert (ended.done, ended.info["invalid"], ended.info["success"]) == (True, True, False)


@pytest.mark.parametrize("env_id", ["Countdown-v0", "ThreeCardMonte-v0"])
def test_refused_moves_that_a_game_notes_in_a_form_of_its_own_end_it_without_a_reward(env_id):
    game, _ = opened(env_id=env_id)
    assert not game.step("nothing").done
    ended = game.step("nothing")
    assert (ended.done, ended.reward, ended.info["invalid"]) == (True, 0.0, True)


def test_an_episode_draws_its_game_among_several():
    ids = ["GuessTheNumber-v0", "TowerOfHanoi-v0", "Mastermind-v0"]
    games = [opened(seed=seed, env_id=ids)[0].get_state()["env_id"] for seed in range(12)]
    assert set(games) == set(ids)


def test_a_game_of_two_is_played_against_the_opponent_from_either_seat():
    ends = []
    for seed in range(12):
        game, seen = opened(seed=seed, env_id="TicTacToe-v0", opponent="opponents:any_free")
        rng = random.Random(seed)
        for _ in itertools.count():
            result = game.step(any_free(seen, rng))
            if result.done:
                break
            seen = result.observation
        ends.append((game.get_state()["seat"], result.reward))
        assert result.info["success"] is (result.reward == 1)
    assert {seat for seat, _ in ends} == {0, 1}
    assert {reward for _, reward in ends} >= {-1.0, 1.0}


def test_a_game_of_two_without_an_opponent_is_refused_with_the_remedy():
    with pytest.raises(GameError, match="TicTacToe-v0 cannot be played by 1") as caught:
        opened(env_id="TicTacToe-v0")
    assert "give opponent=package.module:function" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"env_id": "GuesTheNumber-v0"}, "TextArena has no game 'GuesTheNumber-v0'"),
        ({"env_id": "TicTacToe-v0", "opponent": "nowhere:f"}, "'nowhere:f' cannot be imported"),
        ({"env_id": "TicTacToe-v0", "opponent": "random:nothing"}, "is not a function"),
    ],
)
def test_what_is_not_there_is_refused(arguments, told):
    with pytest.raises(GameError, match=told):
        TextArenaGame(**arguments)
