"""`agent new`, `agent check` and `agent play`: a program made, tried out, and played by hand."""

import json
from pathlib import Path

import pytest
from tinkermq.clients.validation import check_files_exist, resolve_paths
from tinkermq.schemas.wire.errors import ConfigError

from tests.clients.command import Outcome, tinkermq
from tests.clients.conftest import Cli


@pytest.fixture
def made(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new agent without packages, in whose folder we are."""
    folder = new_agent(cli, tmp_path, "command")
    monkeypatch.chdir(folder)
    return folder


def new_agent(cli: Cli, into: Path, kind: str) -> Path:
    """Make an agent of a kind."""
    done = cli("agent", "new", "my-agent", "--kind", kind, "--into", str(into))
    assert done.code == 0, done.err
    return into / "my-agent"


def played(lines: str) -> Outcome:
    """Play the agent of this folder by a script."""
    return tinkermq("agent", "play", "agent.yaml", "--row", "0", stdin=lines.encode())


# -- agent new -------------------------------------------------------------------------------------


def test_a_new_agent_has_program_tasks_reward_and_configuration(cli: Cli, tmp_path: Path) -> None:
    folder = new_agent(cli, tmp_path, "openai")
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.*")) == [
        "README.md",
        "agent.yaml",
        "data/train.jsonl",
        "data/val.jsonl",
        "grader/grade.py",
        "program/agent.py",
        "program/tool.py",
        "tiny/agent.yaml",
        "tiny/demonstrations.py",
        "tiny/play.py",
        "tiny/sft.yaml",
    ]
    again = cli("agent", "new", "my-agent", "--into", str(tmp_path))
    assert (again.code, again.err.splitlines()[0]) == (2, f"error: {folder} already exists")
    bad = cli("agent", "new", "../up", "--into", str(tmp_path))
    assert bad.code == 2
    assert "'../up' is not a valid name for an agent" in bad.err


@pytest.mark.parametrize("kind", ["openai", "anthropic", "command"])
def test_a_new_agent_passes_its_check_at_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(new_agent(cli, tmp_path, kind))
    done = cli("agent", "check", "agent.yaml", "--row", "0", "--json")
    assert done.code == 0, done.out + done.err
    report = json.loads(done.out)
    assert report["ok"]
    assert [call["parent"] for call in report["calls"]] == [None, 0]
    assert (report["rows"], report["outcome"]) == (1, "done")
    endpoint = "messages" if kind == "anthropic" else "chat/completions"
    assert report["endpoints"] == {f"POST /v1/{endpoint}": 2}


# -- agent check -----------------------------------------------------------------------------------


def test_a_check_is_told_in_lines(cli: Cli, made: Path) -> None:
    done = cli("agent", "check", "agent.yaml")
    lines = done.out.splitlines()
    assert done.code == 0, done.err
    assert "asks   POST /v1/chat/completions  2 times" in lines
    assert any(line.startswith("call   1   continues 0") for line in lines)
    assert "ok     ends by itself, exit code 0" in lines
    assert "ok     each call continues the one before it: one row" in lines
    assert "ok     has the reward 0" in lines


def test_a_program_that_fails_is_told_with_what_it_printed(cli: Cli, made: Path) -> None:
    (made / "program" / "agent.py").write_text("raise SystemExit('I cannot')")
    done = cli("agent", "check", "agent.yaml")
    assert done.code == 1
    assert "without one answered call of the model" in done.out
    assert "I cannot" in done.out
    absent = cli("agent", "check", "agent.yaml", "agent.command=[no-such-agent]")
    assert absent.code == 2
    assert "programs find no 'no-such-agent'" in absent.err


def test_a_game_is_no_agent(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "game.yaml"
    config.write_text("env: {game: guess}\n")
    done = cli("agent", "check", str(config))
    assert done.code == 2
    assert "this is no job with a program: agent.command is empty" in done.err


# -- agent play ------------------------------------------------------------------------------------


def test_the_model_is_played_by_a_script(made: Path) -> None:
    row = json.loads((made / "data" / "train.jsonl").read_text().splitlines()[0])
    a, sign, b = row["prompt"].removeprefix("What is ").removesuffix("?").split()
    call = json.dumps({"a": int(a), "operation": sign, "b": int(b)})
    done = played(
        f"/call compute {{}}\nA moment.\\\n/call calculate {call}\nIt is {row['answer']}\n"
    )
    assert done.code == 0, done.err
    assert "there is no tool 'compute'; there are calculate" in done.err
    assert row["prompt"] in done.out
    assert f"[tool]\n{row['answer']}\n" in done.out
    assert done.out.splitlines()[-2:] == ["outcome done, exit code 0", "reward 1 after 2 calls"]


def test_who_leaves_before_the_end_is_told_so(made: Path) -> None:
    done = played("/quit\n")
    assert (done.code, done.out.splitlines()[-1]) == (1, "you left before the program ended")


# -- other commands --------------------------------------------------------------------------------


def test_a_dry_run_runs_the_program_once(cli: Cli, made: Path) -> None:
    done = cli("train", "agent.yaml", "--dry-run", "--json")
    told = {check["check"]: check for check in json.loads(done.out)["checks"]}
    assert done.code == 0, done.err
    assert "run once against a scripted model, 2 calls, 1 rows, done" in told["agent"]["detail"]
    (made / "program" / "agent.py").write_text("raise SystemExit(1)")
    failed = cli("train", "agent.yaml", "--dry-run")
    assert failed.code == 2
    assert "agent.command: the program exited with code 1 without one answered" in failed.err
    hosted = cli("train", "agent.yaml", "env.hosts=0", "--dry-run")
    assert hosted.code == 0
    assert "its programs are run by clients: not checked" in hosted.out


def test_commands_for_games_name_those_for_agents(cli: Cli, made: Path) -> None:
    for command in ("check", "play", "eval"):
        done = cli("env", command, "agent.yaml")
        assert done.code == 2
        assert "`tinkermq agent check agent.yaml`" in done.err


def test_folders_of_programs_become_absolute_where_the_pool_runs_them(made: Path) -> None:
    tree = {"agent": {"command": ["a"], "files": "program", "read": ["data", "elsewhere"]}}
    told = resolve_paths(tree, "nats://127.0.0.1:4222")["agent"]
    assert (told["files"], told["read"]) == (
        str(made / "program"),
        [str(made / "data"), "elsewhere"],
    )
    own = {**tree, "env": {"hosts": 0}}
    assert resolve_paths(own, "nats://127.0.0.1:4222")["agent"] == tree["agent"]
    with pytest.raises(ConfigError, match=r"there is no folder 'elsewhere' \(agent.read\)"):
        check_files_exist(tree, "nats://127.0.0.1:4222", has_model=True)
    check_files_exist(own, "nats://127.0.0.1:4222", has_model=True)
