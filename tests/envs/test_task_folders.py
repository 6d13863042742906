"""Folders of Harbor tasks as the data of jobs: what is read, split, refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tinkermq.actors.node.checks import check_files_now
from tinkermq.actors.scheduler.jobs.states import actors_for, wanted_actor
from tinkermq.actors.storage.access import leads
from tinkermq.clients.validation import check_files_exist, resolve_paths
from tinkermq.envs.agents.programs.dockerfile import DockerfileRefused, plan_sandbox
from tinkermq.envs.data import HostData
from tinkermq.envs.task_folders import TaskFolders, TaskRefused
from tinkermq.schemas.config.agent import TaskSource
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.node import LookQuestion
from tinkermq.schemas.wire.errors import DataError

from tests.support.harbor_tasks import PLAIN, TASKS, Task, read, write_tasks

LOCAL = "nats://127.0.0.1:4222"


def job_of(tasks: str, **agent: object) -> JobConfig:
    """A job with these tasks."""
    section = {"tasks": tasks, "command": ["sh"], **agent}
    return JobConfig.model_validate({"model": {"path": "m"}, "agent": section})


# -- Rows and splits -------------------------------------------------------------------------------


def test_tasks_are_the_rows_of_a_job_with_their_instruction_as_prompt(tmp_path: Path) -> None:
    config = job_of(f"harbor:{write_tasks(tmp_path)}")
    assert config.env.train_data == [f"harbor:{tmp_path}"]
    assert config.env.game == "agent"
    data = HostData(config.env, 0, needs_answers=False)
    assert data.num_train == len(TASKS)
    record = data.record("train", 2)
    assert record is not None
    assert record.task is not None
    assert record.task.path == tmp_path / "commits-file"
    assert record.messages() == [
        {"role": "user", "content": "Commit notes.txt in the repository /app/repo.\n"}
    ]
    assert record.columns == {"task": "commits-file"}
    data.close()


def test_a_share_of_the_tasks_is_for_validation_and_the_rest_is_trained(tmp_path: Path) -> None:
    for number in range(40):
        TASKS["makes-folder"].write(tmp_path / f"task-{number}")
    config = job_of(f"harbor:{tmp_path}", val_share=0.25)
    train, val = (TaskFolders(one) for one in config.task_sources if one is not None)
    names = [{task.name for task in part.tasks} for part in (train, val)]
    assert names[0] | names[1] == {f"task-{number}" for number in range(40)}
    assert not names[0] & names[1]
    assert 4 <= len(names[1]) <= 16
    (tmp_path / "task-new").mkdir()
    TASKS["makes-folder"].write(tmp_path / "task-new")
    again = TaskFolders(TaskSource(str(tmp_path), 0.25, True))
    assert {task.name for task in again.tasks} - {"task-new"} == names[1]
    assert JobConfig.model_validate(config.model_dump(exclude_unset=True)).env == config.env


def test_train_and_validation_data_may_be_folders_of_their_own(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_tasks(tmp_path / name, ("makes-folder", "fixes-script"))
    tree = {
        "model": {"path": "m"},
        "agent": {"command": ["sh"]},
        "env": {
            "train_data": [f"harbor:{tmp_path / 'train'}"],
            "val_data": [f"harbor:{tmp_path / 'val'}"],
        },
    }
    data = HostData(JobConfig.model_validate(tree).env, 0, needs_answers=False)
    assert (data.num_train, data.num_val) == (2, 2)
    record = data.record("val", 0)
    assert record is not None
    assert record.task is not None
    assert record.task.root.path.name == "val"


def test_lines_by_which_benchmarks_find_themselves_are_no_part_of_an_instruction(
    tmp_path: Path,
) -> None:
    text = "<!-- some-bench canary GUID 123 -->\n# canary\n\nDo it.\n\n# Canary of the mine\n"
    task = read(Task(text, "true", "").write(tmp_path / "t"))
    assert task.instruction.split("\n")[0] == "Do it."
    assert "# Canary of the mine" in task.instruction


# -- Folders that are none -------------------------------------------------------------------------


def refusal(tmp_path: Path, **files: str | None) -> DataError:
    """The error of a folder with one task, some of whose files are other or missing."""
    folder = TASKS["makes-folder"].write(tmp_path / "tasks" / "a-task")
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
    with pytest.raises(DataError) as error:
        check_files_exist({"agent": {"tasks": f"harbor:{tmp_path / 'tasks'}"}}, LOCAL)
    return error.value


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"instruction.md": None}, "task a-task has no instruction.md: {folder}/instruction.md"),
        ({"instruction.md": "\n"}, "{folder}/instruction.md is empty"),
        ({"task.toml": None}, "task a-task has no task.toml"),
        ({"task.toml": "a = 1\nb = = 2"}, "{folder}/task.toml is not valid TOML: .*line 2"),
        (
            {"task.toml": '[metadata]\na = 1\n[verifier]\ntimeout_sec = "soon"\n'},
            "{folder}/task.toml:4: verifier.timeout_sec: must be a number",
        ),
        (
            {"task.toml": "[verifier]\ntimeout_sec = nan\n"},
            "{folder}/task.toml:2: verifier.timeout_sec",
        ),
        (
            {"task.toml": '\nversion = "7.0"\n'},
            "{folder}/task.toml:2: version '7.0' of the format is not known",
        ),
        (
            {"task.toml": '[environment]\ndocker_image = "--privileged"\n'},
            "{folder}/task.toml:2: environment.docker_image",
        ),
        ({"tests__test.sh": None}, "task a-task has no tests/test.sh"),
        ({"environment__Dockerfile": None}, "task a-task has no environment"),
    ],
)
def test_a_folder_that_is_no_task_is_refused_before_it_is_submitted(
    files: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    error = refusal(tmp_path, **files)
    folder = str(tmp_path / "tasks" / "a-task")
    assert error.hint
    with pytest.raises(DataError, match=message.replace("{folder}", folder)):
        TaskFolders(TaskSource(str(tmp_path / "tasks")))


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = TASKS["makes-folder"].write(tmp_path / "elsewhere")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "linked").symlink_to(elsewhere)
    with pytest.raises(DataError, match="holds no task"):
        TaskFolders(TaskSource(str(tmp_path / "tasks")))
    folder = TASKS["makes-folder"].write(tmp_path / "tasks" / "a-task")
    for name in ("tests", "instruction.md"):
        if (folder / name).is_dir():
            (folder / name).rename(tmp_path / name)
        else:
            (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / name if name == "tests" else "/etc/passwd")
        with pytest.raises(DataError, match="a-task has no"):
            TaskFolders(TaskSource(str(tmp_path / "tasks")))


def test_a_folder_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder of tasks '/nowhere'"):
        check_files_exist({"env": {"train_data": ["harbor:/nowhere"]}}, LOCAL)
    with pytest.raises(DataError, match="holds no task: 0 folders"):
        check_files_exist({"agent": {"tasks": f"harbor:{tmp_path}"}}, LOCAL)
    write_tasks(tmp_path, ("makes-folder",))
    with pytest.raises(DataError, match="holds no task: its share of 1 folders"):
        TaskFolders(TaskSource(str(tmp_path), 0.000001, True))


@pytest.mark.parametrize(
    ("settings", "reason", "where"),
    [
        ("[[steps]]\nname = 'a'\n", "it has several steps", "task.toml:1"),
        ("[environment]\ngpus = 1\n", "it asks for GPUs", "task.toml:2"),
        ("[environment]\nos = 'windows'\n", "it is for windows", "task.toml:2"),
        (
            "[verifier]\nenvironment_mode = 'separate'\n",
            "its tests run in a container of their own",
            "task.toml:2",
        ),
        (
            "[verifier.env]\nKEY = '${KEY}'\n",
            "verifier.env.KEY is taken from the host's environment",
            "task.toml:2",
        ),
    ],
)
def test_a_task_of_a_kind_that_is_not_supported_says_so(
    settings: str, reason: str, where: str, tmp_path: Path
) -> None:
    folder = Task("Go.", "true", "", files={"task.toml": settings}).write(tmp_path / "t")
    with pytest.raises(TaskRefused) as error:
        read(folder).check_supported()
    assert (error.value.reason, error.value.where) == (reason, where)


# -- Configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "env", "message"),
    [
        ({"tasks": "tasks"}, {}, "agent.tasks='tasks' is not known: give harbor:FOLDER"),
        ({"tasks": "harbor:"}, {}, "names no folder"),
        ({"tasks": "harbor:a#val=0.1"}, {}, "is not known"),
        ({"tasks": "harbor:a"}, {"train_data": ["x.jsonl"]}, "gives env.train_data=.* already"),
        ({"tasks": "harbor:a", "reward": ["sh"]}, {}, "agent.reward has no effect, since the"),
        ({"tasks": "harbor:a", "image": "b"}, {}, "agent.image=b has no effect"),
        ({"val_share": 0.1}, {}, "val_share has no effect"),
        ({}, {"train_data": ["harbor:a#every=2"]}, "does not say which tasks are meant"),
        ({}, {"train_data": ["harbor:a"], "val_data": ["b.jsonl"]}, "hold files, too"),
    ],
)
def test_a_configuration_that_contradicts_its_tasks_is_refused(
    agent: dict[str, object], env: dict[str, object], message: str
) -> None:
    tree = {"model": {"path": "m"}, "agent": {"command": ["sh"], **agent}, "env": env}
    with pytest.raises(ValidationError, match=message):
        JobConfig.model_validate(tree)


def test_tasks_without_a_program_are_refused() -> None:
    tree = {"model": {"path": "m"}, "env": {"game": "calculator", "train_data": ["harbor:a"]}}
    with pytest.raises(ValidationError, match="names tasks for programs"):
        JobConfig.model_validate(tree)


def test_a_folder_of_tasks_is_looked_at_like_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tasks(tmp_path / "tasks", ("makes-folder",))
    monkeypatch.chdir(tmp_path)
    tree = {"model": {"path": "m"}, "agent": {"command": ["sh"], "tasks": "harbor:tasks"}}
    resolved = resolve_paths(tree, LOCAL)
    assert resolved["agent"]["tasks"] == f"harbor:{folder}"
    config = JobConfig.model_validate(resolved)
    actors = actors_for(config, "train")
    (host,) = [one for one in actors if one.role == "environment"]
    about: dict[str, Any] = {"user": "u", "job": "j", "name": "j", "config": {}, "actors": actors}
    record = JobRecord(**about, state="QUEUED", created=0.0)
    assert wanted_actor(record, host, config).programs == [str(folder)]
    assert folder in {lead.path for lead in leads(config)}
    question = LookQuestion(files=[f"harbor:{folder}", f"harbor:{tmp_path}", "harbor:/nowhere"])
    [result] = check_files_now(question).results
    assert result.detail == f"there is no file harbor:{tmp_path}, harbor:/nowhere"


# -- Dockerfiles that the sandbox can follow -------------------------------------------------------


def test_a_plain_dockerfile_becomes_a_script() -> None:
    plan = plan_sandbox("""
# syntax=docker/dockerfile:1
ARG TAG=12
FROM docker.io/library/debian:${TAG}
LABEL a=b
ENV A=1 B="two words"
ENV PATH=/opt/x:$A
WORKDIR /srv
WORKDIR app
COPY --chown=me:me a.txt dir/ ./
RUN mkdir -p x/y && echo "a; b" > x/y/z ; \\
    # a comment between
    git init -q . | cat
USER root
CMD ["bash"]
""")
    assert (plan.base, plan.workdir, plan.python) == (
        "docker.io/library/debian:12",
        "/srv/app",
        None,
    )
    assert plan.variables == {"A": "1", "B": "two words", "PATH": "/opt/x:1"}
    assert "copy /srv/app/ /episode/context/a.txt /episode/context/dir/" in plan.script
    assert plan_sandbox("FROM python:3.12-slim\n").python == "3.12"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("RUN apt-get update", "RUN apt-get: the sandbox runs only"),
        ("RUN mkdir a && pip install x", "RUN pip"),
        ("RUN A=1 curl x", "RUN curl"),
        ("RUN echo $(id)", r"RUN with \$\("),
        ("RUN echo `id`", "RUN with `"),
        ("RUN sleep 1", "RUN sleep"),
        ("RUN echo 1 &", "RUN with &"),
        ("RUN cat <<EOF", "RUN with <<"),
        ("RUN git clone https://x", "RUN git clone: of git only"),
        ("RUN git -C a clone https://x", "RUN git clone: of git only"),
        ("RUN --mount=type=cache,target=/x echo", "RUN --mount"),
        ("RUN for i in 1 2; do echo $i; done", "RUN for"),
        ('RUN ["pip", "install"]', "RUN pip"),
        ("RUN echo 'a", "RUN: No closing quotation"),
        ("COPY --from=other a b", "COPY --from"),
        ("COPY ../a b", "is outside of"),
        ("COPY a /usr/local/bin/a", "the sandbox's /usr cannot be written"),
        ("COPY a /app/../etc/a", "the sandbox's /etc cannot be written"),
        ("ADD https://x/y /app/", "is fetched or unpacked"),
        ("ADD a.tar.gz /app/", "is fetched or unpacked"),
        ("COPY a", "needs a file and its destination"),
        ("WORKDIR /usr/src/app", "the sandbox's /usr cannot be written"),
        ("USER nobody", "USER nobody is not supported in the sandbox"),
        ('SHELL ["bash"]', "SHELL"),
        ("ARG VERSION", "ARG VERSION has no value"),
        ("FROM debian", "a second FROM"),
        ("ENV A=${B:+1}", "is not known"),
    ],
)
def test_a_step_that_the_sandbox_cannot_do_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(DockerfileRefused, match=reason) as error:
        plan_sandbox(f"{PLAIN}\n{line}\n")
    assert error.value.line == 4


@pytest.mark.parametrize(
    "base", ["alpine", "python:3-alpine", "ghcr.io/x/debian", "scratch", "debian-x", "$NONE"]
)
def test_an_image_that_the_sandbox_is_not_like_is_refused(base: str) -> None:
    with pytest.raises(DockerfileRefused, match="images of debian, ubuntu and python"):
        plan_sandbox(f"FROM {base}\n")


def test_what_a_row_says_can_be_written_as_json(tmp_path: Path) -> None:
    rows = TaskFolders(TaskSource(str(write_tasks(tmp_path))))
    assert rows.columns() == ["prompt", "task"]
    assert str(tmp_path) not in json.dumps([rows.row(number) for number in range(len(rows))])
