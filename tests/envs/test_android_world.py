"""AndroidWorld against a stand-in at the edge to the devices; nothing here ran on an emulator."""

import json
import random

import phone
import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.games.android_world import AndroidWorldGame, parse_answer
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

SAVE = {"devices": "phone:OnePhone", "tasks": ["SaveNote"]}


GAMES: list[AndroidWorldGame] = []


@pytest.fixture(autouse=True)
def torn_down():
    """Every episode of a test gives its device back."""
    phone.SaveNote.log.clear()
    yield
    while GAMES:
        GAMES.pop().close()
    assert phone.SaveNote.log.count("initialize") == phone.SaveNote.log.count("tear down")


def opened(seed=0, **arguments):
    game = AndroidWorldGame(**{**SAVE, **arguments})
    GAMES.append(game)
    return game, open_game(game, seed=seed, record=None, kwargs={})[-1]["content"]


def act(game, **fields):
    return game.step(f"Reason: as told\nAction: {json.dumps(fields)}")


def solve(game):
    word = game.get_state()["goal"].rpartition(" ")[2].rstrip(".")
    act(game, action_type="open_app", app_name="Notes")
    act(game, action_type="input_text", text=word, index=0)
    act(game, action_type="click", index=1)
    return act(game, action_type="status", goal_status="complete")


def test_goal_and_screen_of_the_prompt_are_those_of_the_device():
    game, prompt = opened()
    assert prompt == f"Goal: {game.get_state()['goal']}\n\nScreen:\n0: Button 'Notes'"


def test_a_task_that_is_done_when_the_policy_says_so_pays_ten_and_is_torn_down():
    game, _ = opened()
    end = solve(game)
    game.close()
    assert (end.reward, end.done, end.info["success"]) == (10.0, True, True)
    assert end.info["type"] == "SaveNote"
    assert phone.SaveNote.log == ["initialize", "tear down"]


@pytest.mark.parametrize("status", ["complete", "infeasible"])
def test_a_task_that_is_not_done_costs_one(status):
    game, _ = opened()
    end = act(game, action_type="status", goal_status=status)
    assert (end.reward, end.done, end.info["success"]) == (-1.0, True, False)


def test_later_turns_show_the_goal_and_the_new_screen():
    game, _ = opened()
    seen = act(game, action_type="click", index=0)
    assert seen.reward == -0.01
    assert seen.observation == (
        f"Goal: {game.get_state()['goal']}\n\nScreen:\n0: EditText (editable)\n1: Button 'Save'"
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("I do not know.", "There is no action in your answer."),
        ('Action: {"action_type": "click", "index": 7}', "There is no element 7 to click."),
        ('Action: {"action_type": "click"}', "There is no element None to click."),
        ('Action: {"action_type": "input_text", "index": 0}', "input_text needs text"),
        ('Action: {"action_type": "status", "goal_status": "maybe"}', "goal_status must be"),
        ('Action: {"action_type": "fly"}', "That is not an action: Invalid action type: fly"),
        ('Action: {"action_type": "click", "index": 0, "how": "hard"}', "That is not an action"),
    ],
)
def test_what_is_no_action_is_told_costs_a_tenth_and_touches_nothing(answer, told):
    game, _ = opened()
    result = game.step(answer)
    assert told in result.observation
    assert (result.reward, result.done, result.info["invalid"]) == (-0.1, False, True)
    assert "Screen:\n0: Button 'Notes'" in result.observation


def test_an_answer_reaches_the_task():
    """W-10: what the policy answers is judged."""
    game, prompt = opened(tasks=["CountNotes"])
    assert "How many notes" in prompt
    act(game, action_type="answer", text="0")
    assert act(game, action_type="status", goal_status="complete").reward == 10.0


def test_using_up_the_steps_is_a_failure():
    game, _ = opened(max_steps=2)
    rewards = [act(game, action_type="navigate_home").reward for _ in range(2)]
    assert rewards == [-0.01, -1.0]


def test_a_seed_gives_the_same_goal_and_leaves_the_global_generator_alone():
    before = random.getstate()
    goals = []
    for seed in (1, 2, 3, 4, 1):
        game, _ = opened(seed=seed)
        goals.append(game.get_state()["goal"])
        game.close()
    assert goals[0] == goals[4]
    assert len(set(goals)) > 1
    assert random.getstate() == before


def test_every_task_of_the_registry_is_drawn():
    names = set()
    for seed in range(8):
        game, _ = opened(seed=seed, tasks=None)
        names.add(game.get_state()["task"])
        game.close()
    assert names == {"SaveNote", "CountNotes"}


def test_a_device_plays_one_episode_at_a_time():
    first, _ = opened()
    with pytest.raises(GameError, match="all 1 emulators play an episode each") as caught:
        opened()
    assert "generator.max_episodes" in caught.value.hint
    solve(first)
    first.close()
    opened()


def test_screenshots_are_told_when_asked_for():
    game, _ = opened(screenshots=True)
    assert act(game, action_type="click", index=0).info["screenshot"].shape == (2, 2, 3)


def test_the_checks_of_the_game_pass():
    results = check_game(EnvConfig(game="android_world", kwargs=SAVE))
    assert [result for result in results if not result.ok] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"devices": "phone:NoPhone"}, "the cable is out"),
        ({"devices": "phone:Nothing"}, "'phone:Nothing' is not a class"),
        ({"tasks": ["SaveNotes"]}, "no task 'SaveNotes'"),
        ({"devices": ""}, "android_world is not installed|no adb at|no emulator answers"),
    ],
)
def test_without_a_device_the_game_refuses_with_the_reason(arguments, told):
    with pytest.raises(GameError, match=told):
        AndroidWorldGame(**{**SAVE, **arguments})


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('Reason: {x}\nAction: {"action_type": "wait"}', {"action_type": "wait"}),
        ("Action: {'action_type': 'wait'}", {"action_type": "wait"}),
        ('so {"action_type": "wait"} it is', {"action_type": "wait"}),
        ('Action: {"action_type": "wait"', None),
        ("Action: [1]", None),
    ],
)
def test_an_action_is_read_from_json_a_literal_or_the_last_braces(text, fields):
    assert parse_answer(text) == fields
