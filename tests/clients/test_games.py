"""`env new`, `env play` and `env serve`: a game by hand, and as a package."""

import json
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tinkermq.clients.cli.new_package import AgentKind as AgentKind
from tinkermq.clients.cli.new_package import GameKind
from tinkermq.clients.inference.play import EpisodeResult, ResultFile
from tinkermq.schemas.config.load_config import load_config
from tinkermq.schemas.wire.errors import ConfigError, StorageError

from tests.clients.command import tinkermq
from tests.clients.conftest import Cli
from tests.support.pages import environment, succeed

# -- env play --------------------------------------------------------------------------------------


def test_a_script_from_a_pipe_plays() -> None:
    done = tinkermq("env", "play", "guess", "highest=9", "--seed", "1", stdin=b"1\nx\\\ny\n2\n")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "[user]",
        "guess 0-9",
        "> 1",
        "higher",
        "[reward 0]  {'guess': 1, 'tries': 1}",
        "> x",
        "y",
        "digits only",
        "[reward 0]  {'guess': None}",
        "> 2",
        "[reward 1, the game is over]  {'guess': 2, 'tries': 3}",
        "return 1 after 3 turns",
    ]


def test_input_that_ends_before_the_game_ends_with_1() -> None:
    done = tinkermq("env", "play", "calculator", "--seed", "3", "--json", stdin=b"=1+1\n")
    assert done.code == 1
    prompt, turn, end = map(json.loads, done.out.splitlines())
    assert re.fullmatch(r"\d\d\*\d\d", prompt["messages"][0]["content"])
    assert (turn["action"], turn["observation"], turn["info"]) == ("=1+1", "2", {"tool": True})
    assert end == {"return": 0.0, "turns": 1, "done": False}


def test_gold_answers_play_by_themselves(cli: Cli) -> None:
    done = cli("env", "play", "calculator", "--gold", "--seed", "3")
    assert (done.code, done.out.splitlines()[-1]) == (0, "return 1 after 2 turns")


# -- env serve -------------------------------------------------------------------------------------


def test_what_a_served_run_or_game_cannot_have_is_said(cli: Cli) -> None:
    run = cli("env", "serve", "my-run", "highest=3")
    assert (run.code, "add --openenv" in run.err) == (2, True)
    bound = cli("env", "serve", "guess", "--openenv", "--max-sessions", "0")
    assert (bound.code, "--max-sessions" in bound.err) == (2, True)
    packages = cli("env", "serve", "guess", "--openenv")
    assert (packages.code, "tinkermq[openenv-server]" in packages.err) == (2, True)


# -- env new ---------------------------------------------------------------------------------------


def test_a_new_package_has_game_data_configuration_and_test(cli: Cli, tmp_path: Path) -> None:
    done = cli("env", "new", "word-chain", "--into", str(tmp_path))
    assert done.code == 0
    assert "pip install -e '.[test]'" in done.out
    folder = tmp_path / "word-chain"
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*")) == [
        "README.md",
        "data/train.jsonl",
        "data/val.jsonl",
        "pyproject.toml",
        "tests/test_game.py",
        "tests/test_rules.py",
        "tiny/sft.yaml",
        "tiny/train.yaml",
        "train.yaml",
        "word_chain/__init__.py",
        "word_chain/demonstrations.py",
        "word_chain/game.py",
    ]
    assert (folder / "Makefile").is_file()
    again = cli("env", "new", "word-chain", "--into", str(tmp_path))
    assert (again.code, again.err.splitlines()[0]) == (2, f"error: {folder} already exists")


@pytest.mark.parametrize(
    "name", ["Word", "1st", "word chain", "../up", "class", "json", "tinkermq"]
)
def test_a_name_that_cannot_be_a_package_is_refused(cli: Cli, tmp_path: Path, name: str) -> None:
    done = cli("env", "new", name, "--into", str(tmp_path))
    assert done.code == 2
    assert list(tmp_path.iterdir()) == [] or not (tmp_path / name).exists()


def test_a_new_environment_class_of_trl_is_found_sound(cli: Cli, tmp_path: Path) -> None:
    made = cli("env", "new", "coin-boxes", "--kind", "trl", "--into", str(tmp_path))
    assert (made.code, "tinkermq env check train.yaml" in made.out) == (0, True)
    folder = tmp_path / "coin-boxes"
    assert files_of(folder) == sorted(["README.md", "coin_boxes.py", *OF_ROWS])
    checked = tinkermq("env", "check", "train.yaml", cwd=folder)
    assert checked.code == 0, checked.out + checked.err
    assert "look(box: integer)  Look into a box." in checked.out


@pytest.mark.full
def test_a_new_server_of_mcp_is_found_sound(cli: Cli, tmp_path: Path) -> None:
    made = cli("env", "new", "my-shop", "--kind", "mcp", "--into", str(tmp_path))
    assert (made.code, "pip install -e ." in made.out) == (0, True)
    folder = tmp_path / "my-shop"
    assert files_of(folder) == sorted(["README.md", "my_shop.py", *OF_ROWS, "server.py"])
    checked = tinkermq("env", "check", "train.yaml", cwd=folder)
    assert checked.code == 0, checked.out + checked.err
    assert "price(item: string)  Return the price of one piece." in checked.out


def test_a_new_environment_of_openenv_is_whole(cli: Cli, tmp_path: Path) -> None:
    """Its server needs OpenEnv's package: tests/envs/test_openenv_trainers.py runs it."""
    made = cli("env", "new", "my-env", "--kind", "openenv", "--into", str(tmp_path))
    assert (made.code, ".venv/bin/server" in made.out) == (0, True)
    folder = tmp_path / "my-env"
    assert files_of(folder) == [
        "README.md",
        "openenv.yaml",
        "pyproject.toml",
        "server/Dockerfile",
        "server/__init__.py",
        "server/app.py",
        "server/environment.py",
        "train.yaml",
    ]
    assert load_config(folder / "train.yaml").env.game == "openenv"
    for file in folder.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    taken = cli("env", "new", "openenv", "--kind", "openenv", "--into", str(tmp_path))
    assert (taken.code, "would hide another" in taken.err) == (2, True)


def test_a_new_game_is_refused_the_name_of_an_installed_package(cli: Cli, tmp_path: Path) -> None:
    refused = cli("env", "new", "numpy", "--into", str(tmp_path))
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    assert "a package named numpy would hide another of this name" in refused.err


def test_a_new_game_is_refused_the_name_of_a_registered_one(cli: Cli, tmp_path: Path) -> None:
    refused = cli("env", "new", "calculator", "--into", str(tmp_path))
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    assert "there is a game calculator already" in refused.err


OF_ROWS = ["data/train.jsonl", "data/val.jsonl", "pyproject.toml", "train.yaml"]


def files_of(folder: Path) -> list[str]:
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    return sorted(one for one in files if "__pycache__" not in one)


# -- Each kind of `env new` is a sound game, and a tiny model learns it with `make train` ----------


KINDS = get_args(GameKind)
FAST = ("dataset",)
LONG = (pytest.mark.full, pytest.mark.long)


class Made:
    """A new package, and what its user has in the environment."""

    def __init__(self, cli: Cli, into: Path, kind: str) -> None:
        """Make it."""
        done = cli("env", "new", "my-game", "--kind", kind, "--into", str(into))
        assert done.code == 0, done.err
        self.folder = into / "my-game"
        site = str(into / "site")
        self.env = {**environment(into), "PIP_TARGET": site, "PYTHONPATH": site}
        self.say("pip install -q --no-deps --no-index --no-build-isolation .")
        if (self.folder / "my_game" / "make_data.py").exists():
            self.say("python -m my_game.make_data")

    def say(self, line: str) -> str:
        """Run a line that must succeed in the package's folder."""
        return succeed(line, self.folder, env=self.env)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_a_new_game_of_each_kind_is_sound(cli: Cli, tmp_path: Path, kind: str) -> None:
    made = Made(cli, tmp_path, kind)
    told = made.say("python -m pytest -q -p no:cacheprovider")
    assert re.search(r"^\d+ passed", told, re.MULTILINE), told
    assert "failed" not in told
    assert "gold answers score full marks" in made.say("tinkermq env check train.yaml")


def test_an_agent_is_a_kind_of_its_own(cli: Cli, tmp_path: Path) -> None:
    done = cli("env", "new", "my-agent", "--kind", "agent", "--into", str(tmp_path))
    assert done.code == 0, done.err
    assert (tmp_path / "my-agent" / "agent.yaml").is_file()


def raised(told: str) -> tuple[float, float]:
    """Return the validation before and after that `make train` tells."""
    found = re.search(r"^validation ([\d.]+) at step 0, ([\d.]+) at step \d+$", told, re.MULTILINE)
    assert found, told
    return float(found[1]), float(found[2])


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=LONG) for kind in KINDS]
)
def test_a_tiny_model_learns_a_new_game_of_each_kind(cli: Cli, tmp_path: Path, kind: str) -> None:
    told = Made(cli, tmp_path, kind).say("make train")
    before, after = raised(told)
    print(kind, before, after)
    assert after > before + 0.1


@pytest.mark.long
@pytest.mark.parametrize("kind", get_args(AgentKind))
def test_a_tiny_model_learns_to_use_the_tool_of_a_new_agent(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    done = cli("agent", "new", "my-agent", "--kind", kind, "--into", str(tmp_path))
    assert done.code == 0, done.err
    told = succeed("make train", tmp_path / "my-agent", 560, environment(tmp_path))
    before, after = raised(told)
    print(kind, before, after)
    assert after > before + 0.1


@pytest.mark.parametrize("kind", get_args(AgentKind))
def test_the_demonstrations_of_a_new_agent_are_conversations_of_its_program(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    cli("agent", "new", "my-agent", "--kind", kind, "--into", str(tmp_path))
    folder = tmp_path / "my-agent"
    told = succeed("python tiny/demonstrations.py .", folder, env=environment(tmp_path))
    assert told.splitlines() == ["tasks.jsonl", "chats.jsonl"]
    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    called = next(chat["messages"] for chat in chats if len(chat["messages"]) == 5)
    assert [message["role"] for message in called[2:]] == ["assistant", "tool", "assistant"]
    assert called[3]["content"] == called[4]["content"]
    for name in ("sft", "agent"):
        load_config(folder / "tiny" / f"{name}.yaml")
    compile((folder / "tiny" / "play.py").read_text(), "play.py", "exec")


# -- Files of results: one line each, gone on with where they ended, never mixed -------------------


SETTINGS = {"model": "my-run@4", "temperature": 1.0}


def result(task: int, **fields: object) -> EpisodeResult:
    return EpisodeResult(task, 0, 1.0, True, **fields)  # pyright: ignore[reportArgumentType]


def test_a_line_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(3, info={"board": np.zeros(2)}))
        line = json.loads(path.read_text())
    assert (line["task"], line["reward"], line["info"]) == (3, 1.0, {"board": [0.0, 0.0]})


def test_a_file_goes_on_without_its_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(1))
        file.add(result(2))
    path.write_bytes(path.read_bytes() + b'{"task": 3, "sam')
    with ResultFile(path, SETTINGS) as file:
        assert set(file.done) == {(1, 0), (2, 0)}
        file.add(result(3))
    assert [json.loads(line)["task"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_failed_episodes_are_kept_on_file_and_played_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(EpisodeResult(1, 0, 0.0, False, error="the game raised"))
    assert "the game raised" in path.read_text()
    assert "reward" not in json.loads(path.read_text())
    assert not ResultFile(path, SETTINGS).done


def test_results_of_other_settings_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(1))
    with pytest.raises(ConfigError, match=r"line 1 of .* was made with other settings"):
        ResultFile(path, {**SETTINGS, "temperature": 0.5})


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ConfigError, match="is not a result of an inference"):
        ResultFile(path, SETTINGS)
    assert path.read_text() == '{"hello": 1}\n'


def test_a_path_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot be written"),
        ResultFile(tmp_path / "file" / "results.jsonl", SETTINGS),
    ):
        pass


def test_without_a_path_results_stay_in_memory() -> None:
    with ResultFile(None, SETTINGS) as file:
        file.add(result(1))
    assert set(file.done) == {(1, 0)}
