"""Environments of verifiers, with the real package, are games like all others."""

import gc
import itertools
import weakref

import pytest
from tinkermq.envs.adapters.verifiers import VerifiersEpisode, VerifiersGame
from tinkermq.envs.check import check_game
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

pytestmark = pytest.mark.extras

BASIC = "apple bread chair dance eagle flame grape house image juice knife lemon mouse nurse"
TEXTARENA = ["Hangman-v0", "WordSearch-v0"]
"""Games of the taskset that ships with verifiers; its others take a second to reset."""


@pytest.fixture(autouse=True, scope="module")
def word_lists(tmp_path_factory):
    """Make NLTK's corpus `words` in its own format, as small as TextArena's games can play with."""
    nltk = pytest.importorskip("nltk")
    folder = tmp_path_factory.mktemp("nltk")
    words = folder / "corpora" / "words"
    words.mkdir(parents=True)
    ladder = ["".join(letters) for letters in itertools.product("ao", repeat=5)]
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join([*BASIC.split(), *ladder]) + "\n")
    (words / "README").write_text("words\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(folder))
        patch.setattr(nltk.data, "path", [str(folder)])
        yield


def opened(seed=0, **arguments):
    game = VerifiersGame(**arguments)
    return game, open_game(game, seed=seed, record=None, kwargs={})


@pytest.mark.parametrize(
    "arguments",
    [
        *({"taskset": "textarena", "config": {"game": game}, "num_tasks": 4} for game in TEXTARENA),
        {"taskset": "word-tasks"},
        {"taskset": "ladder-tasks", "num_tasks": 8},
    ],
    ids=lambda arguments: str(arguments),
)
def test_every_check_of_an_environment_passes(arguments):
    results = check_game(EnvConfig(game="verifiers", kwargs=arguments))
    assert [result for result in results if not result.ok] == []


def test_the_word_ladder_that_ships_with_verifiers_is_climbed_a_step():
    game, messages = opened(taskset="textarena", config={"game": "WordLadder-v0"}, num_tasks=1)
    start = messages[1]["content"].partition("Start word:  **")[2][:5]
    other = next(start[:i] + c + start[i + 1 :] for i in range(5) for c in "ao" if c != start[i])
    assert other in game.step(f"[{other}]").observation


def test_a_taskset_of_one_turn_is_scored_by_its_own_rewards():
    game, messages = opened(taskset="word-tasks")
    assert messages[0] == {"role": "system", "content": "One word."}
    word = messages[1]["content"].removeprefix("Reverse ")
    right = game.step(word[::-1])
    assert (right.reward, right.done) == (1.0, True)
    assert right.info == {"type": "word-tasks", "right": 1.0, "length": 5.0}
    assert opened(taskset="word-tasks")[0].step(word).reward == 0.0


def climb(game, answer):
    """Play until the end; return the rewards and the last info."""
    result = game.step("yes")
    rewards = [result.reward]
    while True:
        if result.done:
            return rewards, result
        result = game.step(answer(result.observation))
        rewards.append(result.reward)


def test_an_environment_of_its_own_runs_over_several_turns_and_its_rewards_are_weighted():
    game, messages = opened(taskset="ladder-tasks", num_tasks=1)
    assert messages == [{"role": "user", "content": "ready?"}]
    rewards, end = climb(game, lambda told: told.removeprefix("say "))
    assert rewards == [0, 0, 0.5]
    assert end.info == {
        "type": "ladder-tasks", "climbed": 1.0, "quick": 0.0, "turns": 3.0
    }  # fmt: skip


def test_a_limit_of_the_agent_ends_the_episode():
    _, end = climb(opened(taskset="ladder-tasks")[0], lambda _: "never")
    assert (end.reward, end.info["turns"]) == (0.0, 5.0)


def test_a_stop_condition_of_the_task_ends_the_episode():
    _, end = climb(opened(taskset="ladder-tasks")[0], lambda _: "stop")
    assert end.info["turns"] == 2.0


def test_an_episode_that_is_given_up_leaves_nothing_behind():
    game, _ = opened(taskset="ladder-tasks")
    game.close()
    gone = weakref.ref(game)
    del game
    opened(taskset="word-tasks")[0].step("x")
    gc.collect()
    assert gone() is None
    assert not any(isinstance(found, VerifiersEpisode) for found in gc.get_objects())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"taskset": "word-tasks", "env": "user-sim"}, "has the agents assistant, user"),
        ({"taskset": "word-tasks", "env": "best-of-n"}, "more than once"),
        ({"taskset": "boxed-tasks"}, "BoxedTask need a container and a runtime to score in"),
    ],
)
def test_what_is_no_conversation_of_one_agent_is_refused_with_the_reason(arguments, told):
    with pytest.raises(GameError, match=told):
        opened(**arguments)
