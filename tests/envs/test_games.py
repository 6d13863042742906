"""The four small games: rules, data, demonstrations, gold play."""

import random

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.games import addition, bandit, calculator, guess, sums
from tinkermq.schemas.config.job import EnvConfig

MODULES = {"addition": addition, "calculator": calculator, "bandit": bandit, "guess": guess}


def config_of(name, folder):
    module = {**MODULES, "sums": sums}[name]
    if not hasattr(module, "make_data"):
        return EnvConfig(game=name)
    train, val = module.make_data(folder, 32, 8, seed=3)
    return EnvConfig(game=name, train_data=[str(train)], val_data=[str(val)])


@pytest.mark.parametrize("name", [*MODULES, "sums"])
def test_every_check_of_the_game_passes(name, tmp_path):
    results = check_game(config_of(name, tmp_path))
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize("name", MODULES)
def test_demonstrations_are_short_conversations_that_end_with_the_policy(name):
    rng = random.Random(0)
    for _ in range(50):
        messages = MODULES[name].demonstrations(rng)
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert sum(len(message["content"]) for message in messages) <= 40


@pytest.mark.parametrize("module", [addition, calculator])
def test_the_data_of_a_seed_is_always_the_same(module, tmp_path):
    def prompts(folder, seed):
        train, _ = module.make_data(tmp_path / folder, 20, 5, seed=seed)
        data = Dataset([train])
        return [data.record(n).prompt for n in range(len(data))]

    assert prompts("a", 1) == prompts("b", 1) != prompts("c", 2)


def test_addition_gives_1_for_the_sum_alone():
    def reward(action):
        game = addition.AdditionGame()
        game.reset(ground_truth="12")
        return game.step(action).reward

    assert [reward(action) for action in ("12", " 12 ", "?", "1 12", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("85", 1), ("47 + 38 = 85.", 1), ("85 is 47 + 38", 0), ("eighty-five", 0), ("", 0)],
)
def test_the_last_number_of_an_answer_to_a_sum_counts(answer, reward):
    game = sums.SumsGame()
    game.reset(ground_truth="85")
    assert game.step(answer).reward == reward


def test_most_demonstrations_of_addition_give_up():
    rng = random.Random(0)
    answers = [addition.demonstrations(rng)[-1]["content"] for _ in range(1000)]
    assert answers.count("?") == pytest.approx(600, abs=60)


def test_the_calculator_answers_a_formula_and_judges_the_second_turn():
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408", extra_info={"question": "12*34"})
    tool = game.step("=12*34")
    answer = game.step("408")
    assert (tool.observation, tool.reward, tool.done) == ("408", 0.0, False)
    assert (answer.reward, answer.done) == (1.0, True)


@pytest.mark.parametrize("action", ["407", "=12*", "=1;2", "", "=99*99*99"])
def test_whatever_is_no_formula_is_an_answer_and_ends_the_episode(action):
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408")
    result = game.step(action)
    assert (result.reward, result.done) == (0.0, True)


def test_a_formula_at_the_last_turn_is_no_answer():
    game = calculator.CalculatorGame()
    game.reset(ground_truth="408")
    game.step("=12*34")
    assert (game.step("=12*34").reward, game.step("=12*34").done) == (0.0, True)


def test_two_thirds_of_the_calculator_demonstrations_guess():
    rng = random.Random(0)
    lengths = [len(calculator.demonstrations(rng)) for _ in range(1000)]
    assert lengths.count(2) == pytest.approx(650, abs=60)
    assert lengths.count(4) == 1000 - lengths.count(2)


def test_each_room_of_the_bandit_has_its_own_best_arm():
    game = bandit.BanditGame(num_rooms=4)
    game.rng = random.Random(0)
    best = []
    for room in range(4):
        game.reset(room=room)
        best.append(game.best_arm())
        assert game.step(str(game.best_arm())).reward == 1.0
    assert len(set(best)) == 4


@pytest.mark.parametrize("action", ["7", "-1", "", "arm", "00", "²"])
def test_no_arm_pays_nothing(action):
    game = bandit.BanditGame(luck=0.0)
    game.reset(room=0)
    assert game.step(action).reward == 0.0


def test_a_bandit_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="num_arms=1 must be from 2"):
        bandit.BanditGame(num_arms=1)


def test_the_guess_is_told_higher_or_lower_until_it_is_right():
    game = guess.GuessGame()
    game.reset(number=4)
    seen = [game.step(action) for action in ("2", "5", "4")]
    assert [(r.observation, r.reward, r.done) for r in seen] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("", 1.0, True),
    ]


def test_the_third_wrong_guess_is_the_last():
    game = guess.GuessGame()
    game.reset(number=4)
    assert [game.step(action).done for action in ("0", "x", "6")] == [False, False, True]


@pytest.mark.parametrize("number", range(7))
def test_halving_the_range_always_finds_the_number(number):
    game = guess.GuessGame()
    game.reset(number=number)
    while not (result := game.step(game.gold_action())).done:
        pass
    assert result.reward == 1.0
