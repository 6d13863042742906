"""Harbor tasks in images: how podman or docker is asked for them, and what is seen in them."""

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from tinkermq.envs.agents.agent_check import check_tasks
from tinkermq.envs.agents.programs.task_environments import (
    EnvironmentPlanner,
    digest_of,
    find_engine,
)
from tinkermq.envs.task_folders import TaskRefused
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.local.folder import Folder

from tests.envs.agents.programs.conftest import hosting
from tests.envs.agents.programs.test_harbor import record
from tests.support.fake_engine import FakeEngine, image_files
from tests.support.harbor_tasks import Task, passes_if, read

ASK = r"""
exec 3<>/dev/tcp/127.0.0.1/48470
body='{"model": "policy", "messages": []}'
printf 'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n' \
  "$OPENAI_API_KEY" >&3
printf 'Content-Length: %s\r\n\r\n%s' ${#body} "$body" >&3
cat <&3 >/dev/null
"""
"""A call of the model by bash alone."""
FIXED = Task(
    "Go.",
    passes_if('[ "$(cat /app/of-the-image)$(cat answer)" = imageyes ]'),
    "",
    "FROM somewhere/else:1\nRUN apt-get install -y everything\nWORKDIR /app\n",
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A podman whose images have a shell and little else."""
    config = {"Env": ["PATH=/usr/bin", "OF_IMAGE=yes"], "WorkingDir": "/app"}
    root = image_files(tmp_path / "root")
    fake = FakeEngine(tmp_path / "engine", root, config)
    for name in ("bwrap", "tar", "chmod", "rm"):
        (fake.folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(fake.folder))
    return fake


async def test_an_image_is_built_once_and_program_and_tests_run_in_its_files(
    engine: FakeEngine, tmp_path: Path
) -> None:
    folder = FIXED.write(tmp_path / "tasks" / "a-task")
    script = f"""{ASK}
cat /app/of-the-image /etc/of-the-image; echo $OF_IMAGE $PWD $HOME; echo yes > answer
for one in /x /etc/x /usr/bin/bash /bin/x; do
  ( : >> $one ) 2>/dev/null && echo "writes $one"; done
for one in /tests {Path.home()}/.pyenv /usr/bin/python3 {folder}; do
  [ -e $one ] && echo "sees $one"; done
touch /root/x && ls /root
"""
    async with hosting(has_tasks=True, command=["bash", "-c", script]) as host:
        first = await host.play("e-1", record=record(folder))
        second = await host.play("e-2", record=record(folder))
    said = first.info["output"].splitlines()
    assert said == ["image", "image", "yes /app /root", "x"]
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert second.info["output"] == first.info["output"]
    context = folder / "environment"
    tag = f"tinkermq-harbor:{digest_of(Folder(context))}"
    build = ["build", "--tag", tag, "--file", str(context / "Dockerfile"), str(context)]
    assert engine.calls("build") == [build]
    assert engine.calls("create") == [["create", "--pull=never", "--network=none", tag, "/none"]]
    assert [words[0] for words in engine.calls()].count("export") == 1
    assert not engine.calls("run")  # nothing of an image is run by the engine


async def test_an_image_that_is_named_is_pulled_unless_it_is_there(
    engine: FakeEngine, tmp_path: Path
) -> None:
    task = Task("Go.", FIXED.test, "", files={"task.toml": "[environment]\ndocker_image = 'base'"})
    there = read(task.write(tmp_path / "tasks" / "there"))
    pulled = read(
        Task(
            "Go.", "", "", files={"task.toml": "[environment]\ndocker_image = 'registry/x:1'\n"}
        ).write(tmp_path / "tasks" / "pulled")
    )
    planner = EnvironmentPlanner(AgentConfig(command=["sh"]))
    assert planner.plan(there) is None
    assert planner.image_of(there) == "base"
    assert planner.image_of(pulled) == "registry/x:1"
    assert planner.image_of(pulled) == "registry/x:1"
    assert engine.calls("pull") == [["pull", "registry/x:1"]]
    assert not engine.calls("build")


def test_an_image_that_cannot_be_had_refuses_its_task_with_the_engines_words(
    engine: FakeEngine, tmp_path: Path
) -> None:
    broken = Task("Go.", "", "", "FROM x\nRUN FAIL\n").write(tmp_path / "broken")
    absent = Task("Go.", "", "", files={"task.toml": "[environment]\ndocker_image = 'other'\n"})
    planner = EnvironmentPlanner(AgentConfig(command=["sh"]))
    with pytest.raises(TaskRefused, match=r"cannot be built: podman says: .*at STEP FAIL") as error:
        planner.image_of(read(broken))
    assert error.value.where == "environment/Dockerfile"
    with pytest.raises(TaskRefused, match="cannot be pulled: podman says: manifest of other"):
        planner.image_of(read(absent.write(tmp_path / "absent")))


def test_hosts_of_users_use_only_images_that_are_there(engine: FakeEngine, tmp_path: Path) -> None:
    planner = EnvironmentPlanner(AgentConfig(command=["sh"]), builds=False)
    with pytest.raises(TaskRefused, match="is not built here for users") as error:
        planner.image_of(read(FIXED.write(tmp_path / "a-task")))
    assert "podman build --tag tinkermq-harbor:" in error.value.hint
    assert not engine.calls("build")


async def test_an_image_without_bash_or_with_a_link_in_the_way_is_refused(
    engine: FakeEngine, tmp_path: Path
) -> None:
    root, tasks = tmp_path / "root", tmp_path / "tasks"
    (root / "logs").symlink_to("/etc")
    async with hosting(has_tasks=True, command=["sh"]) as host:
        with pytest.raises(Exception, match="link or a file at /logs"):
            await host.play("e-1", record=record(FIXED.write(tasks / "linked")))
        (root / "logs").unlink()
        (root / "usr" / "bin" / "bash").unlink()
        with pytest.raises(TaskRefused, match="bash, which runs its tests, is missing"):
            await host.play("f-1", record=record(FIXED.write(tasks / "plain")))


def test_an_engine_that_does_not_answer_is_none(tmp_path: Path, engine: FakeEngine) -> None:
    assert find_engine()[0] is not None
    (engine.folder / "podman").write_text("#!/bin/sh\necho 'no socket'; exit 1\n")
    assert find_engine() == (None, "podman does not work: no socket")
    engine.remove()
    assert find_engine() == (None, "podman and docker are not installed on this machine")


def test_the_check_says_where_tasks_run_and_which_do_not(
    tmp_path: Path, engine: FakeEngine
) -> None:
    FIXED.write(tmp_path / "tasks" / "a-needs-image")
    Task("Go.", "", "").write(tmp_path / "tasks" / "b-plain")
    tree = {"model": {"path": "m"}, "agent": {"command": ["sh"]}}
    tree["agent"]["tasks"] = f"harbor:{tmp_path / 'tasks'}"
    job = JobConfig.model_validate(tree)
    checks, _ = check_tasks(job)
    assert checks[0].detail == "2 of 2 Harbor tasks suit images of podman, by their files"
    engine.remove()
    checks, row = check_tasks(job)
    assert row == 1
    assert [check.outcome for check in checks] == ["ok", "ok", "note"]
    assert checks[0].detail == (
        "1 of 2 Harbor tasks suit the sandbox, by their files (podman and docker are not "
        "installed on this machine)"
    )
    assert "tests/test.sh" in checks[1].detail
    refused = checks[2]
    assert refused.detail == (
        "task a-needs-image cannot be run: FROM somewhere/else:1: the sandbox replaces only "
        "images of debian, ubuntu and python (environment/Dockerfile:1)"
    )
    assert "with podman or docker all tasks with an image run" in refused.hint
    only = job.model_copy(update={"env": job.env.model_copy(update={"train_data": []})})
    assert check_tasks(only) == ([], None)


def imported(program: str, root: Path, name: str) -> None:
    """Make a folder the files of an image."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run([program, "import", "-", name], stdin=tar.stdout, check=True)


@pytest.mark.full
async def test_a_real_engine_builds_the_environment_of_a_task(tmp_path: Path) -> None:
    engine, lacking = find_engine()
    if engine is None:
        pytest.skip(lacking)
    root = image_files(tmp_path / "root")
    name = "localhost/tinkermq-harbor-test:latest"
    await asyncio.to_thread(imported, engine.program, root, name)
    dockerfile = f"FROM {name}\nWORKDIR /app\nENV OF_IMAGE=yes\n"
    folder = Task("Go.", FIXED.test, "", dockerfile).write(tmp_path / "tasks" / "a-task")
    try:
        async with hosting(
            has_tasks=True, command=["bash", "-c", f"{ASK}\necho $OF_IMAGE > answer"]
        ) as host:
            assert (await host.play(record=record(folder))).reward == 1.0
    finally:
        built = f"tinkermq-harbor:{digest_of(Folder(folder / 'environment'))}"
        await asyncio.to_thread(engine.run, "rmi", "-f", name, built)
