"""Environment classes of TRL, unmodified, are games with tools."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl_classes
from hosting import hosting
from tinkermq.broker.client.connection import Broker
from tinkermq.envs import StepResult
from tinkermq.envs.adapters.trl_environments import tool_schema
from tinkermq.envs.check import check_game
from tinkermq.envs.data import HostData
from tinkermq.envs.game import ChatMessage, check_result
from tinkermq.envs.prompt import open_game
from tinkermq.envs.registry import find_game, import_needs, load_game, named_objects
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError, RewardError, TinkermqError
from tinkermq.schemas.wire.subjects import JobScope
from transformers.utils.chat_template_utils import get_json_schema

ROW = {"prompt": [{"role": "user", "content": "Play. "}], "word": "slate", "goal": 5}


def opened(
    target: str, row: dict[str, Any] | None = None, *, seed: int = 0, **kwargs: Any
) -> tuple[Any, list[ChatMessage]]:
    """Start an episode of a game on a row, as a host does."""
    game = load_game(f"trl:{target}")(**kwargs)
    record = None if row is None else _record(row)
    return game, open_game(game, seed=seed, record=record, kwargs={})


def _record(row: dict[str, Any]) -> Any:
    from tinkermq.envs.dataset import parse_row

    return parse_row(row, "row 0")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(game: Any, action: str) -> StepResult:
    return check_result(game, game.step(action))


@pytest.mark.parametrize(
    "method",
    [
        trl_classes.CounterEnv.increment,
        trl_classes.CounterEnv.double,
        trl_classes.WordEnv.guess,
        trl_classes.SearchEnv.search,
    ],
    ids=lambda method: method.__name__,
)
def test_a_method_has_the_schema_that_transformers_makes_of_it(method: Any) -> None:
    assert tool_schema(method, "it") == get_json_schema(method)


def test_a_host_reads_schemas_without_torch_and_transformers() -> None:
    script = (
        "import sys; from tinkermq.envs.registry import load_game; "
        "load_game('trl:trl_classes:SearchEnv')(); "
        "sys.exit(', '.join({'torch', 'transformers', 'trl'} & sys.modules.keys()) or None)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent)


def test_a_counter_counts_and_its_reward_function_scores_it() -> None:
    game, prompt = opened("trl_classes:CounterEnv", ROW, reward_funcs="trl_classes:counted")
    assert prompt == [{"role": "user", "content": "Play. "}]
    assert [tool["function"]["name"] for tool in game.get_tools()] == ["double", "increment"]
    result = step(game, call("increment", step=3) + call("double") + call("increment", step=1))
    assert [message["content"] for message in result.messages()] == ["3", "6", "7"]
    assert (result.reward, result.done) == (0.0, False)
    last = step(game, "It is 7.")
    assert (last.reward, last.done) == (7.0, True)
    assert last.info["reward_counted"] == 7.0


def test_a_static_method_is_a_tool_with_all_its_parameters() -> None:
    game, _ = opened("trl_classes:Static", ROW)
    assert game.get_tools() == [get_json_schema(trl_classes.Static().add)]
    assert step(game, call("add", a=2, b=3)).observation == "5"


def test_a_word_game_appends_its_text_to_the_prompt_and_owns_its_reward() -> None:
    game, prompt = opened("trl_classes:WordEnv", ROW)
    text = "Play. Guess a word of 5 letters. It begins with s."
    assert prompt == [{"role": "user", "content": text}]
    assert step(game, call("guess", guess="stale")).observation == "GYGYG"
    wrong = step(game, call("guess", guess="no"))
    assert wrong.observation == "{'error': \"'no' has 2 letters\"}"
    assert step(game, call("guess", guess="slate")).observation == "GGGGG"
    assert step(game, call("guess", guess="slate")).observation == "{'error': 'Game over.'}"
    last = step(game, "done")
    assert (last.reward, last.done, last.info["failed_calls"]) == (1.0, True, 2)


def test_without_data_reset_makes_the_task_and_a_seed_reproduces_it() -> None:
    prompts = [opened("trl_classes:WordEnv", seed=seed)[1][0]["content"] for seed in range(6)]
    again = [opened("trl_classes:WordEnv", seed=seed)[1][0]["content"] for seed in range(6)]
    assert prompts == again
    assert len(set(prompts)) > 1


def test_the_text_of_reset_follows_the_parts_of_a_prompt_with_pictures() -> None:
    parts = [{"type": "text", "text": "Look."}]
    game, _ = opened("trl_classes:WordEnv", ROW)
    (message,) = game.complete_prompt([{"role": "user", "content": parts}], "Go.")
    assert message["content"] == [*parts, {"type": "text", "text": "Go."}]


def test_reward_functions_get_what_trl_gives_them_and_are_weighted() -> None:
    functions = ["trl_classes:near", "trl_classes:short", "trl_classes:of_trainer"]
    game, _ = opened(
        "trl_classes:CounterEnv", ROW, reward_funcs=functions, reward_weights=[0.5, 1.0, 2.0]
    )
    step(game, f"<think>hm</think>I add.{call('increment', step=1)}")
    last = step(game, "1")
    assert last.reward == pytest.approx(0.5 * -4 + 2.0)  # `short` says None for three messages
    assert last.info["distance"] == 4.0
    assert "reward_short" not in last.info
    assert [message["role"] for message in game._completion] == ["assistant", "tool", "assistant"]
    assert game._completion[0] == {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "<think>hm</think>",
        "tool_calls": [
            {"type": "function", "function": {"name": "increment", "arguments": {"step": 1}}}
        ],
    }


def test_reward_functions_of_one_name_all_count() -> None:
    names = ["first_correct", "second_correct", "two_points", "four_points"]
    functions = [f"trl_classes:{name}" for name in names]
    game, _ = opened(
        "trl_classes:CounterEnv", ROW, reward_funcs=functions, reward_weights=[1, 10, 100, 1000]
    )
    last = step(game, "done")
    assert last.reward == 1 + 10 + 200 + 4000
    names = ["reward_correct", "reward_correct_2", "reward_Scored", "reward__scored"]
    assert [last.info[name] for name in names] == [1.0, 10.0, 200.0, 4000.0]


def test_an_episode_of_which_no_function_says_anything_fails() -> None:
    function = "trl_classes:says_nothing"
    game, _ = opened("trl_classes:CounterEnv", ROW, reward_funcs=function)
    with pytest.raises(RewardError, match="no reward function of CounterEnv returned a reward"):
        game.step("done")
    game, _ = opened("trl_classes:CounterEnv", ROW, reward_funcs=[function, "trl_classes:counted"])
    assert step(game, "done").reward == 0.0


def test_tools_and_rewards_that_wait_are_awaited() -> None:
    game, _ = opened("trl_classes:make_search", ROW)
    assert step(game, call("search", query="a b")).observation == "a b 3 new\nx"
    assert game.get_state() == {}
    assert step(game, "found").reward == 0.25


@pytest.mark.parametrize(
    "target",
    ["trl_classes:ENVIRONMENTS", "words=trl_classes:WordEnv,search=trl_classes:make_search"],
)
def test_a_column_chooses_among_several_environments_and_their_tools(target: str) -> None:
    for name, tool in (("words", "guess"), ("search", "search")):
        game, _ = opened(target, {**ROW, "environment": name})
        assert [one["function"]["name"] for one in game.get_tools()] == [tool]
        assert "environment" not in getattr(game._environment, "seen", {})
    with pytest.raises(GameError, match="column environment is 'chess', the environments are"):
        opened(target, {**ROW, "environment": "chess"})


async def test_a_host_shows_each_row_the_tools_of_its_environment(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    rows = [{"environment": name, "word": "slate"} for name in ("words", "search")]
    rows[1]["prompt"] = "Search."
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"game": "trl:trl_classes:ENVIRONMENTS", "train_data": [str(data)]}
    async with hosting(broker, scope, **settings) as client:
        names = []
        for sample in range(2):
            reply = await client.reset_reply(f"e{sample}", sample=sample)
            names.append([tool["function"]["name"] for tool in reply.tools])
            assert reply.rewards_ends
        assert names == [["guess"], ["search"]]
        result = await client.step("e0", 0, call("guess", guess="slate"))
        assert (result.observation, result.done) == ("GGGGG", False)
        assert (await client.finish("e0", 1)).reward == 1.0  # a limit ends it
        assert (await client.step("e1", 0, "I give up")).reward == 0.25


def test_turns_and_texts_are_bounded_and_the_last_allowed_turn_is_rewarded() -> None:
    game, _ = opened("trl_classes:WordEnv", ROW, max_tool_turns=1, max_result_chars=2)
    result = step(game, call("guess", guess="slate"))
    assert (result.observation, result.reward, result.done) == (
        "GG\n[3 more characters left out]",
        1.0,
        True,
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("trl_classes:NoReset", "NoReset is not an environment of TRL: it has no method reset"),
        ("trl_classes:NoTools", "NoTools has no tools: no public method besides reset"),
        ("trl_classes:NoDoc", "NoDoc.look cannot be a tool: it has no docstring"),
        ("trl_classes:Untyped", "Untyped.look cannot be a tool: it has no type for at"),
        ("trl_classes:Undescribed", "it has no description of at in its docstring"),
        ("trl_classes:AnyArguments", "takes any arguments (*places)"),
        ("trl_classes:Inexpressible", "has the type frozenset[str], which JSON cannot express"),
        ("trl_classes:Typo", "has types that cannot be read: name 'Strng' is not defined"),
        ("trl_classes:CounterEnv", "has no get_reward, and env.kwargs.reward_funcs is empty"),
        ("trl_classes:NUMBER", "trl:trl_classes:NUMBER is not an environment: it is 4"),
        ("trl_classes:Missing", "is not an environment: there is no such name"),
        ("no_such_module:Env", "cannot be imported: ModuleNotFoundError"),
        ("trl_classes", "env.game is trl:trl_classes"),
        ("a=trl_classes:WordEnv,a=trl_classes:SearchEnv", "two environments of the name a"),
        ("trl_classes:WordEnv,trl_classes:WordEnv", "two environments of the name WordEnv"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_remedy(target: str, words: str) -> None:
    with pytest.raises(GameError) as refused:
        load_game(f"trl:{target}")()
    assert words in refused.value.message
    assert refused.value.hint
    failed = [one for one in check_game(EnvConfig(game=f"trl:{target}")) if not one.ok]
    assert words in failed[0].detail


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ("trl_classes:missing", "names 'trl_classes:missing', and there is no such function"),
        ("trl_classes:of_tokens", "asks for completion_ids: tokens are not known where"),
        (["trl_classes:near", "trl_classes:short"], "reward_weights has 1 numbers for 2"),
    ],
)
def test_a_reward_function_that_cannot_be_asked_is_refused(functions: Any, words: str) -> None:
    with pytest.raises(GameError) as refused:
        opened("trl_classes:WordEnv", ROW, reward_funcs=functions, reward_weights=[1.0])
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("too_many", "returned 2 rewards for one completion"),
        ("raises", "failed: KeyError: 'no such column'"),
        ("no_number", "no_number returned 'much'"),
    ],
)
def test_a_reward_function_that_fails_costs_its_episode(function: str, words: str) -> None:
    game, _ = opened("trl_classes:WordEnv", ROW, reward_funcs=f"trl_classes:{function}")
    with pytest.raises(RewardError) as failed:
        game.step("done")
    assert words in failed.value.message


@pytest.mark.parametrize("value", [3, ["a"]])
def test_what_reset_returns_is_a_text_or_none(value: Any) -> None:
    with pytest.raises(GameError, match=r"reset of Returns returned"):
        opened("trl_classes:Returns", {"prompt": "go", "value": value})


def test_a_picture_as_a_result_is_refused() -> None:
    game, _ = opened("trl_classes:Returns", {"prompt": "go"})
    with pytest.raises(GameError, match="a tool returned a part of type 'image'"):
        game.step(call("look"))


def test_rows_need_no_answer_and_keep_their_columns(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"environment": "words", "answer": "a", "extra_info": {"x": 1}}))
    config = EnvConfig(game="trl:trl_classes:WordEnv", train_data=[str(data)])
    record = HostData(config, 0).record("train", 0)
    assert record is not None
    assert record.columns == {"environment": "words", "answer": "a", "extra_info": {"x": 1}}


def test_a_node_finds_the_modules_without_importing_them(tmp_path: Path) -> None:
    assert find_game("trl:trl_classes:WordEnv") == "trl:trl_classes:WordEnv"
    with pytest.raises(TinkermqError, match="there is no module 'no_such' for game"):
        find_game("trl:a=trl_classes:WordEnv,b=no_such.module:Env")


def test_a_check_shows_tools_rewards_and_a_scripted_episode(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(ROW))
    config = EnvConfig(
        game="trl:trl_classes:CounterEnv",
        kwargs={"reward_funcs": ["trl_classes:counted"]},
        train_data=[str(data)],
    )
    results = check_game(config)
    found = {result.name: result.detail for result in results}
    assert [result for result in results if not result.ok] == []
    tools = found["the tools can be offered"]
    assert "increment(step: integer)  Increment the internal counter." in tools
    assert "rewards: 1 × trl_classes:counted" in found["the environment says what it has"]
    played = found["a scripted policy can play"].split("\n       ")[1:]
    assert played == [
        "double({}): '0'",
        "increment({\"step\": 1}): '1'",
        "answer '?': ''",
        "return 1",
    ]


def test_functions_that_arguments_name_are_imported_before_the_game_is_made(tmp_path, monkeypatch):
    (tmp_path / "named_rewards.py").write_text("def right(**_):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = {"reward_funcs": "named_rewards:right"}
    assert named_objects("trl:not_imported:Class", kwargs) == ["named_rewards:right"]
    import_needs(load_game("trl:trl_classes:CounterEnv"), kwargs)
    assert "named_rewards" in sys.modules
