r"""The two math games: what ends an episode, what is run, and what no exploit is worth."""

import gc
import json
import os
from pathlib import Path

import pytest
from tinkermq.envs.check import check_game
from tinkermq.envs.games import math as math_module
from tinkermq.envs.games import math_code as code_module
from tinkermq.envs.games.math import MathGame
from tinkermq.envs.games.math_code import MAX_PROGRAMS, MathCodeGame
from tinkermq.envs.registry import load_game
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.configs import example

PLAIN = {"packages": [], "time_s": 5}


def coding(**kwargs):
    game = MathCodeGame(**{"sandbox": PLAIN, **kwargs})
    game.reset(ground_truth="408", data_source="unknown", extra_info={"reward": 1, "step": 2})
    return game


def fenced(*programs):
    return "\n".join(f"```python\n{program}\n```" for program in programs)


def called(code, name="code_interpreter"):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.parametrize(
    ("module", "kwargs"),
    [
        (math_module, {}),
        (math_module, {"rewards": {"answer": 0.9, "think": 0.1}}),
        (code_module, {"sandbox": PLAIN}),
        (code_module, {"sandbox": {**PLAIN, "keep_state": True}, "tool_format": "hermes"}),
    ],
)
def test_every_check_of_the_game_passes(module, kwargs, tmp_path):
    train, val = module.make_data(tmp_path, 4, 2, seed=3)
    name = module.__name__.rpartition(".")[2]
    config = EnvConfig(game=name, kwargs=kwargs, train_data=[str(train)], val_data=[str(val)])
    results = check_game(config)
    assert [result for result in results if not result.ok] == []
    assert "gold answers score full marks" in [result.name for result in results]


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        (r"\boxed{2}", 1),
        ("2", 0),
        (r"\boxed{0 1 2 3 4 5 6 7 8 9}", 0),
        (r"\boxed{1+1}", 0),
        (r"\boxed{1} \boxed{2} \boxed{3}", 0),
        ("", 0),
        ("\\boxed{" * 500, 0),
    ],
)
@pytest.mark.parametrize("data_source", ["math", "never heard of"])
def test_only_the_answer_scores_whatever_the_source_is_called(action, reward, data_source):
    game = MathGame()
    game.reset(ground_truth="2", data_source=data_source)
    result = game.step(action)
    assert (result.reward, result.done, result.info["success"]) == (reward, True, reward == 1)


def test_a_program_is_run_and_what_it_prints_is_the_observation():
    game = coding()
    ran = game.step(f"Let me compute.\n{fenced('a = 12', 'print(a * 34)')}")
    assert (ran.observation, ran.reward, ran.done) == ("[nothing was printed]\n408", 0.0, False)
    done = game.step(r"\boxed{408}")
    assert (done.reward, done.done) == (1.0, True)
    assert done.info["programs"] == 2


def test_a_box_in_a_program_or_in_what_it_prints_is_no_answer():
    game = coding()
    result = game.step(fenced(r"print(r'\boxed{408}')"))
    assert (result.observation, result.done) == (r"\boxed{408}", False)
    assert game.step(f"<think>\\boxed{{408}}\n{fenced('1')}").info == {"no_action": True}


def test_an_answer_beside_a_program_ends_the_episode_and_nothing_is_run():
    result = coding().step(f"{fenced('1')}\nso \\boxed{{7}}")
    assert (result.reward, result.done, result.info["programs"]) == (0.0, True, 0)


@pytest.mark.parametrize(
    "action", ["", "I do not know.", "```python\nprint(1)", "```js\n1\n```", "<think>```py\n1\n```"]
)
def test_without_program_and_answer_the_policy_is_reminded(action):
    result = coding().step(action)
    assert "neither a program nor an answer" in result.observation
    assert (result.reward, result.done, result.role) == (0.0, False, "user")


def test_a_call_of_the_tool_is_answered_by_the_tool():
    game = coding(tool_format="hermes")
    (tool,) = game.get_tools()
    assert tool["function"]["name"] == "code_interpreter"
    assert tool["function"]["parameters"]["required"] == ["code"]
    result = game.step(f"I compute. {called('print(12 * 34)')}")
    assert (result.observation, result.role) == ("408", "tool")
    assert game.step(fenced("1")).info == {"no_action": True}


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "code_interpreter", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "code_interpreter", "arguments": {"code": 3}}</tool_call>',
        '<tool_call>{"name": "code_interpreter", "arguments": [1]}</tool_call>',
        called("1", name="shell"),
    ],
)
def test_a_call_that_is_none_is_told_so(call):
    result = coding(tool_format="hermes").step(call)
    assert "no call of a tool" in result.observation
    assert (result.role, result.info["failed_programs"]) == ("tool", 1)


def test_variables_last_one_turn_unless_they_are_kept():
    forgetful, keeping = coding(), coding(sandbox={**PLAIN, "keep_state": True})
    for game, words in ((forgetful, "NameError"), (keeping, "3")):
        assert game.step(fenced("x = 3", "x")).observation.endswith("3")
        assert words in game.step(fenced("x")).observation
    del keeping, game
    gc.collect()
    assert not [pid for pid in descendants(os.getpid()) if _is_sandbox(pid)]


def _is_sandbox(pid):
    return Path(f"/proc/{pid}/comm").read_text() == "bwrap\n"


def test_a_turn_is_bounded_in_programs_time_and_what_is_shown():
    game = coding(sandbox={**PLAIN, "time_s": 0.5}, max_output_chars=40)
    many = game.step(fenced(*["1"] * (MAX_PROGRAMS + 1))).observation
    assert many == "\n".join(
        ["1"] * MAX_PROGRAMS + [f"[only {MAX_PROGRAMS} programs are run in one turn]"]
    )
    slow = game.step(fenced("while True: pass", "1")).observation
    assert slow == "[stopped: it ran for too long]\n[not run: the time of this turn is over]"
    long = game.step(fenced("'a' * 100 + 'b' * 100")).observation
    assert long == f"{'a' * 20}\n[160 characters left out]\n{'b' * 20}"


@pytest.mark.parametrize("name", ["math", "gsm8k", "math_code", "gsm8k_code"])
def test_the_game_of_an_example_can_be_made(name):
    env = parse_config(example(name)).env
    game = load_game(env.game)(**env.kwargs)
    assert bool(game.get_tools()) == ("hermes" in env.kwargs.values())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"tool_format": "xml"}, "tool_format is 'xml'"),
        ({"sandbox": {"memory": 1}}, "env.kwargs.sandbox.memory"),
        ({"rewards": {"luck": 1}}, "env.kwargs.rewards.luck"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        MathCodeGame(**kwargs)
