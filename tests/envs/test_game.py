"""The game class, its registry, prompts, checks, and packages of extras."""

import asyncio
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import pytest
from broken_games import CountingGame, ReturnsNoText
from hosting import ISOLATIONS, error_of, hosting
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Record
from tinkermq.envs.game import check_result, game_failure
from tinkermq.envs.games.guess import GuessGame
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.prompt import open_game
from tinkermq.envs.registry import (
    check_registered,
    companion,
    extra,
    find_game,
    import_quietly,
    list_games,
    load_game,
)
from tinkermq.envs.rewards import load_function
from tinkermq.envs.running.runners import MAX_GIVEN_UP
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import DataError, GameError

from tests.envs.hosting import runner_of


def told(*fields: Any) -> StepResult:
    """Return a result as a game without types may make it."""
    return StepResult(*fields)


def test_the_interaction_name_is_the_class_name_without_game():
    assert CountingGame().get_interaction_name() == "counting"


def test_a_game_that_never_calls_our_init_has_a_generator_of_its_own():
    assert CountingGame().rng is not CountingGame().rng


def test_the_default_first_message_is_initial_message_and_state():
    assert CountingGame().get_user_message_with_state(start=3) == "Go.\n\nfrom 3"


def test_numpy_numbers_become_plain_ones():
    result = check_result(CountingGame(), told("x", np.float32(0.5), np.bool_(True)))
    assert (type(result.reward), result.reward, result.done) == (float, 0.5, True)


def test_what_info_holds_arrives_as_the_codec_brings_it():
    result = check_result(CountingGame(), StepResult("x", 1, True, {"pair": (1, 2)}))
    assert result.info == {"pair": [1, 2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("x", 1.0, True, {}), "CountingGame.step is ('x', 1.0, True, {}) (tuple), it must be a"),
        (None, "CountingGame.step is None (NoneType)"),
        (told(None, 1.0, True), "CountingGame.step's observation is None (NoneType)"),
        (told("", "1", True), "CountingGame.step's reward is '1' (str), it must be a number"),
        (StepResult("", float("inf"), True), "step's reward is inf (float), it must be a finite"),
        (told("", 1.0, "yes"), "CountingGame.step's done is 'yes' (str), it must be a bool"),
        (told("", 1.0, True, [1]), "CountingGame.step's info is [1] (list), it must be a"),
        (told("", 1.0, True, {1: 2}), "CountingGame.step's info cannot travel"),
        (StepResult("", 1.0, True, {"s": {1}}), "CountingGame.step's info cannot travel"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(value, message):
    with pytest.raises(GameError) as error:
        check_result(CountingGame(), value)
    assert message in error.value.message


def test_a_failure_carries_the_last_frames_of_the_game():
    try:
        CountingGame().step("raise")
    except ValueError as raised:
        failure = game_failure("CountingGame", "step", raised)
    assert failure.message.startswith("CountingGame raised in step: ValueError: boom at 42\n")
    assert 'raise ValueError("boom at 42")' in failure.message


def test_an_abstract_game_cannot_be_made():
    class Half(AbstractGame):
        pass

    with pytest.raises(TypeError, match="reset"):
        Half()  # pyright: ignore[reportAbstractUsage]


# -- Games are found by name or path, and a wrong one is explained ---------------------------------


def error_of_loading(game):
    with pytest.raises(GameError) as error:
        load_game(game)
    return error.value


def test_registered_games_are_listed_with_their_first_line():
    games = {game.name: game for game in list_games()}
    assert {"addition", "calculator", "bandit", "guess"} <= set(games)
    assert games["addition"].description == "Add two numbers of one digit."
    assert games["addition"].available


def test_a_name_that_two_packages_register_means_neither(tmp_path, monkeypatch):
    for package, target in (("one", "one.game:Guess"), ("two", "two.game:Guess")):
        for copy in ("a", "b"):  # on the path twice, which is no conflict
            folder = tmp_path / copy / f"{package}-1.0.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {package}\nVersion: 1.0\n")
            entries = f"[tinkermq.envs]\nmine = {target}\n{package} = {target}\n"
            (folder / "entry_points.txt").write_text(entries)
    for copy in ("a", "b"):
        monkeypatch.syspath_prepend(tmp_path / copy)
    listed = [(game.name, game.target) for game in list_games() if "game:Guess" in game.target]
    assert sorted(listed) == [
        *(("mine", "one.game:Guess"), ("mine", "two.game:Guess")),
        *(("one", "one.game:Guess"), ("two", "two.game:Guess")),
    ]
    for ask in (load_game, check_registered, find_game):
        with pytest.raises(GameError, match=r"one\.game:Guess and two\.game:Guess"):
            ask("mine")
    check_registered("one")


def test_a_game_is_found_by_name_and_by_path():
    by_path = load_game("tinkermq.envs.games.guess:GuessGame")
    assert load_game("guess") is by_path


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_game.py").write_text(
        "from tinkermq.envs.games.guess import GuessGame\nclass Mine(GuessGame): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_game("my_own_game:Mine").__name__ == "Mine"


def test_a_game_is_found_where_the_working_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert load_game("guess").__name__ == "GuessGame"
    assert load_function("math:floor")(1.5) == 1


def test_an_unknown_name_names_the_closest():
    error = error_of_loading("calculater")
    assert error.message == "there is no game 'calculater'"
    assert error.hint.startswith("did you mean calculator? registered are addition, ")


def test_a_module_that_is_not_there_is_named():
    error = error_of_loading("no_such_module:Game")
    assert error.message == (
        "game 'no_such_module:Game' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_module_that_raises_is_explained_by_its_last_line(tmp_path, monkeypatch):
    (tmp_path / "raising_game.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert error_of_loading("raising_game:Game").message.endswith(
        "ZeroDivisionError: division by zero"
    )


def test_a_class_that_is_not_there_names_those_that_are():
    error = error_of_loading("tinkermq.envs.games.guess:Gues")
    assert error.message == "module tinkermq.envs.games.guess has no game 'Gues'"
    assert "GuessGame" in error.hint


def test_a_class_that_is_no_game_says_what_a_game_is():
    error = error_of_loading("collections:OrderedDict")
    assert "does not derive from tinkermq.envs.AbstractGame" in error.message


def test_a_games_data_maker_stands_beside_it():
    assert callable(companion(load_game("addition"), "make_data"))
    with pytest.raises(GameError, match="GuessGame has no make_data"):
        companion(load_game("guess"), "make_data")


# -- A package of an extra is imported when it is needed, and named when it is missing -------------


def test_a_package_that_is_missing_says_what_installs_it():
    with pytest.raises(GameError, match="no_such_package is not installed") as caught:
        extra("no_such_package", "some-extra").load()
    assert caught.value.hint == "install it there: pip install 'tinkermq[some-extra]'"


def test_an_import_leaves_the_global_generator_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "careless_package.py").write_text("import random\nrandom.seed(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = random.getstate()
    import_quietly("careless_package")
    assert random.getstate() == before


def test_a_game_whose_package_is_missing_is_listed_with_the_remedy():
    games = {game.name: game for game in list_games()}
    assert games["textarena"].available
    for name in ("alfworld", "reasoning_gym", "verifiers"):
        game = games[name]
        assert game.available or "install it there: pip install 'tinkermq[" in game.description
    phone = games["android_world"]
    assert phone.available or "install it there: pip install git+https" in phone.description


# -- How first prompts are made: prompt and game agree ---------------------------------------------


class OpenTinkerStyle(AbstractGame):
    """Draws within reset, and describes itself by resetting again."""

    def reset(self, size: int = 0, **_: Any) -> str:
        self.board = [self.rng.randrange(10) for _ in range(size)]
        return f"board {self.board}"

    def generate_initial_state(self) -> dict[str, Any]:
        return {"size": self.rng.randrange(3, 6)}

    def get_user_message_with_state(self, **state: Any) -> str:
        return f"Play on this: {self.render_state_for_prompt(**state)}"

    def step(self, action: str) -> StepResult:
        return StepResult("", 0.0, True)

    def get_system_prompt(self) -> str:
        return "You play."

    def get_initial_user_message(self) -> str:
        return "unused"


class Silent(CountingGame):
    def get_initial_user_message(self) -> str:
        return ""

    def get_system_prompt(self) -> str:
        return ""

    def reset(self, **_: Any) -> str:
        return ""


def test_a_generated_game_opens_with_system_prompt_message_and_state():
    messages = open_game(CountingGame(), seed=1, record=None, kwargs={"start": 9})
    assert messages == [
        {"role": "system", "content": "count"},
        {"role": "user", "content": "Go.\n\nfrom 9"},
    ]


def test_a_game_that_resets_while_describing_itself_is_in_the_state_described():
    for seed in range(20):
        game = OpenTinkerStyle()
        messages = open_game(game, seed=seed, record=None, kwargs={})
        assert messages[1]["content"] == f"Play on this: board {game.board}"


def test_a_seed_reproduces_the_prompt_and_the_global_generator_is_left_alone():
    before = random.getstate()
    first, second, other = (
        open_game(OpenTinkerStyle(), seed=seed, record=None, kwargs={}) for seed in (5, 5, 6)
    )
    assert first == second != other
    assert random.getstate() == before


def test_a_row_brings_its_prompt_and_the_game_its_system_prompt():
    record = Record([{"role": "user", "content": "2+2="}], "4", "sums", {"index": 0})
    messages = open_game(CountingGame(), seed=0, record=record, kwargs={})
    assert [message["content"] for message in messages] == ["count", "2+2="]


def test_a_system_message_in_the_data_wins():
    record = Record([{"role": "system", "content": "be brief"}], "4")
    messages = open_game(CountingGame(), seed=0, record=record, kwargs={})
    assert messages == [{"role": "system", "content": "be brief"}]


def test_a_row_reaches_reset_with_what_the_request_adds():
    class Listens(CountingGame):
        def reset(self, **kwargs: Any) -> str:
            self.heard = kwargs
            return ""

    game = Listens()
    record = Record([{"role": "user", "content": "?"}], "4", "", {"index": 3})
    open_game(game, seed=0, record=record, kwargs={"level": 2})
    assert game.heard == {
        "ground_truth": "4",
        "data_source": "listens",
        "extra_info": {"index": 3},
        "level": 2,
    }


def test_images_take_the_place_of_their_tags():
    record = Record([{"role": "user", "content": "<image>What?"}], "4", images=[b"png"])
    content = record.messages()[0]["content"]
    assert content == [{"type": "image", "image": b"png"}, {"type": "text", "text": "What?"}]


def test_more_image_tags_than_images_are_refused():
    record = Record([{"role": "user", "content": "<image><image>"}], "4", images=[b"png"])
    with pytest.raises(DataError, match="more <image> tags than its row has images"):
        record.messages()


def test_a_reset_that_returns_no_text_is_a_game_error():
    with pytest.raises(GameError, match=r"ReturnsNoText\.reset is 7 \(int\), it must be a str"):
        open_game(ReturnsNoText(), seed=0, record=None, kwargs={})


def test_a_row_without_a_prompt_leaves_the_words_to_the_game():
    game = GuessGame()
    messages = open_game(game, seed=0, record=Record([], "4"), kwargs={"number": 4})
    assert messages == [{"role": "user", "content": "guess 0-6"}]
    assert game.step("4").reward == 1.0


def test_an_empty_prompt_is_refused():
    with pytest.raises(DataError, match="Silent makes an empty prompt"):
        open_game(Silent(), seed=0, record=None, kwargs={})
    record = Record([], "4", where="row 7 of a.jsonl")
    with pytest.raises(DataError, match=r"Silent makes an empty prompt of row 7 of a\.jsonl"):
        open_game(Silent(), seed=0, record=record, kwargs={})


# -- `env check` finds what is wrong with a game, each fault by its own question -------------------


def failures(**config):
    results = check_game(EnvConfig(**config))
    return {result.name: result for result in results if not result.ok}


@pytest.mark.parametrize(
    ("game", "question", "detail"),
    [
        ("broken_games:Nowhere", "the game imports", "has no game 'Nowhere'"),
        ("broken_games:Misspelt", "the game imports", "get_sytem_prompt, which tinkermq does"),
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


def test_helpers_of_a_game_may_be_named_like_its_methods():
    assert failures(game="broken_games:NamesHelpersAlike") == {}


def test_the_hints_say_what_to_do():
    found = failures(game="broken_games:UsesGlobalGenerator")
    assert "draw from self.rng" in found["the global generator is not used"].hint


@pytest.mark.parametrize("game", ["CountingGame", "GoldSucceeds"])
def test_a_sound_game_has_no_failures(game):
    assert failures(game=f"broken_games:{game}") == {}


def test_arrays_and_missing_numbers_in_info_are_compared():
    assert failures(game="broken_games:TellsArrays") == {}
    told = failures(game="broken_games:TellsArrays", kwargs={"noise": 1.0})
    assert "gave two different episodes" in told["a seed reproduces an episode"].detail


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
        ("says_nothing", "not a finite reward"),
        ("says_text", "not a finite reward"),
        ("says_nan", "not a finite reward"),
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


# -- What a bad game does to its episode, and what it cannot do to the others and the host ---------


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("broken_games:Missing", "module broken_games has no game 'Missing'"),
        ("no_such_module:Game", "game 'no_such_module:Game' cannot be imported: ModuleNotFound"),
        ("broken_games:NotAGame", "does not derive from tinkermq.envs.AbstractGame"),
        ("broken_games:RaisesInInit", "OSError: the emulator is not installed"),
    ],
)
@ISOLATIONS
async def test_a_game_that_cannot_be_made_ends_the_host_with_its_reason(
    broker, scope, isolation, game, message
):
    with pytest.raises(Exception) as group:  # noqa: PT011 - looked at below
        async with hosting(broker, scope, game, isolation=isolation, workers=1):
            pass
    error = group.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GameError)
    assert message in error.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no dataset file"),
        (lambda path: path.write_text(""), "has no rows"),
        (lambda path: path.write_text('{"question": 1}\n'), "has no column prompt; its columns"),
    ],
)
async def test_data_that_cannot_be_used_ends_the_host_with_its_reason(
    broker, scope, tmp_path, make, message
):
    path = tmp_path / "train.jsonl"
    make(path)
    config = EnvConfig(game="addition", train_data=[str(path)])
    error = await error_of(EnvironmentHost(broker, scope, config).run(asyncio.Event()), DataError)
    assert message in error.message
    assert str(path) in error.message


@ISOLATIONS
async def test_a_game_that_raises_in_reset_fails_its_episode(broker, scope, isolation):
    game = "broken_games:RaisesInReset"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        error = await error_of(client.reset("a"))
        assert error.message.startswith("RaisesInReset raised in reset: KeyError: 'no such board'")
        assert 'raise KeyError("no such board")' in error.message
        assert (await client.describe()).game == "raisesinreset"
        assert client.host.num_running == 0


@ISOLATIONS
async def test_a_game_that_raises_in_step_fails_its_episode_alone(broker, scope, isolation):
    async with hosting(broker, scope, isolation=isolation, workers=1) as client:
        await asyncio.gather(client.reset("bad"), client.reset("good"))
        error = await error_of(client.step("bad", 0, "raise"))
        assert error.message.startswith("CountingGame raised in step: ValueError: boom at 42\n")
        assert (await error_of(client.step("bad", 0, "raise"))).message == error.message
        assert await client.play_to_the_end("good") == 3
        assert client.host.counts.failures == 1


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("ReturnsTuple", "must be a StepResult"),
        ("ReturnsNaN", "must be a finite number"),
        ("ReturnsUntravellingInfo", "info cannot travel"),
        ("QuitsThePython", "raised in step: SystemExit: 3"),
    ],
)
@ISOLATIONS
async def test_a_wrong_answer_of_a_game_fails_its_episode(broker, scope, isolation, game, message):
    game = f"broken_games:{game}"
    async with hosting(broker, scope, game, isolation=isolation, workers=1) as client:
        for episode in ("a", "b"):
            await client.reset(episode)
            assert message in (await error_of(client.step(episode, 0))).message


async def test_a_reset_that_returns_no_text_fails_its_episode(broker, scope):
    async with hosting(broker, scope, "broken_games:ReturnsNoText") as client:
        assert "reset is 7 (int), it must be a str" in (await error_of(client.reset("a"))).message


@ISOLATIONS
async def test_a_game_that_hangs_in_step_fails_while_others_go_on(broker, scope, isolation):
    config = {"isolation": isolation, "workers": 2, "step_timeout_s": 2.0}
    async with hosting(broker, scope, **config) as client:
        await client.reset("bad")
        await client.reset("good")  # in the other process
        hung = asyncio.create_task(client.step("bad", 0, "hang"))
        assert await client.play_to_the_end("good") == 3
        error = await error_of(hung)
        assert "hung in step for 2 s" in error.message
        assert "env.step_timeout_s" in error.hint
        for number in range(4):  # more than the workers: the hung one was replaced
            await client.reset(f"e{number}")
            assert await client.play_to_the_end(f"e{number}") == 3


@ISOLATIONS
async def test_a_game_that_hangs_in_reset_fails_its_episode(broker, scope, isolation):
    game = "broken_games:HangsInReset"
    config = {"isolation": isolation, "workers": 1, "reset_timeout_s": 2.0}
    async with hosting(broker, scope, game, **config) as client:
        error = await error_of(client.reset("a"))
        assert "hung in reset for 2 s" in error.message
        assert "env.reset_timeout_s" in error.hint
        assert client.host.num_running == 0


async def test_threads_hung_beyond_the_bound_are_told(broker, scope):
    config = {"workers": 2, "step_timeout_s": 0.3}
    async with hosting(broker, scope, **config) as client:
        count = MAX_GIVEN_UP + 2
        await asyncio.gather(*(client.reset(f"e{n}") for n in range(count)))
        steps = [client.step(f"e{n}", 0, "hang") for n in range(count)]
        errors = await asyncio.gather(*steps, return_exceptions=True)
        assert all("hung in step" in str(error) for error in errors)
        error = await error_of(client.reset("late"))
        assert f"{count} calls of CountingGame have hung" in error.message
        assert "env.isolation=process" in error.hint


async def test_a_process_that_is_ended_fails_its_episodes_and_is_replaced(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=2) as client:
        for episode in ("bad", "elsewhere", "beside"):  # bad and beside share a process
            await client.reset(episode)
        error = await error_of(client.step("bad", 0, "exit"))
        assert "broken_games:CountingGame ended with exit code 7 in step" in error.message
        error = await error_of(client.step("beside", 0))
        assert "the process of this episode was ended because of another" in error.message
        assert await client.play_to_the_end("elsewhere") == 3
        await client.reset("next")
        assert await client.play_to_the_end("next") == 3


async def test_a_process_that_is_killed_from_outside_is_survived(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = runner_of(client)._slots[0].process.child
        os.kill(child.pid, signal.SIGKILL)
        error = await error_of(client.step("a", 0))
        assert "SIGKILL" in error.message
        await client.reset("b")
        assert await client.play_to_the_end("b") == 3


async def test_worker_processes_end_with_the_host(broker, scope):
    async with hosting(broker, scope, isolation="process", workers=1) as client:
        await client.reset("a")
        child = runner_of(client)._slots[0].process.child
    assert child.returncode == -signal.SIGKILL
