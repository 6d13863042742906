"""reasoning-gym's tasks, from the real package, are games like all others."""

import pytest
from tinkermq.envs.adapters.reasoning_gym import ReasoningGymGame
from tinkermq.envs.check import check_game
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

pytestmark = pytest.mark.extras

TASKS = ["basic_arithmetic", "leg_counting", "countdown", "list_functions", "pool_matrix"]
"""The last two draw from the process-wide generators."""


def opened(datasets, seed=0, **kwargs):
    game = ReasoningGymGame(datasets, **kwargs)
    open_game(game, seed=seed, record=None, kwargs={})
    return game


@pytest.mark.parametrize("name", TASKS)
def test_every_check_of_a_task_passes(name):
    results = check_game(EnvConfig(game="reasoning_gym", kwargs={"datasets": name}))
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


def test_the_tasks_own_scorer_judges_what_stands_in_the_tags():
    gold = opened("leg_counting").gold_action()
    ends = [opened("leg_counting").step(f"{text}") for text in (gold, f"I think {gold}", "12")]
    assert [(end.reward, end.info["success"]) for end in ends] == [
        (1.0, True),
        (1.0, True),
        (0.0, False),
    ]
    assert all(end.done and end.info["type"] == "leg_counting" for end in ends)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("{}", 1.0),
        ("It is a sum.\n\n{}\n", 1.0),
        ("<answer>{}</answer>\n0", 1.0),
        ("{}\nThat is all.", 0.0),
        (" \n", 0.0),
    ],
)
def test_the_last_line_is_the_answer_where_no_tags_are_needed(reply, reward):
    game = opened("chain_sum", needs_tags=False)
    assert "<answer>" not in game.get_system_prompt()
    end = game.step(reply.format(game.get_state()["answer"]))
    assert (end.reward, end.info["success"]) == (reward, reward == 1.0)


def test_a_part_of_the_score_is_no_success():
    game = opened("leg_counting")
    answer = game.get_state()["answer"]
    end = game.step(f"<answer>it is {answer}</answer>")
    assert 0 < end.reward < 1
    assert end.info["success"] is False


def test_an_answer_that_the_scorer_cannot_read_is_worth_nothing():
    end = opened("prime_factorization").step("<answer>hello</answer>")
    assert (end.reward, end.done, end.info["readable"]) == (0.0, True, False)


def test_an_episode_draws_its_task_among_several_with_their_configurations():
    games = [opened({"basic_arithmetic": {"max_digits": 1}, "gcd": {}}, seed) for seed in range(12)]
    assert {game.get_state()["dataset"] for game in games} == {"basic_arithmetic", "gcd"}


def test_an_unknown_task_is_refused_with_the_closest_ones():
    with pytest.raises(GameError, match="no task 'leg_count'") as caught:
        ReasoningGymGame("leg_count")
    assert "leg_counting" in caught.value.hint
