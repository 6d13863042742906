"""The sandboxes of hosted games.

In a pool with users an environment host runs code of a job's owner. It sees, read-only, this
interpreter and its packages, the data files that its job names, and the folders in
`$TINKERMQ_GAME_FOLDERS`; a /tmp and a home of its own, in memory; its own processes. It sees no run
folder, no file of the node, no other process, and of the node's environment only `_VARIABLES` and
those in `$TINKERMQ_GAME_VARIABLES`. It shares the network, over which it reaches the broker.

It runs under an unused user id: the kernel lets root's id write its settings, whatever other rights
were removed. The filter of system calls refuses namespaces, mounts, tracing and the like, so no
game makes a sandbox, or a /proc, of its own: code of a model goes through a socket to interpreters
that the node starts.

A host of agent programs runs no code of a job's owner and needs no sandbox; its programs have
theirs (`envs/agents/programs`).
"""

import asyncio
import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from ...broker.client.login import CA_VARIABLE
from ...envs.dataset import is_dataset_name, saved_files
from ...envs.sandbox.bubblewrap import Program, SandboxProcess, start_in_thread
from ...envs.sandbox.sandbox import (
    SYSTEM_ETC,
    Mount,
    Sandbox,
    etc_mounts,
    held,
    memory_folder,
    python_variables,
    readable,
    system_mounts,
    unprivileged_user,
    writable,
)
from ...envs.sandbox.self_test import prove
from ...envs.sandbox.served import SOCKET, listen_at
from ...envs.sandbox.shown import FOLDERS_VARIABLE, PathRefused, code_folders, refuse_runs
from ...schemas.local.folder import hold, process_folder
from ...schemas.local.process import die_with, finish
from ...schemas.node import WantedActor
from ...schemas.wire.errors import ConfigError, SandboxError, TinkermqError
from ..storage.access import is_of_another, own_folders, refuse_unshown_folder, without_tilde

# Module, arguments and environment of an actor. A command line never has secrets: the broker's URL
# is passed in the environment.

ENVIRONMENT = {
    "TINKERMQ_LOG_FORMAT": "json",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of every process of the pool."""


_MODULES = {"rank": "learner.ranks", "trainer": "tinker", "sampler": "tinker.sampling"}
"""Roles whose module has another name."""


def actor_module(spec: WantedActor) -> str:
    """Return the module of an actor."""
    return f"tinkermq.actors.{_MODULES.get(spec.role, spec.role)}"


def actor_argv(spec: WantedActor) -> list[str]:
    """Return the arguments of an actor."""
    return ["--user", spec.user, "--job", spec.job, "--name", spec.name]


def actor_environment(
    spec: WantedActor, nats_url: str, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return variables to add to the node's environment; threads are set before torch.

    `gpus` are the UUIDs of the GPUs that the actor sees; None for a node without any.
    """
    threads = str(spec.threads)
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus is not None else {}
    return {
        **seen,
        **ENVIRONMENT,
        "TINKERMQ_NATS_URL": nats_url,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }


VARIABLES_VARIABLE = "TINKERMQ_GAME_VARIABLES"
"""Further variables of the node's environment for games, joined by `:`."""
_VARIABLES = frozenset(
    {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    | {"LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "http_proxy"}
    | {"https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", CA_VARIABLE}
    | {"TINKERMQ_DEBUG", "TINKERMQ_LOG_LEVEL"}
)
_ETC = (*SYSTEM_ETC, "group", "passwd", "hosts", "resolv.conf")
_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_WHO = {"USER": "nobody", "LOGNAME": "nobody"}
"""The sandbox's user id is not in /etc/passwd."""
_PAUSE_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StartRefused(OSError):
    """An actor may not be started as its job requests it; a retry does not help."""

    @classmethod
    def of(cls, error: TinkermqError) -> "StartRefused":
        """Return the refusal with the message of an error."""
        return cls(f"{error.message}; {error.hint}")


class SandboxedActor:
    """An actor in a sandbox."""

    def __init__(self, process: SandboxProcess, interpreters: "InterpreterSocket") -> None:
        self._process = process
        self._interpreters = interpreters
        self.pid = process.pid

    async def wait(self) -> int:
        """Wait for its end, and that of the code that it ran; return its exit code."""
        try:
            return await self._process.ended()
        finally:
            await self._interpreters.close()
            self._process.kill()
            self._process.close()

    def terminate(self) -> None:
        """Send SIGTERM so that it drains."""
        self._process.terminate()


class SandboxStarter:
    """Starts actors in sandboxes."""

    def __init__(self) -> None:
        self._is_proven = False

    async def start(
        self,
        command: Sequence[str],
        spec: WantedActor,
        environment: Mapping[str, str],
        output: int,
    ) -> SandboxedActor:
        """Start the program of an actor, whose output goes to a descriptor.

        Raises OSError, with the remedy, if sandboxes are not possible, and StartRefused if it may
        not see a path that its job names.
        """
        interpreters = InterpreterSocket(_allowed(os.environ))
        try:
            program = Program(command, environment={**_allowed(os.environ), **_WHO, **environment})
            with contextlib.ExitStack() as data:  # it is mounted from open files
                sandbox = await finish(
                    asyncio.to_thread(self._proven_sandbox, spec, interpreters, data)
                )
                process = await start_in_thread(sandbox, program, stdout=output, stderr=output)
        except BaseException as error:
            await interpreters.close()
            if isinstance(error, PathRefused):
                raise StartRefused.of(error) from error
            if isinstance(error, SandboxError):
                raise OSError(f"{error.message}; {error.hint}") from error
            raise
        return SandboxedActor(process, interpreters)

    def _proven_sandbox(
        self, spec: WantedActor, interpreters: "InterpreterSocket", data: contextlib.ExitStack
    ) -> Sandbox:
        """Return the sandbox of an actor; the first must pass its self-test."""
        sandbox = actor_sandbox(spec, interpreters, data)
        if not self._is_proven:
            prove(sandbox)
            self._is_proven = True
        return sandbox


def actor_sandbox(
    spec: WantedActor, interpreters: "InterpreterSocket", opened: contextlib.ExitStack
) -> Sandbox:
    """Return the sandbox of an actor, whose data files are open as long as `opened`.

    Disks may be slow. Raises SandboxError.
    """
    shown = code_folders()
    refuse_runs(shown, Path(spec.run_dir))
    data = _data_files(spec, opened)
    if authority := os.environ.get(CA_VARIABLE):
        shown.append(Path(authority))
    if unprivileged_user() is not None:
        _refuse_unreadable({path: path.stat() for path in shown if path.exists()})
        _refuse_unreadable({path: os.fstat(file) for path, file in data.items()})
    here = _working_folder()
    return Sandbox(
        python=(sys.executable, *_OPTIONS),
        mounts=(
            memory_folder("/tmp"),  # noqa: S108 - its own
            memory_folder("/dev/shm"),  # noqa: S108 - its own
            *system_mounts(),
            *(Mount("folder", str(item), mode=0o1777) for item in sorted({Path.home(), here})),
            *etc_mounts(_ETC),
            *(readable(path, is_optional=True) for path in sorted(set(shown))),
            *(held(path, file) for path, file in data.items()),
            writable(SOCKET, interpreters.path),
        ),
        folder=str(here),
        is_read_only=False,  # its home and working folder lie in it, in memory
        is_ended_first=False,
        has_network=True,
        has_memory_files=True,  # no limit is set for them
        variables=python_variables(),
    )


def _working_folder() -> Path:
    """Return the working folder of an actor: the node's, or the home folder if that is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path.home()


def check_programs(spec: WantedActor) -> None:
    """Check the files of a host of agent programs, which is not in a sandbox itself.

    It does not run code of the job's owner, and each of its programs has a sandbox. It may read,
    and show them, only files that a hosted game would see. Raises PathRefused.
    """
    with contextlib.ExitStack() as opened:
        _data_files(spec, opened)
    for folder in spec.programs or []:
        try:
            refuse_unshown_folder(without_tilde(folder.replace("\0", "?")).resolve(), spec)
        except ConfigError as error:
            raise PathRefused(error.message, hint=error.hint) from error


def _data_files(spec: WantedActor, opened: contextlib.ExitStack) -> dict[Path, int]:
    """Open a job's data files; return their descriptors by the paths that the job names.

    That path and the real one must be names of datasets: a game must not see arbitrary files that
    its owner calls data, nor, through a link, a file of another user's run. Raises PathRefused.
    """
    roots, own = [Path(root) for root in spec.output_roots], own_folders(spec)
    paths = (file for path in map(without_tilde, spec.reads) for file in (path, *saved_files(path)))
    named = {path.absolute() for path in paths if path.is_file()}
    files: dict[Path, int] = {}
    for path in filter(is_dataset_name, named):
        try:
            file, place = hold(path)
        except OSError as error:
            raise PathRefused(
                f"{path} cannot be opened: {error.strerror}",
                hint="see its rights; it must not change while a host starts",
            ) from error
        opened.callback(os.close, file)
        is_odd = not is_dataset_name(place) or is_of_another(place, own, roots)
        if (place != path and is_odd) or not stat.S_ISREG(os.fstat(file).st_mode):
            raise PathRefused(
                f"{path} leads to {place}, which is not a dataset of user {spec.user!r}",
                hint="name the file itself, or copy it",
            )
        files[path] = file
    return files


def _allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that code of users may see."""
    names = _VARIABLES.union(os.environ.get(VARIABLES_VARIABLE, "").split(":"))
    return {name: value for name, value in environment.items() if name in names}


def _refuse_unreadable(paths: Mapping[Path, os.stat_result]) -> None:
    """Raise PathRefused for files that only root may read: the game runs under another user id."""
    for path, status in paths.items():
        needed = 0o005 if stat.S_ISDIR(status.st_mode) else 0o004
        if status.st_mode & needed != needed:
            raise PathRefused(
                f"hosted games may not read {path}: a node of root starts them as an unused user",
                hint=f"chmod -R o+rX {path}",
            )


class InterpreterSocket:
    """Runs code of a model for a sandboxed actor, outside of that sandbox.

    The server starts with the first connection, and again if it ends.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Listen from now on; `environment` is that of the server.

        Raises OSError, with the remedy, if a socket cannot be made.
        """
        folders = os.environ.get(FOLDERS_VARIABLE)
        self._environment = {**environment, **({FOLDERS_VARIABLE: folders} if folders else {})}
        self._folder = process_folder("socket")
        self.path = self._folder / "socket"
        try:
            self._listening = listen_at(self.path)
            self.path.chmod(0o666)  # the game runs under another user id, and only the game sees it
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._task = asyncio.create_task(self._serve())
        self._task.add_done_callback(lambda _: self._listening.close())

    async def close(self) -> None:
        """Stop listening, and end every program."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        while True:
            await self._wait_for_connection()
            server = await self._start()
            try:
                exit_code = await server.wait()
            finally:
                if server.returncode is None:
                    server.kill()
                    await server.wait()
            _log.warning("sandbox_server_ended", exit_code=exit_code, restart_in_s=_PAUSE_S)
            await asyncio.sleep(_PAUSE_S)

    async def _wait_for_connection(self) -> None:
        """Wait until the game connects."""
        connecting, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._listening, connecting.set)
        try:
            await connecting.wait()
        finally:
            loop.remove_reader(self._listening)

    async def _start(self) -> asyncio.subprocess.Process:
        listening = self._listening.fileno()
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tinkermq.envs.sandbox.served", str(listening)),
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environment, **ENVIRONMENT},
            pass_fds=[listening],
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
