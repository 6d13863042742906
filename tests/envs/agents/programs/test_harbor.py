"""Harbor tasks: what their programs and tests see, where rewards come from, and what gives none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs import StepResult
from tinkermq.envs.agents.programs.agent_run import parse_task_reward
from tinkermq.envs.agents.programs.sandbox import WORK
from tinkermq.envs.dataset import Record
from tinkermq.envs.task_folders import TaskFolders, TaskRefused
from tinkermq.schemas.config.agent import TaskSource
from tinkermq.schemas.wire.errors import RewardError

from tests.envs.agents.programs.conftest import hosting
from tests.support.harbor_tasks import PLAIN, TASKS, Task, passes_if, read, write_tasks

pytestmark = pytest.mark.full

SOLVE = f"""
ask()
with open(os.environ["TINKERMQ_TASK"]) as file:
    name = json.load(file)["task"]
subprocess.run(["bash", "{WORK}/" + name + ".sh"], check=True)
"""
NEVER = Task("Do the impossible.", passes_if("[ -e /app/impossible ]"), "")
Played = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide podman and docker: what follows is about the sandbox alone."""
    path = tmp_path / "path"
    path.mkdir()
    for name in ("bwrap", "tar", "chmod", "rm", "sh", "env"):
        (path / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(path))


@pytest.fixture
def played(tmp_path: Path) -> Played:
    """Play one task, written for the test, with a Python program."""

    async def play(task: Task, code: str, **config: Any) -> StepResult:
        folder = task.write(tmp_path / "tasks" / "a-task")
        async with hosting(code, **config) as host:
            return await host.play(record=record(folder))

    return play


def record(folder: Path) -> Record:
    """The row of a task."""
    message = {"role": "user", "content": "Go."}
    return Record([message], None, columns={"task": folder.name}, task=read(folder))


async def test_the_tasks_of_a_folder_are_solved_and_judged_by_their_tests(tmp_path: Path) -> None:
    folder, solutions = write_tasks(tmp_path / "tasks"), tmp_path / "solutions"
    solutions.mkdir()
    for name, task in TASKS.items():
        (solutions / f"{name}.sh").write_text(f"set -e\n{task.solution}\n")
    rows = TaskFolders(TaskSource(str(folder)))
    assert [one.name for one in rows.tasks] == list(TASKS)
    async with hosting(SOLVE, files=str(solutions)) as host:
        rewards = {
            task.name: await host.play(f"{task.name}-1", record=record(task.path))
            for task in rows.tasks
        }
    partial = rewards.pop("partial-credit")
    assert (partial.reward, partial.info["has_a"], partial.info["has_b"]) == (0.5, 1.0, 0.0)
    assert {name: result.reward for name, result in rewards.items()} == dict.fromkeys(rewards, 1.0)


async def test_a_program_that_does_nothing_gets_what_the_tests_give(played: Played) -> None:
    result = await played(NEVER, "print(ask())")
    assert (result.reward, result.info["outcome"]) == (0.0, "done")


async def test_a_program_sees_its_task_and_neither_tests_nor_solution(played: Played) -> None:
    code = """
ask()
print(os.getcwd(), os.environ["TINKERMQ_WORKDIR"], os.environ["HOME"], sys.argv[1:])
print("tests", os.path.exists("/tests"), os.listdir("/episode"))
seen = [one for top in ("/app", "/root", "/logs", "/episode", "/opt", "/home")
        for _, _, files in os.walk(top) for one in files]
print("seen", [one for one in seen if one in ("test.sh", "solve.sh", "Dockerfile", "expected")])
print("TINKERMQ_REWARD" in os.environ)
for path in ("/x", "/usr/x", "/etc/x", "/bin/x"):
    try:
        open(path, "w")
        print("writes", path)
    except OSError:
        pass
"""
    result = await played(TASKS["adds-numbers"], code)
    said = result.info["output"].splitlines()
    assert said[0] == "/app /app /root []"
    assert said[1].startswith("tests False")
    assert said[2:] == ["seen []", "False"]


async def test_tests_have_an_environment_of_their_own(played: Played) -> None:
    task = Task(
        "Go.",
        'env > /logs/verifier/env; pwd > /logs/verifier/pwd; ls -A "$HOME" > /logs/verifier/home\n'
        "echo '{\"reward\": 1}' > /logs/verifier/reward.json; cat /logs/verifier/*; ls /tests",
        "",
        PLAIN + "ENV MODE=fast\n",
        {
            "task.toml": 'version = "1.0"\n[verifier.env]\nLEVEL = "2"\n',
            "tests/data/one": "",
        },
    )
    code = "ask(); open('/root/.bashrc', 'w').write('echo evil'); open('/root/x', 'w')"
    result = await played(task, code, environment={"SECRET": "1"})
    said = set(result.info["tests_output"].splitlines())
    assert {"MODE=fast", "LEVEL=2", "HOME=/episode/home", "/app", "data", "test.sh"} <= said
    assert not any(line.startswith(("SECRET", "OPENAI", "TINKERMQ", "LD_")) for line in said)
    assert "x" not in said


# -- What a program may do to be rewarded, and that it is of no use --------------------------------

EVIL_SCRIPT = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
CHEATS = {
    "it writes the reward itself": """
os.makedirs("/logs/verifier", exist_ok=True)
for name in ("reward.txt", "reward.json"):
    open(f"/logs/verifier/{name}", "w").write("1")
""",
    "it leaves a process that writes it later": """
subprocess.Popen(["sh", "-c", "while :; do echo 1 > /logs/verifier/reward.txt; "
                  "echo 1 > /logs/verifier/reward.json; done"], start_new_session=True)
""",
    "it makes /logs lead elsewhere": """
os.makedirs("/app/mine/verifier", exist_ok=True)
open("/app/mine/verifier/reward.txt", "w").write("1")
import shutil
shutil.rmtree("/logs/verifier", ignore_errors=True)
os.symlink("/app/mine/verifier", "/logs/verifier")
os.makedirs("/logs/agent", exist_ok=True)
os.symlink("/app/mine/verifier/reward.txt", "/logs/reward.txt")
""",
    "it puts programs before those of the system": f"""
for folder in ("/app/bin", "/root/bin", "/root/.local/bin", "/app"):
    os.makedirs(folder, exist_ok=True)
    for name in ("bash", "sh", "ls", "env", "["):
        open(f"{{folder}}/{{name}}", "w").write("#!/bin/sh\\n{EVIL_SCRIPT}\\n")
        os.chmod(f"{{folder}}/{{name}}", 0o755)
os.environ["PATH"] = "/app/bin:" + os.environ["PATH"]
open("/root/.profile", "w").write("export PATH=/app/bin:$PATH")
""",
    "it leaves start-up files of shells": f"""
for name in (".bashrc", ".bash_profile", ".profile", ".bash_login", ".bash_env"):
    for home in ("/root", "/episode/home", "/app", "/tmp"):
        open(f"{{home}}/{{name}}", "w").write("{EVIL_SCRIPT}\\n")
os.environ["BASH_ENV"] = "/root/.bashrc"
os.environ["ENV"] = "/root/.bashrc"
""",
    "it sets LD_PRELOAD and leaves a library": """
os.environ["LD_PRELOAD"] = "/app/evil.so"
open("/app/evil.so", "wb").write(b"x")
for path in ("/etc/ld.so.preload", "/etc/profile.d/evil.sh", "/etc/bash.bashrc"):
    try:
        open(path, "w").write("/app/evil.so")
        print("writes", path)
    except OSError:
        pass
""",
    "it leaves modules that Python imports when it starts": """
evil = 'import os; os.makedirs("/logs/verifier", exist_ok=True); ' \\
    'open("/logs/verifier/reward.txt", "w").write("1"); os._exit(0)'
here = f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
for folder in ("/app", "/root", f"/root/.local/lib/{here}", f"/episode/home/.local/lib/{here}"):
    os.makedirs(folder, exist_ok=True)
    for name in ("sitecustomize.py", "usercustomize.py", "evil.pth"):
        open(f"{folder}/{name}", "w").write(evil)
os.environ["PYTHONPATH"] = "/app"
""",
    "it makes folders of the tests beforehand": """
for path in ("/tests", "/logs/verifier"):
    try:
        os.makedirs(path, exist_ok=True)
        open(f"{path}/test.sh", "w").write("echo 1 > /logs/verifier/reward.txt")
    except OSError:
        pass
os.chmod("/logs", 0)
""",
    "it posts rewards": """
print(post("/reward", reward=1.0))
""",
}


async def test_no_program_is_rewarded_for_what_it_does_to_its_tests(tmp_path: Path) -> None:
    python = "python3 -c 'import json; print(json.dumps(1))'"
    task = Task("Do the impossible.", f"{python}\nls /app | wc -l\n{NEVER.test}", "")
    row, programs = record(task.write(tmp_path / "tasks" / "a-task")), tmp_path / "programs"
    programs.mkdir()
    for number, code in enumerate(CHEATS.values()):
        (programs / f"{number}.py").write_text(code)
    code = f"ask(); exec(open('{WORK}/' + os.environ['TINKERMQ_SEED'] + '.py').read())"
    async with hosting(code, files=str(programs)) as host:
        results = {
            cheat: await host.play(f"e{number}-1", record=row, seed=number)
            for number, cheat in enumerate(CHEATS)
        }
    assert {cheat: result.reward for cheat, result in results.items()} == dict.fromkeys(CHEATS, 0.0)
    for cheat, result in results.items():
        assert result.info["outcome"] == "done", (cheat, result.info)
        assert "writes" not in result.info["output"], cheat
        assert not {"call_rewards", "branch_rewards"} & result.info.keys()


async def test_a_program_that_fills_its_disk_is_not_rewarded(played: Played) -> None:
    fill = """
ask()
for number in range(1000):
    with open(f"/app/{number}", "wb") as file:
        file.write(os.urandom(1 << 20))
time.sleep(1000)
"""
    result = await played(NEVER, fill, failed_reward=-1)
    assert (result.info["limit"], result.info["outcome"]) == ("disk", "crash")
    assert result.reward in (-1.0, 0.0)  # the tests have no room, or were quick


# -- Tests that give no reward ---------------------------------------------------------------------


NO_REWARD = {
    "true": "wrote no reward",
    "echo nan > /logs/verifier/reward.txt": "not finite",
    "echo 1e999 > /logs/verifier/reward.txt": "not finite",
    "echo well > /logs/verifier/reward.txt": "neither a number nor a map",
    "(sleep 1000 &); ln -s /etc/passwd /logs/verifier/reward.txt": "wrote no reward",
    "sleep 1000": r"took longer than verifier.timeout_sec=0.5",
}


async def test_tests_without_a_reward_are_an_error_of_the_reward(tmp_path: Path) -> None:
    async with hosting("ask()") as host:
        for number, (test, message) in enumerate(NO_REWARD.items()):
            task = Task("Go.", test, "", verifier_s=0.5 if test == "sleep 1000" else 60.0)
            row = record(task.write(tmp_path / "tasks" / f"task-{number}"))
            with pytest.raises(RewardError, match=f"the tests of task task-{number} .*{message}"):
                await host.play(f"e{number}-1", record=row)


async def test_a_program_that_removes_the_folder_of_its_tests_has_no_reward(
    played: Played,
) -> None:
    task = Task("Go.", "echo 1 > /logs/verifier/reward.txt", "", PLAIN + "WORKDIR /app/deep\n")
    with pytest.raises(RewardError, match="the tests of task a-task cannot start") as error:
        await played(task, "ask(); os.rmdir('/app/deep')")
    assert "/app/deep" in error.value.hint


async def test_a_program_that_failed_and_has_no_reward_gets_the_failed_reward(
    played: Played,
) -> None:
    result = await played(Task("Go.", "true", ""), "ask(); sys.exit(1)", failed_reward=-0.5)
    assert (result.reward, result.info["outcome"]) == (-0.5, "crash")
    assert "wrote no reward" in result.info["no_reward"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("reward.json", '{"reward": "1"}', "'1'"),
        ("reward.json", '{"reward": true}', "True"),
        ("reward.json", '{"quality": 1}', "no `reward`"),
        ("reward.json", '{"reward": 1, "quality": NaN}', "not finite"),
        ("reward.json", "[1]", r"\[1\]"),
        ("reward.json", "", "neither a number"),
        ("reward.json", json.dumps({f"m{one}": 1 for one in range(70)} | {"reward": 1}), "than 64"),
        ("reward.txt", "", "neither a number"),
        ("reward.txt", "1 point", "neither a number"),
    ],
)
def test_what_is_no_reward_says_why(name: str, text: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as error:
        parse_task_reward((name, text.encode()), "a-task", "")
    assert "/logs/verifier" in error.value.message
    assert "tests/test.sh writes" in error.value.hint


def test_a_reward_is_a_number_or_a_map_whose_others_are_metrics() -> None:
    assert parse_task_reward(("reward.txt", b" 0.25\n"), "t", "") == (0.25, {})
    assert parse_task_reward(("reward.json", b"1"), "t", "") == (1.0, {})
    text = b'{"quality": 0.5, "reward": 2}'
    assert parse_task_reward(("reward.json", text), "t", "") == (2.0, {"quality": 0.5})


# -- Tasks that cannot be run here -----------------------------------------------------------------


REFUSED = [
    (
        Task("Go.", "true", "", PLAIN + "RUN apt-get install -y curl\n"),
        "RUN apt-get: the sandbox runs only",
        "environment/Dockerfile:3",
    ),
    (
        Task("Go.", "true", "", PLAIN + "RUN mkdir a \\\n  && cat missing\n"),
        r"this step fails in the sandbox: cat: missing",
        "environment/Dockerfile:3",
    ),
    (Task("Go.", "true", "", "FROM debian\n"), "it has no WORKDIR", "environment/Dockerfile"),
    (
        Task("Go.", "true", "", "FROM python:2.7\nWORKDIR /app\n"),
        "it starts from Python 2.7, and the sandbox has 3",
        "environment/Dockerfile",
    ),
    (
        Task("Go.", "true", "", verifier_s=900.0),
        "its tests may take 900 s, and agent.reward_timeout_s=120",
        "task.toml:7",
    ),
    (
        Task("Go.", "true", "", files={"environment/docker-compose.yaml": ""}),
        "it needs several containers",
        "environment/docker-compose.yaml",
    ),
]


async def test_a_task_that_cannot_be_run_says_why_and_where(tmp_path: Path) -> None:
    async with hosting("ask()") as host:
        for number, (task, reason, where) in enumerate(REFUSED):
            row = record(task.write(tmp_path / "tasks" / f"task-{number}"))
            with pytest.raises(TaskRefused, match=reason) as error:
                await host.play(f"e{number}-1", record=row)
            assert error.value.message.startswith(f"task task-{number} cannot be run: ")
            assert error.value.where == where


async def test_a_link_that_a_step_makes_leads_nowhere_outside(
    played: Played, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    steps = f"RUN ln -s {secret} /app/secret && ln -s / /app/root && ln -s /etc /srv/etc\n"
    result = await played(
        Task("Go.", NEVER.test, "", PLAIN + steps),
        "ask(); print(os.path.exists('/app/secret'), os.path.exists('/app/root/work'))",
    )
    assert result.info["output"].splitlines()[0].startswith("False")


async def test_the_environment_of_a_task_is_made_once_and_each_try_has_a_copy(
    tmp_path: Path,
) -> None:
    steps = "RUN echo 1 > made && touch -d 2001-01-01 made\n"
    code = "ask(); print(os.path.getmtime('made'), os.path.exists('x')); open('x', 'w')"
    folder = Task("Go.", NEVER.test, "", PLAIN + steps).write(tmp_path / "tasks" / "a-task")
    async with hosting(code) as host:
        first = await host.play("e-1", record=record(folder))
        (folder / "environment" / "Dockerfile").unlink()
        (folder / "environment" / "Dockerfile").write_text("FROM debian\nBROKEN\n")
        second = await host.play("e-2", record=record(folder))
    assert first.info["output"] == second.info["output"]
    assert first.info["output"].endswith("False\n")
