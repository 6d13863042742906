"""The examples with which `--help` ends can be typed as they are; those without a pool are run."""

import re
import shlex
from pathlib import Path

import pytest
from tinkermq.clients.cli.app import EXAMPLES, build_app
from tinkermq.clients.cli.new_package import write_package
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import all_keys

from tests.clients.conftest import Cli

MAIN = [
    "quickstart",
    "up",
    "train",
    "sft",
    "sweep",
    "ps",
    "resume",
    "fork",
    "eval",
    "serve",
    "infer",
    "logs",
    "rollouts",
    "config show",
    "config schema",
    "env new",
    "env check",
    "env play",
    "env eval",
]
ALONE = ("config ", "env check ", "env new ", "agent new ")
"""What these begin with needs no pool; nor does what is only tried (`--dry-run`, `--gold`)."""
RUN = [
    example.line
    for examples in EXAMPLES.values()
    for example in examples
    if example.line.removeprefix("tinkermq ").startswith(ALONE)
    or {"--dry-run", "--gold"} & set(example.line.split())
]


def told(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the examples that a reader of `--help` sees."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = cli(*command.split(), "--help")
    assert shown.code == 0
    _, _, examples = shown.out.partition("Examples:")
    return [line for line in map(str.strip, examples.splitlines()) if line.startswith("tinkermq ")]


def test_every_main_command_has_one_to_three_examples() -> None:
    assert not set(MAIN) - set(EXAMPLES)
    assert {len(examples) for examples in EXAMPLES.values()} <= {1, 2, 3}


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_ends_with_examples_that_can_be_typed(
    cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = told(cli, command, monkeypatch)
    assert lines == [example.line for example in EXAMPLES[command]]
    assert lines[0].startswith(f"tinkermq {command}")
    keys = {*all_keys(), *JobConfig.model_fields}
    for line in lines:
        tokens = shlex.split(line)[1:]
        build_app().parse_args(tokens, print_error=False, exit_on_error=False)
        dotted = [word for word in tokens if re.match(r"[a-z_]+\.[a-z_.]+=", word)]
        assert {word.partition("=")[0] for word in dotted} <= keys


@pytest.mark.parametrize("line", RUN)
def test_an_example_that_needs_no_pool_does_what_it_says(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    folder = write_package("my-game", tmp_path, "generated")
    config = folder / "train.yaml"
    config.write_text(config.read_text().replace("my-game", "my_game.game:MyGameGame"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # it is not installed
    done = cli(*shlex.split(line)[1:])
    assert done.code == 0, done.out + done.err
