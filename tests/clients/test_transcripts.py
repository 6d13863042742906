"""The command line as users read it: transcripts, and the commands with their options."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from tinkermq.clients.cli.app import build_app

from tests.clients.conftest import Cli
from tests.support.hollow_model import make_hollow
from tests.support.snapshots import assert_snapshot, assert_transcript

pytestmark = pytest.mark.full

TRANSCRIPTS = Path(__file__).parent / "transcripts"
ASKED = '{"role": "user", "content": "2+2"}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the commands of the transcripts name."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "empty").write_text("\n")
    (here / "job.yaml").write_text("model:\n  path: some/model\nenv:\n  game: bandit\n")
    for name, rows in (("chats", ""), ("silent", f'\n{{"messages": [{ASKED}]}}')):
        answered = f'{{"messages": [{ASKED}, {{"role": "assistant", "content": "4"}}]}}'
        (here / f"{name}.jsonl").write_text(answered + rows)
        text = f"model:\n  path: some/model\nsft:\n  data: [{name}.jsonl]\n"
        (here / f"{name}.yaml").write_text(text)
    short = make_hollow(here / "short")
    (short / "tokenizer.json").touch()
    (short / "config.json").write_text('{"max_position_embeddings": 512}')
    make_hollow(tmp_path / "cache" / "models" / "smollm2-tools")
    monkeypatch.chdir(here)
    monkeypatch.setenv("TINKERMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.mark.parametrize("name", ["refused", "shown"])
def test_commands_say_what_they_said_when_it_was_last_read(
    cli: Cli, folder: Path, name: str
) -> None:
    def answer(line: str) -> str:
        outcome = cli(*line.split())
        code = f"[exit code {outcome.code}]\n" if outcome.code else ""
        return f"{outcome.out}{outcome.err}{code}".replace(str(folder), "…")

    assert_transcript(TRANSCRIPTS / f"{name}.txt", answer)


def test_every_command_has_help_and_the_options_that_it_had() -> None:
    assert_snapshot(TRANSCRIPTS / "commands.txt", "\n".join(commands(build_app())) + "\n")


def commands(app: App, path: str = "tinkermq") -> Iterator[str]:
    """Yield a line for each command."""
    for name in app:
        if name.startswith("-"):
            continue
        command = app[name]
        assert command.help, name
        yield from commands(command, f"{path} {name}")
        if command.default_command:
            arguments = command.assemble_argument_collection()
            options = [option for argument in arguments for option in argument.names]
            wanted = [option for option in options if not option.startswith(("--no-", "--empty-"))]
            yield " ".join([path, name, *(option for option in wanted if option != "*")])
