"""ALFWorld on the real packages: small games in its own format, solved with their walkthroughs."""

import json
import random
import subprocess
import sys

import pytest
from household import KINDS, make_household
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.games import alfworld
from tinkermq.envs.games.alfworld import ALFWorldGame, make_data
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def household(tmp_path_factory):
    return make_household(tmp_path_factory.mktemp("alfworld"))


def opened(household, seed=0, record=None, **arguments):
    game = ALFWorldGame(data=str(household), **arguments)
    messages = open_game(game, seed=seed, record=record, kwargs={})
    return game, messages[-1]["content"]


def play_walkthrough(game):
    rewards = []
    while True:
        result = game.step(game.gold_action())
        rewards.append(result.reward)
        if result.done:
            return rewards, result


def record_of(household, tmp_path, name):
    """Return the row of the data that names a game."""
    train, _ = make_data(tmp_path, data=str(household))
    data = Dataset([train])
    records = [data.record(number) for number in range(len(data))]
    return next(record for record in records if record.ground_truth == name)


@pytest.mark.parametrize("task_type", KINDS)
def test_the_walkthrough_solves_each_type_of_task_with_the_rewards_of_opentinker(
    household, task_type
):
    game, _ = opened(household, task_types=[task_type])
    rewards, end = play_walkthrough(game)
    assert rewards[-1] == 10.0
    assert set(rewards[:-1]) == {-0.01}
    assert (end.info["success"], end.info["type"]) == (True, task_type)


def test_every_check_of_the_game_passes(household):
    config = EnvConfig(game="alfworld", kwargs={"data": str(household), "num_games": 2})
    results = check_game(config)
    assert [result for result in results if not result.ok] == []


def test_the_task_of_the_prompt_is_the_task_of_the_game_for_every_game_of_the_list(household):
    """W-1, W-10: host and prompt have one list, so no prompt tells of another game."""
    seen = set()
    for seed in range(12):
        game, prompt = opened(household, seed)
        state = game.get_state()
        file = household / "json_2.1.1" / state["game"] / "game.tw-pddl"
        grammar = json.loads(file.read_text())["grammar"]
        assert f"Your task is to: {state['task']}" in prompt
        assert state["task"] in grammar
        seen.add(state["game"])
    assert len(seen) > 4


def test_seeds_spread_over_the_games_and_leave_the_global_generator_alone(household):
    """W-2: no seed is drawn from a generator that a reset has seeded."""
    before = random.getstate()
    game = ALFWorldGame(data=str(household))
    drawn = set()
    for seed in range(400):
        game.rng = random.Random(seed)
        drawn.add(game.generate_initial_state()["ground_truth"])
    assert len(drawn) == 12
    assert random.getstate() == before


def test_later_observations_restate_the_task_and_list_what_is_possible(household):
    game, prompt = opened(household)
    command = prompt.rpartition("=== Available Actions ===\n- ")[2].splitlines()[0]
    seen = game.step(f"<thinking>first</thinking><action>{command}</action>").observation
    assert seen.startswith(f"Your task is to: {game.get_state()['task']}")
    assert "\n- inventory" in seen


def test_what_does_nothing_costs_more_than_a_step_and_an_action_may_be_the_last_line(household):
    game, _ = opened(household)
    rewards = [game.step(text).reward for text in ("fly", "I will look.\nlook", "<action>go")]
    assert rewards == [-0.1, -0.01, -0.1]


def test_using_up_the_steps_is_a_failure_with_its_reward(household):
    """W-17: the game counts its own steps, and the last of them brings the failure's reward."""
    game, _ = opened(household, max_steps=3)
    results = [game.step("look") for _ in range(3)]
    assert [(result.reward, result.done) for result in results] == [
        (-0.01, False),
        (-0.01, False),
        (-1.0, True),
    ]
    assert results[-1].info["success"] is False


@pytest.mark.parametrize(("split", "folder"), [("seen", "valid_seen"), ("unseen", "valid_unseen")])
def test_a_split_has_its_own_games(household, split, folder):
    assert {opened(household, seed, split=split)[0].get_state()["game"].partition("/")[0]
            for seed in range(2)} == {folder}  # fmt: skip


def test_data_names_every_game_of_a_split_once_in_a_fixed_order(household, tmp_path):
    made = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        make_data(folder, data=str(household))
        made.append([folder / f"{split}.jsonl" for split in ("train", "seen", "unseen")])
    assert [path.read_text() for path in made[0]] == [path.read_text() for path in made[1]]
    data = [Dataset([path]) for path in made[0]]
    assert [len(one) for one in data] == [12, 6, 6]
    assert {data[1].record(number).data_source for number in range(6)} == set(KINDS)


def test_a_row_of_the_data_starts_its_game_and_the_game_words_the_prompt(household, tmp_path):
    name = "train/pick_two_obj_and_place-5/trial_T1"
    game, prompt = opened(household, record=record_of(household, tmp_path, name))
    assert game.get_state()["game"] == name
    assert "You are in the middle of a room." in prompt
    assert play_walkthrough(game)[1].info["success"] is True


def test_a_world_that_was_used_before_plays_like_a_new_one(household):
    prompts = [opened(household, seed)[1] for seed in (1, 2, 1)]
    assert prompts[0] == prompts[2]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_gives_the_same_prompt_in_every_process(household, hash_seed):
    code = (
        "from tinkermq.envs.games.alfworld import ALFWorldGame\n"
        "from tinkermq.envs.prompt import open_game\n"
        f"game = ALFWorldGame(data={str(household)!r})\n"
        "open_game(game, seed=3, record=None, kwargs={})\n"
        "for _ in range(3): text = game.step(game.gold_action()).observation\n"
        "print(text)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    game, _ = opened(household, 3)
    for _ in range(3):
        text = game.step(game.gold_action()).observation
    assert told.stdout == f"{text}\n"


def test_games_that_cannot_be_played_are_not_listed(household, tmp_path):
    import shutil

    root = tmp_path / "copy"
    shutil.copytree(household, root)
    train = root / "json_2.1.1" / "train"
    games = sorted(train.rglob("game.tw-pddl"))
    games[0].write_text(games[0].read_text().replace('"solvable": true', '"solvable": false'))
    (games[1].parent / "traj_data.json").unlink()
    games[2].parent.rename(games[2].parent.with_name("trial_Sliced"))
    listed = alfworld.list_games(alfworld.data_folder(str(root)), "train")
    assert len(listed) == 9
    assert all(game.name not in str(games[:3]) for game in listed)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"household": "/nowhere"}, "no ALFWorld games in /nowhere"),
        ({"split": "dev"}, "ALFWorld has no split 'dev'"),
        ({"task_types": ["pick"]}, "ALFWorld has no task type 'pick'"),
        ({"max_steps": 0}, "max_steps=0 must be at least 1"),
    ],
)
def test_what_is_not_there_is_refused_with_the_remedy(household, arguments, told):
    with pytest.raises(GameError, match=told):
        opened(**{"household": household, **arguments})
