"""`agent new`, `check` and `host`, and functions that are agents."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.clients.base import LoopThread
from tinkermq.clients.hosting.agent_environment import AgentEnvironment, AgentEpisode
from tinkermq.clients.validation import check_files_exist, resolve_paths
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.leases import EpisodeLease
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.errors import ConfigError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.command import Outcome, command, tinkermq_here
from tests.clients.conftest import Cli, new_record
from tests.envs.hosting import Client
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full


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
    assert "ok   end     ends by itself, exit code 0" in lines
    assert "ok   rows    each call continues the one before it: one row" in lines
    assert "ok   reward  has the reward 0" in lines


def test_a_program_that_fails_is_told_with_what_it_printed(cli: Cli, made: Path) -> None:
    (made / "program" / "agent.py").write_text("raise SystemExit('I cannot')")
    done = cli("agent", "check", "agent.yaml")
    assert done.code == 1
    assert "without one answered call of the model" in done.out
    assert "I cannot" in done.out
    absent = cli("agent", "check", "agent.yaml", "agent.command=[no-such-agent]")
    assert absent.code == 2
    assert "programs do not find 'no-such-agent'" in absent.err


def test_a_game_is_no_agent(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "game.yaml"
    config.write_text("env: {game: guess}\n")
    done = cli("agent", "check", str(config))
    assert done.code == 2
    assert "this run has no program: agent.command is empty" in done.err


# -- other commands --------------------------------------------------------------------------------


def test_a_dry_run_runs_the_program_once(cli: Cli, made: Path) -> None:
    done = cli("train", "agent.yaml", "--dry-run", "--json")
    told = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert done.code == 0, done.err
    assert "run once against a scripted model, 2 calls, 1 rows, done" in told["program"]["detail"]
    (made / "program" / "agent.py").write_text("raise SystemExit(1)")
    failed = cli("train", "agent.yaml", "--dry-run")
    assert failed.code == 2
    assert "the program exited with code 1 without one answered" in failed.err
    hosted = cli("train", "agent.yaml", "env.hosts=0", "--dry-run")
    assert hosted.code == 0
    assert "its programs are run by clients: not checked" in hosted.out


def test_commands_for_games_name_those_for_agents(cli: Cli, made: Path) -> None:
    for name in ("check", "play"):
        done = cli("env", name, "agent.yaml")
        assert done.code == 2
        assert "`tinkermq agent check agent.yaml`" in done.err


def test_the_interpreter_of_an_openenv_server_becomes_absolute_and_stays_a_link(made: Path) -> None:
    (made / "python").symlink_to(sys.executable)
    tree = {"env": {"game": "openenv", "kwargs": {"package": "a.b:app", "python": "python"}}}
    told = resolve_paths(tree, "nats://127.0.0.1:4222")["env"]["kwargs"]
    assert told == {"package": "a.b:app", "python": str(made / "python")}


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


# -- A function of the user's that is an agent: whatever it does ends its own episode --------------


class NoException(BaseException):
    """What `except Exception` does not catch."""


class Unsayable(Exception):
    """Raises as it is shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "GeneratorExit": GeneratorExit(),
    "NoException": NoException("mine"),
    "CancelledError": asyncio.CancelledError(),
    "BaseExceptionGroup": BaseExceptionGroup("g", [NoException("x")]),
    "StopIteration": StopIteration(),
    "Unsayable": Unsayable(),
    "ValueError": ValueError("cut \ud83d"),
}
"""What a function raises, by the name that the error has of it."""
RETURNED: dict[str, Any] = {
    "a text": "1.0",
    "not a number": math.nan,
    "infinite": -math.inf,
    "complex": 1j,
    "a list": [1.0],
    "an unknown key": {"reward": 1.0, "points": 3},
    "an object in info": {"reward": 1.0, "info": {"x": [object()]}},
    "half a character in info": {"reward": 1.0, "info": {"x": "\ud83d"}},
    "a number as a key": {"reward": 1.0, "info": {1: 2}},
    "info that is no map": {"reward": 1.0, "info": 7},
}


async def played_by(program: Any) -> EpisodeLease:
    """Let a function play an episode to its end."""
    environment = AgentEnvironment(program)
    given = EpisodeLease(ProgramEpisode("e-1", {}), [], "http://127.0.0.1:1", {})
    episode = AgentEpisode(given, asyncio.get_running_loop())
    environment.start_episode(episode, given)
    async with asyncio.timeout(PATIENCE_S):
        await given.episode.said_end.wait()
    return given


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
async def test_whatever_a_function_raises_is_a_crash_of_its_episode(
    name: str, is_async: bool
) -> None:
    def plain(task: Any, model: Any) -> float:
        raise RAISED[name]

    async def waiting(task: Any, model: Any) -> float:
        await asyncio.sleep(0)
        raise RAISED[name]

    given = await played_by(waiting if is_async else plain)
    assert name in given.error
    assert "raise RAISED[name]" in given.error
    given.error.encode()
    assert given.episode.reward is None


@pytest.mark.parametrize("name", RETURNED)
async def test_what_is_no_worth_is_a_crash_of_its_episode(name: str) -> None:
    given = await played_by(lambda task, model: RETURNED[name])
    assert "Error" in given.error
    assert given.episode.reward is None
    assert given.episode.info == {}


@pytest.mark.parametrize("reward", [1, 0.5, True])
async def test_what_is_a_worth_is_one_however_the_function_is_written(reward: Any) -> None:
    async def later() -> Any:
        return {"reward": reward, "success": True, "info": {"n": (1, 2)}}

    given = await played_by(lambda task, model: later())
    assert given.error == ""
    assert given.episode.reward == float(reward)
    assert given.episode.info == {"success": True, "n": [1, 2]}


async def test_an_episode_that_is_dropped_ends_its_function() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def program(task: Any, model: Any) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    environment = AgentEnvironment(program)
    given = EpisodeLease(ProgramEpisode("e-1", {}), [], "http://127.0.0.1:1", {})
    environment.start_episode(AgentEpisode(given, asyncio.get_running_loop()), given)
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
        for drop in given.on_drop:
            drop()
        await cancelled.wait()
        await asyncio.gather(*environment._tasks, return_exceptions=True)
    assert given.error == ""


def test_a_task_that_exits_ends_no_loop_of_other_episodes() -> None:
    loop = LoopThread("test")

    async def exits() -> None:
        raise SystemExit(4)

    async def program(task: Any, model: Any) -> float:
        await asyncio.create_task(exits())
        return 1.0

    try:
        assert "SystemExit: 4" in loop.run(played_by(program)).error
        assert loop.run(played_by(lambda task, model: 1.0)).episode.reward == 1.0
    finally:
        ended = threading.Thread(target=loop.close)
        ended.start()
        ended.join(PATIENCE_S)
        assert not ended.is_alive()


# -- `agent host`: the programs of a run on this machine, over one connection ----------------------


PROGRAM = """
import json, os, sys, urllib.request

body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as got:
    print(json.load(got)["choices"][0]["message"]["content"])
"""
REWARD = ["{python}", "-c", "print(0.75)"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program's files on the user's machine."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text(PROGRAM)
    return tmp_path


async def stored(broker: Broker, scope: JobScope, **config: Any) -> JobRecord:
    """A run as its record says it."""
    values = {"model": {"path": "m"}, "training": {"num_steps": 3}, **config}
    return await JobStore(broker).create(new_record(scope, config=values), "test")


def of_programs(**agent: Any) -> dict[str, Any]:
    """Return the configuration of a run whose programs the pool does not run."""
    told = {"command": ["{python}", "agent.py", "{prompt}"], "reward": REWARD, **agent}
    return {"agent": told, "env": {"hosts": 0}}


@contextlib.asynccontextmanager
async def started(broker: Broker, folder: Path, *words: str) -> AsyncIterator[Any]:
    """Run `agent host` as a process in a folder."""
    environment = {**os.environ, "TINKERMQ_NATS_URL": broker.url, "TINKERMQ_HOME": "/nonexistent"}
    process = await asyncio.create_subprocess_exec(
        *command(["agent", "host", *words]),
        cwd=folder,
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def hosted(broker: Broker, run: str) -> Outcome:
    """Ask to host a run that cannot be hosted."""
    words = ("agent", "host", run, "--nats-url", broker.url)
    return await asyncio.to_thread(tinkermq_here, *words)


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "--files"])
async def test_programs_run_on_the_users_machine_until_the_run_ends(
    broker: Broker, scope: JobScope, folder: Path, relative: bool
) -> None:
    files = "mine" if relative else "/of/somebody/else"
    record = await stored(broker, scope, **of_programs(files=files))
    words = [record.name] if relative else [record.name, "--files", str(folder / "mine")]
    async with (
        started(broker, folder, *words, "--places", "2") as process,
        ScriptedGenerator(broker, scope, Script()).playing("t1-1"),
    ):
        caller = Client(broker, scope, None)

        async def begun() -> Any:
            with contextlib.suppress(NotFoundError):
                return await caller.reset("t1-1", seed=3)

        opened = await eventually(begun, "the host")
        ended = await caller.step("t1-1", 0, "", host=opened.host)
        assert ended.reward == 0.75
        assert ended.info["output"] == "You said: seed 3\n"
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert f"serves agent for {record.name}" in errors.decode()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"env": {"game": "guess"}}, "plays the game 'guess' and has no program"),
        ({"agent": {"client": True}, "env": {"hosts": 0}}, "has agent.client set"),
    ],
)
async def test_what_cannot_be_hosted_is_told(
    broker: Broker, scope: JobScope, config: dict[str, Any], told: str
) -> None:
    record = await stored(broker, scope, **config)
    outcome = await hosted(broker, record.name)
    assert outcome.code == 2
    assert told in " ".join(outcome.err.split())


async def test_a_folder_of_files_that_is_not_there_is_told(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    record = await stored(broker, scope, **of_programs(files="nowhere"))
    async with started(broker, tmp_path, record.name) as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "agent.files='nowhere' is not a folder on this host" in " ".join(errors.decode().split())


async def test_a_run_that_has_ended_is_hosted_no_more(broker: Broker, scope: JobScope) -> None:
    record = new_record(scope, config={"model": {"path": "m"}, **of_programs()}, state="COMPLETED")
    await JobStore(broker).create(record, "test")
    outcome = await hosted(broker, record.name)
    assert outcome.code == 2
    assert "is COMPLETED: its episodes are no longer played" in outcome.err
