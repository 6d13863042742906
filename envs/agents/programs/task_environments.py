"""The environments of Harbor tasks on a host: from an image, or from the steps of a Dockerfile.

If podman or docker works, an image is pulled or built, and its files are exported: the engine runs
nothing afterwards. The program and the tests run in our sandbox, which shows the image's
system folders read-only and copies of its others. Without an engine the sandbox follows the
Dockerfile itself, if it can (`dockerfile.py`), with the machine's system folders.

So a program never writes `/usr`, `/bin`, `/lib`, `/etc` or `/` itself: the shell and the
interpreters that run its tests are those of the image.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from ....schemas.config.agent import AgentConfig
from ....schemas.local.folder import Folder
from ....schemas.local.process import finish
from ....schemas.wire.errors import SandboxError
from ...sandbox.sandbox import (
    SYSTEM_ETC,
    SYSTEM_FOLDERS,
    Mount,
    etc_mounts,
    readable,
    system_mounts,
)
from ...sandbox.self_test import absent_commands
from ...task_folders import DOCKERFILE, SETTINGS, HarborTask, TaskRefused
from .dockerfile import LINE, DockerfileRefused, SandboxPlan, plan_sandbox
from .folders import ProgramFolder, RootFiles, place_folder
from .launcher import ProgramLauncher
from .sandbox import LOGS, TASK, TASK_HOME, ImageRoot, TaskEnvironment, TaskView

_ENGINES = ("podman", "docker")
_ASK_S, _PULL_S = 30.0, 1800.0
_MOST_KEPT = 32
"""Unused environments that a host keeps."""
_FOLDERS = ("root", "home", "opt", "srv", "mnt", "var/tmp", "logs/agent", "logs/verifier")
"""Folders of every environment."""
_OUR_FOLDERS = ("proc", "dev", "sys", "tmp", "episode", ".tinkermq", "tests")
_SHOWN_CHARS = 300
_STEPS = f"{TASK}/steps.sh"
_CHECK_PYTHON = """
has=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo no)
case "$has" in {version}|{version}.*) ;;
  *) echo "it starts from Python {version}, and the sandbox has $has python3" >&2; exit 1 ;; esac
command -v python >/dev/null || {{ echo "the sandbox has no command python" >&2; exit 1; }}
"""


class ContainerEngine(NamedTuple):
    """Podman or docker."""

    program: str

    @property
    def name(self) -> str:
        """Its name in messages."""
        return Path(self.program).name

    def run(self, *words: str, limit_s: float = _ASK_S) -> "subprocess.CompletedProcess[bytes]":
        """Run one of its commands; one that hangs counts as failed."""
        command = [self.program, *words]
        try:
            return subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, f"took over {limit_s:g} s".encode())
        except OSError as error:
            return subprocess.CompletedProcess(command, 1, str(error).encode())


def find_engine() -> tuple[ContainerEngine | None, str]:
    """Return podman or docker, whichever works first, or None and the reasons."""
    reasons: list[str] = []
    for name in _ENGINES:
        program = shutil.which(name)
        if program is None:
            continue
        engine = ContainerEngine(program)
        done = engine.run("info")
        if done.returncode == 0:
            return engine, ""
        reasons.append(f"{name} does not work: {_last_line(done.stdout)}")
    return None, "; ".join(reasons) or "podman and docker are not installed on this machine"


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][-_SHOWN_CHARS:] if lines else "nothing"


# -- environments of tasks
# -----------------------------------------------------------------------------


class EnvironmentPlanner:
    """Decides how tasks get their environments on this machine."""

    def __init__(self, config: AgentConfig, *, builds: bool = True) -> None:
        """Find an engine; blocks. Without `builds`, only images that it has are used."""
        self._most_s = config.reward_timeout_s
        self.engine, self.missing_engine = find_engine()
        self._builds = builds

    def plan(self, task: HarborTask) -> SandboxPlan | None:
        """Return how the sandbox makes a task's environment; None if an image does.

        Raises TaskRefused for a task without an environment here.
        """
        task.check_supported()
        wanted_s = task.settings.verifier.timeout_sec
        if wanted_s is not None and wanted_s > self._most_s:
            raise TaskRefused(
                task.name,
                f"its tests may take {wanted_s:g} s, and agent.reward_timeout_s={self._most_s:g}",
                task.place("timeout_sec", "verifier"),
                hint=f"set agent.reward_timeout_s={wanted_s:g}",
            )
        if self.engine is not None:
            return None
        text, where = task.dockerfile, DOCKERFILE
        if text is None:
            text, where = f"FROM {task.settings.environment.docker_image}\n", SETTINGS
        ignores = task.root.has(f"{task.name}/environment/.dockerignore")
        try:
            plan = plan_sandbox(text, ignores_files=ignores)
        except DockerfileRefused as error:
            place = where if task.dockerfile is None else f"{where}:{error.line}"
            raise self._refused(task, error.reason, place) from error
        if plan.workdir == "/":
            raise self._refused(task, "it has no WORKDIR, and / cannot be written", where)
        return plan

    def image_of(self, task: HarborTask) -> str:
        """Return the name of a task's image, after pulling or building it; blocks.

        Raises TaskRefused if the image cannot be pulled or built.
        """
        engine, settings = self.engine, task.settings.environment
        assert engine is not None
        if settings.docker_image is not None:
            name, where, verb = settings.docker_image, SETTINGS, "pulled"
            words, limit_s = ["pull", name], _PULL_S
        else:
            context = task.path / "environment"  # built by path only for trusted users
            with task.open("environment") as files:
                name, where, verb = f"tinkermq-harbor:{digest_of(files)}", DOCKERFILE, "built"
            words = ["build", "--tag", name, "--file", str(context / "Dockerfile"), str(context)]
            limit_s = settings.build_timeout_sec
        if engine.run("image", "inspect", name).returncode == 0:
            return name
        if not self._builds:
            raise TaskRefused(
                task.name,
                f"its image {name} is not on this machine, and is not {verb} here for users",
                where,
                hint=f"let an operator run `{engine.name} {' '.join(words)}`",
            )
        done = engine.run(*words, limit_s=limit_s)
        if done.returncode:
            raise TaskRefused(
                task.name,
                f"its image cannot be {verb}: {engine.name} says: {_last_line(done.stdout)}",
                where,
            )
        return name

    def _refused(self, task: HarborTask, reason: str, where: str) -> TaskRefused:
        hint = f"{self.missing_engine}; with podman or docker all tasks with an image run"
        return TaskRefused(task.name, reason, where, hint=hint)


def digest_of(folder: Folder) -> str:
    """Return a digest of the names, modes and contents of a folder's files."""
    digest = blake2b(digest_size=12)
    waiting = ["."]
    while waiting:
        here = waiting.pop()
        with folder.folder(here) as inner:
            for name in sorted(inner.names()):
                path, mode = f"{here}/{name}", inner.status(name).st_mode
                digest.update(os.fsencode(f"{path}\0{mode:o}\0"))
                if stat.S_ISLNK(mode):
                    digest.update(os.fsencode(os.readlink(name, dir_fd=inner.fileno())))
                elif stat.S_ISDIR(mode):
                    waiting.append(path)
                elif stat.S_ISREG(mode):
                    with inner.open(name) as file:
                        while chunk := file.read(1 << 20):
                            digest.update(chunk)
                digest.update(b"\0")
    return digest.hexdigest()


# -- made environments -----------------------------------------------------------------------------


@dataclass(eq=False)
class _Made:
    """An environment, and the number of programs that use copies of it."""

    environment: TaskEnvironment
    give_back: Callable[[], None]
    num_users: int = 0


class TaskEnvironments:
    """The environments of a host's tasks, each made once."""

    def __init__(
        self, config: AgentConfig, launcher: ProgramLauncher, *, builds: bool = True
    ) -> None:
        """Prepare; `builds` as in `EnvironmentPlanner`."""
        self._config = config
        self._launcher = launcher
        self._builds = builds
        self._planner: EnvironmentPlanner | None = None
        self._made: dict[Path, asyncio.Task[_Made]] = {}

    @contextlib.asynccontextmanager
    async def environment(self, task: HarborTask) -> AsyncIterator[TaskEnvironment]:
        """Make a task's environment unless it exists; it is kept at least for this block.

        Raises TaskRefused for a task that cannot be run here, and SandboxError.
        """
        making = self._made.get(task.path)
        if making is None:
            name = f"environment of task {task.name}"
            making = asyncio.create_task(self._make(task), name=name)
            self._made[task.path] = making
        made = await asyncio.shield(making)
        made.num_users += 1
        self._made[task.path] = self._made.pop(task.path)  # it becomes the last to be removed
        try:
            yield made.environment
        finally:
            made.num_users -= 1
            await self._shrink()

    async def close(self) -> None:
        """Remove all of them, after all programs have ended."""
        for making in self._made.values():
            making.cancel()
        for result in await asyncio.gather(*self._made.values(), return_exceptions=True):
            if isinstance(result, _Made):
                await asyncio.to_thread(result.give_back)
        self._made.clear()

    async def _shrink(self) -> None:
        """Remove the least recently used ones beyond the bound."""
        for folder, making in list(self._made.items()):
            if len(self._made) <= _MOST_KEPT:
                return
            if making.done() and not making.cancelled() and making.exception() is None:
                made = making.result()
                if not made.num_users:
                    del self._made[folder]
                    await asyncio.to_thread(made.give_back)

    async def _make(self, task: HarborTask) -> _Made:
        try:
            if self._planner is None:  # imported here, since only jobs with tasks need it
                self._planner = await asyncio.to_thread(
                    EnvironmentPlanner, self._config, builds=self._builds
                )
            planner = self._planner
            plan = planner.plan(task)
            if plan is None:
                made = await self._written_out(task, planner)
            else:
                made = await self._from_steps(task, plan)
            try:
                await self._prove(task, made.environment)
            except BaseException:
                await asyncio.to_thread(made.give_back)
                raise
        except SandboxError:
            self._made.pop(task.path, None)  # it may be temporary
            raise
        return made

    async def _prove(self, task: HarborTask, environment: TaskEnvironment) -> None:
        """Check that the sandbox holds in it, and that its tests can run."""
        launcher, view = self._launcher, TaskView(environment, "program")
        async with launcher.folder(None, root=environment.root) as folder:
            sandbox = launcher.sandboxes.task_sandbox(folder, "model", view)
            absent = await launcher.blocking(
                lambda: absent_commands(
                    sandbox,
                    ["bash"],
                    environment.command_variables,
                    hidden=launcher.sandboxes.unseen,
                )
            )
        if absent:
            where = DOCKERFILE if task.dockerfile is not None else SETTINGS
            raise TaskRefused(task.name, "bash, which runs its tests, is missing", where)

    async def _written_out(self, task: HarborTask, planner: EnvironmentPlanner) -> _Made:
        """Return the environment of an image; if the wait is cancelled it is removed."""
        write = self._launcher.blocking(lambda: self._from_image(task, planner))
        writing = asyncio.ensure_future(write)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await finish(asyncio.wait({writing}))
            if writing.exception() is None:
                writing.result().give_back()
            raise

    def _from_image(self, task: HarborTask, planner: EnvironmentPlanner) -> _Made:
        """Export the image of a task; blocks."""
        image = ImageRoot(planner.image_of(task), f"the image of task {task.name}")
        try:
            for path in (TASK_HOME, f"{LOGS}/agent", f"{LOGS}/verifier"):
                image.place(path)
            system = tuple(_system_of(image.path))
            settings = {**image.environment, **task.settings.environment.env}
            environment = self._environment(
                task, image.path, system, settings, image.workdir, is_image=True
            )
        except BaseException:
            image.close()
            raise
        return _Made(environment, image.close)

    async def _from_steps(self, task: HarborTask, plan: SandboxPlan) -> _Made:
        """Follow the Dockerfile of a task in the sandbox."""
        launcher = self._launcher
        folder = launcher.folders.new()
        try:
            await launcher.blocking(lambda: self._write_steps(folder, task, plan))
            await self._follow_steps(folder, task, plan)
            settings = {**plan.variables, **task.settings.environment.env}
            environment = await launcher.blocking(
                lambda: self._environment(
                    task, folder["root"], _system(), settings, plan.workdir, is_image=False
                )
            )
        except BaseException as error:
            await asyncio.to_thread(folder.remove)
            if isinstance(error, OSError):
                raise SandboxError(
                    f"the environment of task {task.name} cannot be made: {error}",
                    hint="see the room in the host's temporary folder ($TMPDIR)",
                ) from error
            raise
        return _Made(environment, folder.remove)

    def _write_steps(self, folder: ProgramFolder, task: HarborTask, plan: SandboxPlan) -> None:
        folder.make(None, 0)
        if task.dockerfile is None:
            folder.add("context")
        else:
            with task.open("environment") as context:
                folder.add("context", context, self._config.disk_mb << 20)
        folder.add("root")
        folder["root"].chmod(0o755)  # bubblewrap enters it without the rights of its owner
        for name in _FOLDERS:
            (folder["root"] / name).mkdir(parents=True)
        check = "" if plan.python is None else _CHECK_PYTHON.format(version=plan.python)
        script = folder["task"] / Path(_STEPS).name
        script.write_text(f"( {check}:\n) || exit\n{plan.script}")
        folder.give_away("context", "root", "task")

    async def _follow_steps(
        self, folder: ProgramFolder, task: HarborTask, plan: SandboxPlan
    ) -> None:
        """Run the script of a Dockerfile; TaskRefused with the line at which it fails."""
        launcher, limit_s = self._launcher, task.settings.environment.build_timeout_sec
        empty = RootFiles(folder["root"], ())
        environment = TaskEnvironment(False, empty, _system(), plan.variables, "/")
        async with launcher.running(
            folder, ["sh", _STEPS], {}, "none", view=TaskView(environment, "build")
        ) as running:
            ended, over = running.program.ended, running.over
            await asyncio.wait({ended, over}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            in_time = ended.done() and not over.done()
            exit_code = await running.program.kill()
        if in_time and not exit_code:
            return
        printed = running.program.printed.tail().strip()[-_SHOWN_CHARS:]
        line = await launcher.blocking(lambda: folder.read("task", Path(LINE).name, 16))
        number = (line or b"").decode("ascii", "replace").strip()
        reason = f"this step fails in the sandbox: {printed or f'exit code {exit_code}'}"
        if over.done():
            reason = f"its steps exceed agent.{over.result()}_mb"
        elif not in_time:
            reason = f"its steps take longer than build_timeout_sec={limit_s:g}"
        where = DOCKERFILE if task.dockerfile is not None else SETTINGS
        raise TaskRefused(task.name, reason, f"{where}:{number}" if number.isdigit() else where)

    def _environment(
        self,
        task: HarborTask,
        root: Path,
        system: tuple[Mount, ...],
        variables: Mapping[str, str],
        workdir: str,
        *,
        is_image: bool,
    ) -> TaskEnvironment:
        """Return the environment with the files of a folder; TaskRefused for a bad link in it."""
        where = DOCKERFILE if task.dockerfile is not None else SETTINGS
        top = workdir.split("/")[1]
        if top in ("", *_OUR_FOLDERS):
            reason = f"its WORKDIR is {workdir}, which cannot be its own in the sandbox"
            raise TaskRefused(task.name, reason, where)
        writable = tuple(
            sorted(
                entry.name
                for entry in os.scandir(root)
                if entry.is_dir(follow_symlinks=False)
                and entry.name not in (*SYSTEM_FOLDERS, *_OUR_FOLDERS)
            )
        )
        shown = self._launcher.sandboxes.shown(in_image=is_image)
        for path in (workdir, *map(str, shown)):
            if path == workdir or path.split("/")[1] in writable:
                try:
                    place_folder(root, path)
                except ValueError as error:
                    reason = f"it has a link or a file at {error}, where {path} is to be shown"
                    raise TaskRefused(task.name, reason, where) from error
        extra = (workdir.strip("/"),) if top in SYSTEM_FOLDERS else ()
        files = RootFiles(root, (*writable, *extra))
        return TaskEnvironment(is_image, files, system, variables, workdir)


def _system() -> tuple[Mount, ...]:
    """Return the machine's system folders."""
    return (*system_mounts(), *etc_mounts(SYSTEM_ETC))


def _system_of(root: Path) -> list[Mount]:
    """Return the system folders of an image; links stay links."""
    mounts: list[Mount] = []
    for name in SYSTEM_FOLDERS:
        path = root / name
        if path.is_symlink():
            mounts.append(Mount("link", f"/{name}", str(path.readlink())))
        elif path.is_dir():
            mounts.append(readable(f"/{name}", path))
    return mounts
