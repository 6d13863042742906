"""Folders of a job that links replace after they were opened: programs see the first ones."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.storage.access import refuse_unshown_folder
from tinkermq.envs.agents.programs.folders import FolderTooLarge, copy_folder
from tinkermq.envs.agents.programs.task_environments import digest_of
from tinkermq.envs.dataset import Record
from tinkermq.envs.sandbox.bubblewrap import CommandError, Program, start
from tinkermq.envs.sandbox.sandbox import Mount, Sandbox, system_mounts
from tinkermq.envs.sandbox.served import FOLDERS_VARIABLE
from tinkermq.envs.task_folders import TaskFolders
from tinkermq.schemas.config.agent import TaskSource
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.local.folder import Folder
from tinkermq.schemas.wire.errors import ConfigError, SandboxError

from tests.envs.agents.programs.conftest import hosting
from tests.support.harbor_tasks import Task

SECRET = "the secret of another user"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder that no program may see."""
    tmp_path.chmod(0o755)
    return made(tmp_path / "secret", SECRET)


def made(folder: Path, text: str) -> Path:
    """Write the files of any folder of a job, which programs may read."""
    folder.mkdir(parents=True)
    for name in ("value", "test.sh", "Dockerfile"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    return folder


def replace(folder: Path, target: Path) -> None:
    """Put a link in a folder's place."""
    folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.symlink_to(target)


@pytest.mark.full
async def test_programs_and_rewards_see_the_folders_that_were_there_at_the_start(
    tmp_path: Path, secret: Path
) -> None:
    folders = {name: made(tmp_path / name, f"own {name}") for name in ("files", "read", "grader")}
    code = f"""
ask()
print(open("value").read(), open({str(folders["read"] / "value")!r}).read())
"""
    async with hosting(
        code,
        files=str(folders["files"]),
        read=[str(folders["read"])],
        reward_files=str(folders["grader"]),
        reward=["sh", "-c", "cat {grader}/value >&2; cat value >&2; echo 1"],
    ) as host:
        first = await host.play("e-1")
        for folder in folders.values():
            replace(folder, secret)
        second = await host.play("e-2")
    for result in (first, second):
        assert "own files own read" in result.info["output"]
        assert SECRET not in str(result)


@pytest.mark.full
@pytest.mark.parametrize("part", ["", "a-task", "a-task/tests", "a-task/environment"])
async def test_a_task_is_read_from_the_folder_that_was_there_at_the_start(
    tmp_path: Path, secret: Path, part: str
) -> None:
    tasks = tmp_path / "tasks"
    task = Task("Go.", "cat /tests/* ; echo 1 > /logs/verifier/reward.txt", "")
    task.write(tasks / "a-task")
    rows = TaskFolders(TaskSource(str(tasks)))
    async with hosting("ask()") as host:
        replace(tasks / part if part else tasks, secret)
        if part:
            with pytest.raises(SandboxError, match="cannot be") as refused:
                await host.play("e-1", record=record_of(rows))
            told = str(refused.value)
        else:  # it is the one that was opened
            told = str(await host.play("e-1", record=record_of(rows)))
    assert SECRET not in told


def record_of(rows: TaskFolders) -> Record:
    return Record([{"role": "user", "content": "Go."}], None, task=rows.tasks[0])


async def test_what_the_owner_may_not_read_is_refused_by_the_real_path_of_what_was_opened(
    tmp_path: Path, secret: Path
) -> None:
    link = tmp_path / "mine"
    link.symlink_to(secret)
    asked: list[Path] = []

    def may_read(path: Path) -> None:
        asked.append(path)
        raise ConfigError("may not be shown")

    refused: tuple[dict[str, Any], ...] = (
        {"files": str(link)},
        {"reward_files": str(link), "reward": ["true"]},
        {"read": [str(link)]},
    )
    for settings in refused:
        with pytest.raises(ConfigError, match="may not be shown"):
            async with hosting("", may_read=may_read, **settings):
                pass
    assert asked == [secret] * 3


def test_links_in_a_copied_folder_stay_links(tmp_path: Path, secret: Path) -> None:
    source = made(tmp_path / "source", "own")
    (source / "file").symlink_to(secret / "value")
    (source / "folder").symlink_to(secret)
    (source / "up").symlink_to("../secret")
    (source / "inner").mkdir()
    os.mkfifo(source / "inner" / "pipe")
    target = tmp_path / "target"
    for path in (target, tmp_path / "other"):
        path.mkdir()
    with Folder.held(source) as held:
        replace(source, secret)
        copy_folder(held, target, 1 << 20)
        with pytest.raises(FolderTooLarge):
            copy_folder(held, tmp_path / "other", 1)
    assert (target / "value").read_text() == "own"
    assert {name: str((target / name).readlink()) for name in ("file", "folder", "up")} == {
        "file": str(secret / "value"),
        "folder": str(secret),
        "up": "../secret",
    }
    assert list((target / "inner").iterdir()) == []


def test_a_digest_of_an_environment_follows_no_link(tmp_path: Path, secret: Path) -> None:
    folder = made(tmp_path / "environment", "own")
    (folder / "link").symlink_to(secret)
    with Folder.held(folder) as held:
        before = digest_of(held)
        (secret / "value").write_text("changed")
        assert digest_of(held) == before
        (folder / "value").write_text("changed")
        assert digest_of(held) != before


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Folder]:
    tmp_path.chmod(0o755)
    with Folder.held(made(tmp_path / "own", "own")) as folder:
        yield folder


def test_nothing_runs_in_a_sandbox_that_shows_another_folder_than_was_opened(
    own: Folder, secret: Path, tmp_path: Path
) -> None:
    """As if a link had taken its place between the look of bubblewrap and its mount."""
    replaced = Mount("read", str(own.path), str(secret), fd=own.fileno())
    python = shutil.which("python3", path="/usr/bin:/bin")
    assert python is not None
    sandbox = Sandbox(
        python=(python, "-I", "-S"), mounts=(*system_mounts(), replaced), folder="/", has_proc=True
    )
    with (tmp_path / "out").open("wb") as out, pytest.raises(CommandError, match="was replaced"):
        start(sandbox, Program(["cat", f"{own.path}/value"]), stdout=out.fileno(), stderr=2)
    assert (tmp_path / "out").read_bytes() == b""


def test_a_folder_is_not_opened_through_a_link_that_came_meanwhile(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = made(tmp_path / "above" / "inner", "own")
    made(secret / "inner", SECRET)
    look = os.path.realpath

    def replaced(path: str | Path) -> str:
        real = look(path)
        if (tmp_path / "above").is_dir() and not (tmp_path / "above").is_symlink():
            replace(tmp_path / "above", secret)
        return real

    monkeypatch.setattr(os.path, "realpath", replaced)
    with pytest.raises(OSError, match="has become a link"):
        Folder.held(inner)


def test_a_host_opens_its_owners_runs_and_what_all_games_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobRecord(
        job="j",
        name="r1",
        user="ada",
        state="RUNNING",
        config={},
        created=0.0,
        run_dir=str(tmp_path / "runs/ada/r1"),
        own_folders=[str(tmp_path / "runs/team/ada"), str(tmp_path / "runs/bob")],
    )
    monkeypatch.setenv(FOLDERS_VARIABLE, str(tmp_path / "agents"))
    for shown in ("runs/ada/r1/made", "runs/team/ada/r2", "agents/coder"):
        refuse_unshown_folder(tmp_path / shown, job)
    refuse_unshown_folder(Path(sys.prefix) / "lib", job)
    for hidden in ("runs/bob/r2", "runs/bob/ada/files", "runs", "elsewhere", "agents-of-bob"):
        with pytest.raises(ConfigError, match="agent programs of user 'ada' may not be shown"):
            refuse_unshown_folder(tmp_path / hidden, job)
