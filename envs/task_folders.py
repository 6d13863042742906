"""Folders of Harbor tasks: instruction, settings, environment and tests, one task a folder.

A task is a folder with `instruction.md`, `task.toml`, tests started by `test.sh`, and an image: a
Dockerfile in `environment/`, or `docker_image` in `task.toml`. The tasks of a folder are the rows
of a dataset, ordered by name. A folder that is not a valid task is an error of the whole dataset;
only a valid task that cannot run here is refused by itself (`TaskRefused`). Links are not followed,
since a host reads these files with its own rights.
"""

import contextlib
import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..schemas.config.agent import TaskSource
from ..schemas.wire.errors import DataError

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
"""Versions of the format of `task.toml`."""
INSTRUCTION, SETTINGS = "instruction.md", "task.toml"
TEST_SCRIPT = "tests/test.sh"
DOCKERFILE = "environment/Dockerfile"
_COMPOSE = ("environment/docker-compose.yaml", "environment/docker-compose.yml")
_MAX_BYTES = 1 << 20
_MAX_SHOWN = 5
_CANARY = re.compile(r"\s*(<!--|#).*canary.*", re.IGNORECASE)
_HOST_VALUE = re.compile(r"\$\{")


class TaskRefused(DataError):
    """A task cannot run on this machine or with tinkermq."""

    def __init__(self, task: str, reason: str, where: str, hint: str = "") -> None:
        """`where` is the file, and perhaps the line, of the unsupported setting."""
        super().__init__(f"task {task} cannot be run: {reason} ({where})", hint=hint)
        self.task = task
        self.reason = reason
        self.where = where


class _Table(BaseModel):
    """A table of `task.toml`; unknown keys are ignored, as Harbor does."""

    model_config = ConfigDict(extra="ignore")


class TaskEnvironmentSettings(_Table):
    """`[environment]`: the environment of the program."""

    docker_image: str | None = Field(
        default=None, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
    )
    build_timeout_sec: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    memory_mb: int | None = Field(default=None, gt=0)
    gpus: int = 0
    os: str = "linux"
    env: dict[str, str] = Field(default_factory=dict[str, str])


class TaskVerifierSettings(_Table):
    """`[verifier]`: the run of the tests."""

    timeout_sec: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """None: the job's limit."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    environment_mode: Literal["shared", "separate"] = "shared"


class TaskAgentSettings(_Table):
    """`[agent]`: the run of the program."""

    timeout_sec: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class TaskSettings(_Table):
    """One `task.toml`."""

    schema_version: str = "1.0"
    """Also written `version`."""
    environment: TaskEnvironmentSettings = Field(default_factory=TaskEnvironmentSettings)
    verifier: TaskVerifierSettings = Field(default_factory=TaskVerifierSettings)
    agent: TaskAgentSettings = Field(default_factory=TaskAgentSettings)
    steps: list[Any] = Field(default_factory=list[Any])

    @model_validator(mode="before")
    @classmethod
    def _older_name(cls, values: Any) -> Any:
        tree = cast("dict[str, Any]", values)  # of TOML
        return {"schema_version": tree["version"], **tree} if "version" in tree else tree


@dataclass(frozen=True)
class HarborTask:
    """One task."""

    folder: Path
    instruction: str
    settings: TaskSettings
    dockerfile: str | None
    """The text of its Dockerfile; None: it names an image."""
    compose: str = ""
    """Its compose file, if it needs several containers."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    def check_supported(self) -> None:
        """Raise TaskRefused for unsupported settings."""
        settings = self.settings
        refusals: dict[str, tuple[Any, str, str]] = {
            "it has several steps": (settings.steps, "[[steps]]", "steps"),
            "it asks for GPUs": (settings.environment.gpus, "gpus", "environment"),
            f"it is for {settings.environment.os}": (
                settings.environment.os != "linux",
                "os",
                "environment",
            ),
            "its tests run in a container of their own": (
                settings.verifier.environment_mode != "shared",
                "environment_mode",
                "verifier",
            ),
        }
        for table, env in (
            ("environment", settings.environment.env),
            ("verifier", settings.verifier.env),
        ):
            name = next((name for name, value in env.items() if _HOST_VALUE.search(value)), None)
            refusals[f"{table}.env.{name} is taken from the host's environment"] = (
                name is not None,
                name or "",
                table,
            )
        for reason, (holds, key, table) in refusals.items():
            if holds:
                raise TaskRefused(self.name, reason, self.place(key, table))
        if self.compose:
            raise TaskRefused(self.name, "it needs several containers", self.compose)

    def place(self, key: str, table: str) -> str:
        """Return the place of a key of the settings, as `file:line`."""
        text = read_text(self.folder, SETTINGS) or ""
        line = _line_of(text, key, table)
        return f"{SETTINGS}:{line}" if line else SETTINGS


def read_task(folder: Path) -> HarborTask:
    """Read a task; DataError with file and line for an invalid folder."""
    texts = {name: read_text(folder, name) for name in (INSTRUCTION, SETTINGS, TEST_SCRIPT)}
    for name, text in texts.items():
        if text is None:
            raise DataError(
                f"task {folder.name} has no {name}: {folder / name}",
                hint="a task has instruction.md, task.toml, environment/Dockerfile and "
                "tests/test.sh, none of which is a link",
            )
    instruction = _without_canary(texts[INSTRUCTION] or "")
    if not instruction.strip():
        raise DataError(f"{folder / INSTRUCTION} is empty", hint="write what is to be done")
    settings = parse_settings(texts[SETTINGS] or "", folder / SETTINGS)
    dockerfile = read_text(folder, DOCKERFILE)
    compose = next((name for name in _COMPOSE if (folder / name).exists()), "")
    if dockerfile is None and settings.environment.docker_image is None and not compose:
        raise DataError(
            f"task {folder.name} has no environment: {folder / DOCKERFILE}",
            hint="write a Dockerfile, or name an image in task.toml: [environment] docker_image",
        )
    return HarborTask(folder, instruction, settings, dockerfile, compose)


def parse_settings(text: str, where: Path) -> TaskSettings:
    """Read a `task.toml`; DataError with the line for an invalid one."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid TOML: {error}", hint="correct the line") from error
    try:
        settings = TaskSettings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        table, key = ("", path[0]) if len(path) < 2 else (path[0], path[1])
        line = _line_of(text, "version" if key == "schema_version" else key, table)
        raise DataError(
            f"{where}:{line or 1}: {'.'.join(path)}: {first['msg']}", hint="correct the value"
        ) from error
    if settings.schema_version not in VERSIONS:
        line = _line_of(text, "schema_version", "") or _line_of(text, "version", "") or 1
        raise DataError(
            f"{where}:{line}: version {settings.schema_version!r} of the format is not known",
            hint=f"known are {', '.join(VERSIONS)}",
        )
    return settings


def read_text(folder: Path, name: str) -> str | None:
    """Return a file below a folder as text; None if it is missing, a link or too large."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    *parents, last = name.split("/")
    with contextlib.ExitStack() as opened:
        try:
            at = os.open(folder, flags | os.O_DIRECTORY)
            opened.callback(os.close, at)
            for parent in parents:
                at = os.open(parent, flags | os.O_DIRECTORY, dir_fd=at)
                opened.callback(os.close, at)
            file = os.open(last, flags, dir_fd=at)
        except OSError:
            return None
        opened.callback(os.close, file)
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            return None
        data = b""
        while chunk := os.read(file, _MAX_BYTES):
            data += chunk
        return data.decode("utf-8", "replace")


def is_task_folder(path: Path) -> bool:
    """Return whether a folder has a file of a task."""
    is_folder = path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
    return is_folder and any((path / name).exists() for name in (INSTRUCTION, SETTINGS, "tests"))


def holds_tasks(source: TaskSource) -> bool:
    """Return whether a folder contains at least one task, which may be invalid."""
    folder = Path(source.folder).expanduser()
    return folder.is_dir() and any(map(is_task_folder, folder.iterdir()))


class TaskFolders:
    """The tasks of a folder, as the rows of a dataset."""

    def __init__(self, source: TaskSource) -> None:
        """Read all tasks; DataError names the first invalid ones, and the reasons."""
        path = Path(source.folder).expanduser()
        if not path.is_dir():
            raise DataError(
                f"there is no folder of tasks {source.folder!r}",
                hint="give harbor:FOLDER with a folder that every environment host can read",
            )
        folders = sorted(filter(is_task_folder, path.iterdir()))
        tasks: list[HarborTask] = []
        problems: list[DataError] = []
        for folder in folders:
            try:
                tasks.append(read_task(folder))
            except DataError as error:
                problems.append(error)
        if problems:
            more = len(problems) - _MAX_SHOWN
            shown = "; ".join(error.message for error in problems[:_MAX_SHOWN])
            raise DataError(
                f"{shown}{f'; and {more} more' if more > 0 else ''}", hint=problems[0].hint
            )
        if source.share:
            tasks = [
                task for task in tasks if (_place_of(task.name) < source.share) == source.is_val
            ]
        if not tasks:
            meant = "its share of " if source.share else ""
            raise DataError(
                f"{source.name} holds no task: {meant}{len(folders)} folders",
                hint="name the folder in which the folders of tasks lie, or another share",
            )
        self.tasks: Sequence[HarborTask] = tasks
        """The tasks, ordered by name."""

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.tasks)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return a task without its tests."""
        task = self.tasks[number]
        return {"prompt": task.instruction, "task": task.name}

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.row(0))

    def close(self) -> None:
        """Do nothing: no file is open."""


def _place_of(name: str) -> float:
    """Return a number in [0, 1) that depends only on a task's name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64


def _without_canary(text: str) -> str:
    """Return an instruction without the canary lines of benchmarks."""
    lines = text.splitlines(keepends=True)
    while lines and _CANARY.fullmatch(lines[0].rstrip("\r\n")):
        del lines[0]
    return "".join(lines).strip("\n") + "\n" if lines else ""


def _line_of(text: str, key: str, table: str) -> int | None:
    """Return the line of a table's key, else the table's line, else None."""
    here, table_line = "", None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if match := re.match(r"\[+\s*([\w.-]+)\s*\]+", words):
            here = match[1]
            if here in (key, table):
                table_line = table_line or number
        elif here.partition(".")[0] == table and re.match(rf"\"?{re.escape(key)}\"?\s*=", words):
            return number
    return table_line
