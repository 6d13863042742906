"""What every command keeps to: exit codes, errors, quiet pipes, a fast start."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.clients.cli.app import build_app
from tinkermq.clients.cli.dry_run import check_model, needed_slots
from tinkermq.schemas.config.load_config import all_keys, parse_config
from tinkermq.schemas.wire.errors import ConfigError, ModelError

from tests.clients.command import command, tinkermq
from tests.clients.conftest import Cli

CONFIG = "model:\n  path: some/model\nenv:\n  game: bandit\n"
COMMANDS = [
    "up",
    "down",
    "doctor",
    "version",
    "train",
    "sft",
    "ps",
    "watch",
    "stop",
    "resume",
    "fork",
    "scale",
    "serve",
    "infer",
    "logs",
    "rollouts",
    "eval",
    "replay",
    "decode",
    "config",
    "env",
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(CONFIG)
    return file


def test_every_command_is_there_and_has_help() -> None:
    app = build_app()
    for name in COMMANDS:
        assert app[name].help


def test_version_starts_within_a_third_of_a_second() -> None:
    assert json.loads(tinkermq("--version", "--json").out)["tinkermq"]
    # Processor time, so that busy neighbours do not count; a bare interpreter takes 0.03 s.
    bare = min(_processor_s(["-c", "pass"]) for _ in range(3))
    took = min(_processor_s(command(["version"])[1:]) for _ in range(3))
    assert took < max(0.3, 10 * bare)


def test_version_imports_neither_broker_nor_schemas() -> None:
    code = "import sys; from tinkermq.clients.cli import main; main(['version'])"
    shown = "print([m for m in ('nats', 'rich', 'pydantic', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def _processor_s(words: list[str]) -> float:
    """Return the processor time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_a_wrong_command_ends_with_2_and_names_the_closest(cli: Cli) -> None:
    outcome = cli("trian", "x.yaml")
    assert outcome.code == 2
    assert "train" in outcome.err + outcome.out


def test_a_wrong_option_ends_with_2(cli: Cli) -> None:
    assert cli("version", "--jsno").code == 2


def test_an_error_is_printed_with_its_remedy_and_no_traceback(cli: Cli) -> None:
    outcome = cli("ps")
    assert outcome.code in (1, 2)
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert "error:" in outcome.err


def test_debug_lets_the_error_through_with_its_traceback(cli: Cli) -> None:
    with pytest.raises(ConfigError):
        cli("config", "show", "/no/such.yaml", "--debug")


def test_without_a_stack_a_command_says_how_to_start_one(cli: Cli, config: Path) -> None:
    for words in (["ps"], ["train", str(config)], ["watch", "some-run"]):
        outcome = cli(*words)
        assert outcome.code == 1
        assert "no stack is up" in outcome.err
        assert "`tinkermq up`" in outcome.err


def test_an_unreachable_broker_is_named(cli: Cli) -> None:
    outcome = cli("ps", "--nats-url", "nats://127.0.0.1:1")
    assert outcome.code == 1
    assert "nats://127.0.0.1:1" in outcome.err


def test_piped_output_has_no_colour_and_no_frames(cli: Cli, config: Path) -> None:
    for words in (["env", "list"], ["config", "schema"], ["config", "show", str(config)]):
        outcome = cli(*words)
        assert outcome.code == 0
        assert "\x1b" not in outcome.out
        assert "│" not in outcome.out


def test_a_former_name_of_a_key_is_one_line_of_warning(config: Path) -> None:
    outcome = tinkermq("config", "show", str(config), "limits.max_losses=2", "--json")
    assert json.loads(outcome.out)["limits"]["max_node_failures"] == 2
    assert outcome.err == (
        "warning: renamed configuration keys: limits.max_losses is now limits.max_node_failures\n"
    )


def test_config_show_prints_the_effective_configuration(cli: Cli, config: Path) -> None:
    outcome = cli("config", "show", str(config), "learner.lr=1e-4", "--json")
    shown = json.loads(outcome.out)
    assert shown["learner"]["lr"] == 1e-4
    assert shown["rollout"]["group_size"] == 8


def test_an_unknown_key_ends_with_2_and_names_the_closest(cli: Cli, config: Path) -> None:
    outcome = cli("config", "show", str(config), "learner.lrr=1")
    assert outcome.code == 2
    assert "did you mean learner.lr?" in outcome.err


def test_config_schema_lists_every_key(cli: Cli) -> None:
    out = cli("config", "schema").out
    assert all(f"{key}: " in out for key in all_keys())
    assert json.loads(cli("config", "schema", "--json").out)["properties"]["learner"]


def test_env_list_names_the_games(cli: Cli) -> None:
    games = json.loads(cli("env", "list", "--json").out)
    assert {"addition", "bandit", "calculator", "guess"} <= {game["name"] for game in games}


def test_env_check_proves_a_game_and_makes_its_data_if_none_is_given(cli: Cli) -> None:
    for game in ("bandit", "addition"):
        outcome = cli("env", "check", game, "--json")
        assert outcome.code == 0, outcome.out
        checks = json.loads(outcome.out)["checks"]
        assert "gold answers score full marks" in {check["name"] for check in checks}


def test_env_check_of_an_unknown_game_fails_and_names_the_closest(cli: Cli) -> None:
    outcome = cli("env", "check", "bandti")
    assert outcome.code == 1
    assert "did you mean bandit?" in outcome.out


def test_a_dry_run_names_what_is_wrong_and_submits_nothing(cli: Cli, config: Path) -> None:
    outcome = cli("train", str(config), "model.path=/no/model", "--dry-run")
    assert outcome.code == 2
    assert "there is no model folder '/no/model'" in outcome.err
    assert "ok   game" in outcome.out


def test_a_dry_run_of_a_sound_configuration_ends_with_0(cli: Cli, config: Path) -> None:
    outcome = cli("train", str(config), "--dry-run", "--json")
    assert outcome.code == 0, outcome.err
    told = json.loads(outcome.out)
    assert all(check["ok"] for check in told["checks"])
    assert told["config"]["env"]["game"] == "bandit"


def test_a_dry_run_reads_every_conversation(cli: Cli, tmp_path: Path) -> None:
    chats, file = tmp_path / "chats.jsonl", tmp_path / "sft.yaml"
    asked = {"role": "user", "content": "2+2"}
    rows = [[asked, {"role": "assistant", "content": "4"}], [asked]]
    chats.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows[:1]))
    file.write_text(f"model:\n  path: some/model\nsft:\n  data: [{chats}]\n")
    sound = cli("sft", str(file), "--from", "other-run@40", "--dry-run", "--json")
    assert sound.code == 0, sound.err
    told = json.loads(sound.out)
    assert {check["check"] for check in told["checks"]} == {"model", "data", "slots"}
    assert told["config"]["model"]["path"] == "other-run@40"
    chats.write_text("".join(f"{json.dumps({'messages': row})}\n" for row in rows))
    silent = cli("sft", str(file), "--dry-run")
    assert silent.code == 2
    assert "the assistant says nothing in row 1 of" in silent.err


def test_an_sft_job_needs_conversations(cli: Cli, config: Path) -> None:
    outcome = cli("sft", str(config))
    assert outcome.code == 2
    assert "names no conversations to learn from" in outcome.err


def test_a_dry_run_leaves_the_folders_of_a_pool_elsewhere_to_the_pool() -> None:
    given = {"model": {"path": "/pool/models/small"}, "env": {"game": "bandit"}}
    told = check_model(parse_config(given), "tls://pool.example.org:4222")
    assert "the pool's own" in told
    with pytest.raises(ModelError, match="there is no model folder"):
        check_model(parse_config(given), "nats://127.0.0.1:4222")


def test_a_dry_run_counts_what_each_actor_holds() -> None:
    given = {"learner": {"slots": 2}, "generator": {"slots": 4, "count": 3}}
    given |= {"model": {"path": "some/model"}, "env": {"game": "bandit"}}
    assert needed_slots(parse_config(given)) == 14


def test_a_pipe_that_closes_early_is_no_error() -> None:
    code = "import sys; from tinkermq.clients.cli import main; sys.exit(main())"
    shell = f"'{sys.executable}' -c '{code}' config schema | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("place", "ok", "words"),
    [
        ("{tmp}", True, "takes files and sockets"),
        ("{tmp}/{long}/{long}", True, "takes files and sockets"),
        ("{tmp}/nowhere", False, "TMPDIR={tmp}/nowhere cannot be written"),
    ],
)
def test_doctor_says_whether_the_temporary_folder_serves(
    tmp_path: Path, place: str, ok: bool, words: str
) -> None:
    (tmp_path / ("x" * 100) / ("x" * 100)).mkdir(parents=True)
    folder = place.format(tmp=tmp_path, long="x" * 100)
    told = tinkermq("doctor", "--json", env={"TMPDIR": folder})
    found = next(one for one in json.loads(told.out) if one["name"] == "temporary folder")
    assert found["ok"] is ok
    assert words.format(tmp=tmp_path) in found["detail"]
    assert bool(found["hint"]) is not ok
