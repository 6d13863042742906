"""Folders of Harbor tasks: instruction, settings, environment and tests, one task a folder.

A task is a folder with `instruction.md`, `task.toml`, tests started by `test.sh`, and an image: a
Dockerfile in `environment/`, or `docker_image` in `task.toml`. The tasks of a folder are the rows
of a dataset, ordered by name. A folder that is not a valid task is an error of the whole dataset;
only a valid task that cannot run here is refused by itself (`TaskRefused`). A host reads these
files with its own rights: the folder is opened once, and no link in it is followed.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..schemas.config.agent import TaskSource
from ..schemas.local.folder import Folder
from ..schemas.wire.errors import DataError, StorageError
from ..schemas.wire.message import requirement

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

    root: Folder = field(compare=False)
    """The open folder in which that of the task lies."""
    name: str
    """The name of its folder."""
    instruction: str
    settings: TaskSettings
    dockerfile: str | None
    """The text of its Dockerfile; None: it names an image."""
    compose: str = ""
    """Its compose file, if it needs several containers."""

    @property
    def path(self) -> Path:
        """The path of its folder: for messages and as a key, not for opening."""
        return self.root.path / self.name

    def open(self, name: str) -> Folder:
        """Open a folder of the task, such as `tests`. Raises OSError."""
        return self.root.folder(f"{self.name}/{name}")

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
        text = _read_text(self.root, f"{self.name}/{SETTINGS}") or ""
        line = _line_of(text, key, table)
        return f"{SETTINGS}:{line}" if line else SETTINGS


def read_task(root: Folder, task: str) -> HarborTask:
    """Read a task; DataError with file and line for an invalid folder."""
    files, folder = (INSTRUCTION, SETTINGS, TEST_SCRIPT), root.path / task
    texts = {name: _read_text(root, f"{task}/{name}") for name in files}
    for name, text in texts.items():
        if text is None:
            raise DataError(
                f"task {task} has no {name}: {folder / name}",
                hint="a task has instruction.md, task.toml, environment/Dockerfile and "
                "tests/test.sh, none of which is a link",
            )
    instruction = _without_canary(texts[INSTRUCTION] or "")
    if not instruction.strip():
        raise DataError(f"{folder / INSTRUCTION} is empty", hint="write what is to be done")
    settings = parse_settings(texts[SETTINGS] or "", folder / SETTINGS)
    dockerfile = _read_text(root, f"{task}/{DOCKERFILE}")
    compose = next((name for name in _COMPOSE if root.has(f"{task}/{name}")), "")
    if dockerfile is None and settings.environment.docker_image is None and not compose:
        raise DataError(
            f"task {task} has no environment: {folder / DOCKERFILE}",
            hint="write a Dockerfile, or name an image in task.toml: [environment] docker_image",
        )
    return HarborTask(root, task, instruction, settings, dockerfile, compose)


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
            f"{where}:{line or 1}: {'.'.join(path)}: {requirement(first)}", hint="correct the value"
        ) from error
    if settings.schema_version not in VERSIONS:
        line = _line_of(text, "schema_version", "") or _line_of(text, "version", "") or 1
        raise DataError(
            f"{where}:{line}: version {settings.schema_version!r} of the format is not known",
            hint=f"known are {', '.join(VERSIONS)}",
        )
    return settings


def _read_text(root: Folder, name: str) -> str | None:
    """Return a file below a folder as text; None if it is missing, a link or too large."""
    try:
        return root.read(name, _MAX_BYTES).decode("utf-8", "replace")
    except (OSError, StorageError):
        return None


def _task_names(root: Folder) -> Iterator[str]:
    """Yield the folders that have a file of a task, in order."""
    for entry in root.entries():
        parts = (f"{entry.path}/{name}" for name in (INSTRUCTION, SETTINGS, "tests"))
        if entry.is_folder and not entry.path.startswith(".") and any(map(root.has, parts)):
            yield entry.path


def holds_tasks(source: TaskSource) -> bool:
    """Return whether a folder contains at least one task, which may be invalid."""
    try:
        with Folder.held(Path(source.folder).expanduser()) as root:
            return any(_task_names(root))
    except OSError:
        return False


class TaskFolders:
    """The tasks of a folder, as the rows of a dataset."""

    def __init__(self, source: TaskSource) -> None:
        """Read all tasks; DataError names the first invalid ones, and the reasons."""
        try:
            self._root = Folder.held(Path(source.folder).expanduser())
        except OSError as error:
            raise DataError(
                f"there is no folder of tasks {source.folder!r}",
                hint="give harbor:FOLDER with a folder that every environment host can read",
            ) from error
        self.tasks: Sequence[HarborTask] = self._read(source)
        """The tasks, ordered by name."""

    def _read(self, source: TaskSource) -> list[HarborTask]:
        folders = list(_task_names(self._root))
        tasks: list[HarborTask] = []
        problems: list[DataError] = []
        for folder in folders:
            try:
                tasks.append(read_task(self._root, folder))
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
        return tasks

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
        """Do nothing: the folder is open as long as one of its tasks is held."""


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
