"""What every command keeps to: exit codes, errors, quiet pipes, help, imports, payloads."""

import asyncio
import json
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tinkermq.broker.calls import SchedulerCalls
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.clients.base import parse_broker_url, parse_server_url
from tinkermq.clients.cli.app import EXAMPLES, build_app
from tinkermq.clients.cli.decode import render
from tinkermq.clients.cli.dry_run import check_model_files, needed_slots
from tinkermq.clients.cli.live import render as render_live
from tinkermq.clients.cli.new_package import write_package
from tinkermq.clients.cli.output import (
    harmless,
    literal,
    print_commands,
    print_note,
    print_plain,
    print_table,
    print_text,
    stdout,
)
from tinkermq.clients.follow import RunProgress
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import all_keys, parse_config
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Event, Metric
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import ConfigError, MessageError, ModelError, TinkermqError

from tests.clients.command import command, tinkermq
from tests.clients.conftest import Cli
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

CONFIG = "model:\n  path: some/model\nenv:\n  game: bandit\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(CONFIG)
    return file


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


def test_what_the_system_refuses_is_named_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    outcome = tinkermq("up", env={"TINKERMQ_HOME": str(file / "home")})
    assert outcome.code == 1
    assert outcome.err.startswith(f"error: {file}/home")
    assert "Traceback" not in outcome.err


def test_a_full_disk_below_the_output_is_named_without_a_traceback() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(["config", "schema"]), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_has_gone_is_no_failure() -> None:
    code = (
        "from tinkermq.clients.cli.main import guarded; "
        "from tinkermq.clients.cli.output import print_text; "
        "raise SystemExit(guarded(lambda: [print_text('x' * 99) for _ in range(9999)] and 0, "
        "debug=False))"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_output_shows_what_its_encoding_lacks_as_an_escape() -> None:
    outcome = tinkermq("config", "schema", env={"PYTHONIOENCODING": "ascii"})
    assert outcome.code == 0
    assert "\\u2264" in outcome.out


@pytest.fixture
def new_console() -> Iterator[None]:
    """The console knows whether it is a terminal from when it was made."""
    stdout.cache_clear()
    yield
    stdout.cache_clear()


@pytest.mark.usefixtures("new_console")
def test_what_a_model_or_a_user_wrote_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b]52;c;cm0gLXJm\x07b\x9b2J\x1b[2J\x1b[31mred\x1b[0m\tc\x08"
    shown = "a\\x1b]52;c;cm0gLXJm\\x07b\\x9b2J\\x1b[2J\x1b[31mred\x1b[0m\tc\\x08"
    assert harmless(hostile) == shown
    print_plain(hostile)
    print_note(hostile)
    print_table(["text"], [[hostile]])
    piped = capsys.readouterr()
    assert piped.out == f"{hostile}\ntext\n{hostile}\n"
    assert "\x1b]" not in piped.err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_plain(hostile)
    print_table(["text"], [[hostile]])
    record = JobRecord(
        job="j", name="n", user="u", state="FAILED", reason=hostile, config={}, created=0.0
    )
    event = Event(kind="log", source="learner", message=hostile, time=0.0)
    Console().print(render_live(RunProgress(record), [event]))
    print_text(literal(hostile))
    on_terminal = capsys.readouterr().out
    assert on_terminal.count("\\x1b]52;") == 5
    assert not {"\x07", "\x08", "\x9b"} & set(on_terminal)
    assert "\x1b]" not in on_terminal


def test_notes_and_next_commands_keep_their_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    print_note("pip install 'tinkermq[gateway]'")
    print_commands({"pip install '.[test]'": "its [own] tests"})
    printed = capsys.readouterr()
    assert "pip install 'tinkermq[gateway]'" in printed.err
    assert "pip install '.[test]'   its [own] tests" in printed.out


def test_debug_lets_the_error_through_with_its_traceback(cli: Cli) -> None:
    with pytest.raises(ConfigError):
        cli("config", "show", "/no/such.yaml", "--debug")


def test_piped_output_has_no_colour_and_no_frames(cli: Cli, config: Path) -> None:
    for words in (["env", "list"], ["config", "schema"], ["config", "show", str(config)]):
        outcome = cli(*words)
        assert outcome.code == 0
        assert "\x1b" not in outcome.out
        assert "│" not in outcome.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train a.yaml --num-steps 3", "the configuration key: training.num_steps=VALUE"),
        ("resume my-run --num_steps=80", "the configuration key: training.num_steps=80"),
        ("train a.yaml --frm run", "Unknown option: --frm. Did you mean --from?"),
        ("ps --num-steps 3", "Unknown option: --num-steps."),
        ("delete my-run", "there is no terminal to ask on repeat it with --yes"),
    ],
)
def test_a_wrong_line_is_answered_with_the_right_one(line: str, said: str, cli: Cli) -> None:
    done = cli(*line.split())
    assert done.code == 2
    assert said in " ".join(done.err.replace("│", " ").split())


def test_help_shows_the_ten_first_commands_before_the_others(cli: Cli) -> None:
    words = [line.split() for line in cli("--help").out.splitlines() if line.startswith(("│", "╭"))]
    first = [word[1] for word in words[1:11]]
    assert words[0][1:3] == ["Start", "here"]
    assert " ".join(first) == "quickstart up train ps watch rollouts eval serve env down"
    assert words[11][1] == "Stack"


def test_clients_show_what_they_are() -> None:
    lines = (
        "import tinkermq.clients as c",
        "print(dir(c) == sorted(c.__all__))",
        "print(c.SchedulerClient('nats://u:secret@h:1'), c.Run('r', 'nats://h:1'))",
        "print(repr(c.InferenceReport()), c.GameEnvironment.__repr__ is not object.__repr__)",
    )
    shown = "True SchedulerClient('nats://h:1') Run('r') InferenceReport(0 episodes) True"
    assert " ".join(run("; ".join(lines)).split()) == shown


def test_config_schema_lists_every_key(cli: Cli) -> None:
    out = cli("config", "schema").out
    assert all(f"{key}: " in out for key in all_keys())
    assert json.loads(cli("config", "schema", "--json").out)["properties"]["learner"]


def test_env_check_proves_a_game_and_makes_its_data_if_none_is_given(cli: Cli) -> None:
    for game in ("bandit", "addition"):
        outcome = cli("env", "check", game, "--json")
        assert outcome.code == 0, outcome.out
        checks = json.loads(outcome.out)["checks"]
        assert "gold answers score full marks" in {check["name"] for check in checks}


def test_a_dry_run_leaves_the_folders_of_a_pool_elsewhere_to_the_pool() -> None:
    given = {"model": {"path": "/pool/models/small"}, "env": {"game": "bandit"}}
    told = check_model_files(parse_config(given), "tls://pool.example.org:4222")
    assert "the pool's own" in told
    with pytest.raises(ModelError, match="there is no model folder"):
        check_model_files(parse_config(given), "nats://127.0.0.1:4222")
    given["model"]["path"] = "outputs/models/nowhere"
    with pytest.raises(ModelError, match=r"actors\.warm_start nowhere outputs"):
        check_model_files(parse_config(given), "nats://127.0.0.1:4222")


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
    found = next(one for one in json.loads(told.out)["checks"] if one["name"] == "temporary folder")
    assert found["ok"] is ok
    assert words.format(tmp=tmp_path) in found["detail"]
    assert bool(found["hint"]) is not ok


@pytest.mark.parametrize(
    ("command", "option"), [("scheduler", "--keep-ended"), ("learner", "--job")]
)
def test_the_help_of_an_actor_names_its_own_options(command: str, option: str) -> None:
    told = tinkermq(command, "--help")
    assert told.code == 0
    assert option in told.out


# The examples with which `--help` ends can be typed as they are; those without a pool are run.


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


# -- A client is light: no torch, no parquet reader, little memory ---------------------------------


HEAVY = ("torch", "transformers", "vllm", "pyarrow", "matplotlib", "wandb", "tensorboard")
MODULES = (
    "tinkermq.clients",
    "tinkermq.clients.scheduler_client",
    "tinkermq.clients.service_client",
    "tinkermq.clients.hosting.environments",
    "tinkermq.clients.hosting.publish",
    "tinkermq.clients.cli",
    "tinkermq.clients.cli.train",
    "tinkermq.clients.cli.supervisor",
    "tinkermq.envs.host",
    "tinkermq.schemas.local.tracking",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_clients_import_nothing_heavy_and_need_less_than_100_megabytes() -> None:
    code = f"""
import importlib, pathlib, sys
for module in {MODULES}:
    importlib.import_module(module)
print([name for name in {HEAVY} if name in sys.modules])
status = pathlib.Path('/proc/self/status').read_text()
print(status.partition('VmHWM:')[2].split()[0])
"""
    heavy, kilobytes = run(code).splitlines()
    assert heavy == "[]"
    assert int(kilobytes) < 100 * 1024


def test_importing_the_package_alone_brings_no_broker_client() -> None:
    code = "import sys, tinkermq.clients.cli; print('nats' in sys.modules, 'rich' in sys.modules)"
    assert run(code).split() == ["False", "False"]


def test_every_exported_name_is_there() -> None:
    code = "import tinkermq.clients as c; print([getattr(c, n).__name__ for n in c.__all__])"
    assert "SchedulerClient" in run(code)


PS_NEEDS_NOT = (
    "aiohttp.client",  # nats-py's, for WebSockets
    "numpy",
    "pyarrow",
    "yaml",
    "tinkermq.schemas.config.job",
    "tinkermq.schemas.control",
    "tinkermq.schemas.tinker.operation",
)


async def test_ps_imports_only_what_it_uses(broker: Broker) -> None:
    code = f"""
import sys
from tinkermq.clients.cli import main
assert main(["ps", "--all", "--json", "--nats-url", {broker.url!r}]) == 0
print([name for name in {PS_NEEDS_NOT} if name in sys.modules])
"""
    assert (await asyncio.to_thread(run, code)).splitlines()[-1] == "[]"


def test_a_lazy_module_is_loaded_at_its_first_use_and_others_at_once(tmp_path: Path) -> None:
    for name in ("late", "prompt"):
        (tmp_path / f"{name}.py").write_text(f"print('{name}')\nvalue = 1\n")
    code = f"""
import gc, sys
from tinkermq.clients.cli.main import importing
sys.path.insert(0, {str(tmp_path)!r})
before = list(sys.meta_path)
with importing(frozenset({{"late", "not_there"}})):
    import late, prompt
    try:
        import not_there
    except ModuleNotFoundError:
        print("none")
    print(gc.isenabled())
print(late.value, gc.isenabled(), sys.meta_path == before)
"""
    assert run(code).splitlines() == ["prompt", "none", "False", "late", "1 True True"]


def test_a_command_imports_structlog_without_rich_and_has_rich_for_itself() -> None:
    code = """
import sys
from tinkermq.clients.cli.main import importing
with importing():
    import structlog
    print(structlog.dev.rich, "rich" in sys.modules)
    from rich.table import Table
print(Table.__name__, structlog.get_logger().warning("told"))
"""
    first, told, last = run(code).splitlines()
    assert first == "None False"
    assert "told" in told
    assert last == "Table None"


# -- `tinkermq decode` prints any payload that can be met on the broker ----------------------------


def test_a_message_is_shown_key_by_key() -> None:
    task = Task(task=3, sample=17, seed=5, group_size=8)
    lines = render(task.to_bytes()).splitlines()
    assert "v: 1" in lines
    assert "task: 3" in lines
    assert "sample: 17" in lines
    assert "greedy_baseline: false" in lines


def test_arrays_are_shown_by_dtype_shape_and_first_values() -> None:
    payload = pack(
        {"token_ids": np.arange(100, dtype=np.int32), "x": np.array([0.5, 1.25], np.float32)}
    )
    assert render(payload).splitlines() == [
        "token_ids: int32[100] 0 1 2 3 4 5 6 7 …",
        "x: float32[2] 0.5 1.25",
    ]


def test_lists_and_maps_nest_and_long_lists_are_cut() -> None:
    text = render(pack({"a": [{"b": 1}], "many": list(range(30)), "none": None, "e": {}}))
    assert text.splitlines()[:3] == ["a:", "  -", "    b: 1"]
    assert "  … 10 more of 30" in text
    assert "none: null" in text
    assert "e: {}" in text


def test_full_shows_everything() -> None:
    payload = pack({"ids": np.arange(20, dtype=np.int64), "many": list(range(30))})
    text = render(payload, full=True)
    assert "…" not in text
    assert "19" in text


def test_json_keeps_arrays_with_dtype_and_shape() -> None:
    payload = pack({"ids": np.array([[1, 2]], dtype=np.int16), "raw": b"\x00\xff"})
    assert json.loads(render(payload, as_json=True)) == {
        "ids": {"dtype": "int16", "shape": [1, 2], "values": [[1, 2]]},
        "raw": {"bytes": "00ff"},
    }


def test_text_of_other_programs_is_shown_as_it_is() -> None:
    assert render(b'{"type":"io.nats.micro.v1.ping_response"}').startswith('{"type"')


def test_an_empty_payload_is_said_to_be_empty() -> None:
    assert render(b"") == "(empty payload)"


@pytest.mark.parametrize("payload", [b"\xc1", b"\x81\xa1", b"\xff\xfe\x00" * 9])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        render(payload)


def test_the_command_reads_one_payload_from_a_pipe() -> None:
    payload = Metric(step=4, values={"training_step_reward": 0.5}, time=1.0).to_bytes()
    outcome = tinkermq("decode", stdin=payload)
    assert outcome.code == 0
    assert "training_step_reward: 0.5" in outcome.out


def test_garbage_in_the_pipe_is_an_error_without_a_traceback() -> None:
    outcome = tinkermq("decode", stdin=b"\xc1\x00")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err


# -- The client needs no module that only Unix has: it is meant to run on Windows, too -------------


UNIX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop")


@pytest.mark.parametrize(
    "words", ["ps --nats-url nats://127.0.0.1:1", "config schema env", "env list", "user --help"]
)
def test_commands_of_users_run_without_what_only_unix_has(words: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({UNIX_ONLY}))\n"
        "import tinkermq.clients\n"
        "from tinkermq.clients.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stderr
    if words.startswith("ps"):
        assert "cannot connect" in done.stderr.lower() or "127.0.0.1:1" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr


# -- A URL may hold user and password: what is printed never does ----------------------------------


SECRET = "sesame"
NOBODY_THERE = f"nats://user:{SECRET}@127.0.0.1:1"


def with_password(server: NatsServer) -> str:
    return server.url.replace("//", f"//user:{SECRET}@")


def test_no_command_prints_it(cli: Cli, nats_server: NatsServer) -> None:
    there, odd = with_password(nats_server), NOBODY_THERE.replace("nats", "http")
    for words, url in ((["doctor"], there), (["ps"], NOBODY_THERE), (["watch", "run"], odd)):
        told = cli(*words, "--nats-url", url)
        assert told.code != 0
        assert SECRET not in told.out + told.err


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@127.0.0.1:4222",
        f"user:{SECRET}@127.0.0.1:4222",
        f"nats://user:{SECRET}@127.0.0.1:4222",
        f"nats://a,http://user:{SECRET}@b",
    ],
)
def test_no_refusal_of_an_address_repeats_it(url: str) -> None:
    with pytest.raises(TinkermqError) as raised:
        parse_server_url(url)
    assert SECRET not in str(raised.value)
    if not url.startswith(("nats://user", "user")):
        with pytest.raises(TinkermqError) as raised:
            parse_broker_url(url)
        assert SECRET not in str(raised.value)


async def test_who_finds_no_scheduler_does_not_tell_it(nats_server: NatsServer) -> None:
    async with await connect(with_password(nats_server), name="test") as broker:
        with pytest.raises(TinkermqError, match="no scheduler is connected") as raised:
            await SchedulerCalls(broker).nodes()
    assert SECRET not in str(raised.value)


# -- Editors find keys and values of a configuration that there are not ----------------------------


ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "broker", "envs", "actors", "clients")
GOOD = """
from tinkermq.clients import JobConfigDict

config: JobConfigDict = {
    "model": {"path": "m"},
    "env": {"game": "bandit", "on_step_timeout": "penalty"},
    "learner": {"lr": 1e-5, "betas": [0.9, 0.99]},
    "algorithm": {"correction_masks": [{"over": "token", "high": 2.0}]},
}
"""


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "", "0 errors"),
        ('"lr"', '"lrr"', '"lrr" is an undefined item'),
        ('"penalty"', '"punish"', "Literal['punish']"),
    ],
)
def test_a_type_checker_knows_the_keys(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "tinkermq").mkdir()
    for room in ROOMS:  # pyright does not follow what an editable installation does
        (tmp_path / "tinkermq" / room).symlink_to(ROOT / room)
    file = tmp_path / "mine.py"
    file.write_text(GOOD.replace(old, new) if old else GOOD)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
    )
    assert told in done.stdout, done.stdout
