"""Each kind of `env new` is a sound game, and a tiny model learns it with `make train`."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from tinkermq.clients.cli.new_package import AgentKind as AgentKind
from tinkermq.clients.cli.new_package import Kind
from tinkermq.schemas.config.load_config import load_config

from tests.clients.conftest import Cli
from tests.support.pages import environment, succeed

KINDS = [kind for kind in get_args(Kind) if kind != "agent"]
FAST = ("dataset", "generated")


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

    def say(self, line: str, timeout_s: float = 140) -> str:
        """Run a line that must succeed in the package's folder."""
        return succeed(line, self.folder, timeout_s, self.env)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
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


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_learns_a_new_game_of_each_kind(cli: Cli, tmp_path: Path, kind: str) -> None:
    told = Made(cli, tmp_path, kind).say("make train", timeout_s=280)
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
