"""The sandboxes of hosted games, and of learners with functions of users.

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

A learner that runs functions of its job's owner has the same sandbox, under the node's user id, in
a user namespace: it writes its own run's folder, and reads the models and data that its job names,
the cache of the hub's models, and its GPUs. It has no network except a connection to the broker
(`forwarding.py`), unless its owner is an admin.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from ...broker.client.login import CA_VARIABLE, KEY_VARIABLE
from ...envs.dataset import is_dataset_name
from ...envs.sandbox.bubblewrap import Program, SandboxProcess, start_in_thread
from ...envs.sandbox.sandbox import (
    SYSTEM_ETC,
    Mount,
    Sandbox,
    etc_mounts,
    memory_folder,
    python_variables,
    readable,
    system_mounts,
    unprivileged_user,
    writable,
)
from ...envs.sandbox.self_test import prove
from ...envs.sandbox.served import FOLDERS_VARIABLE, NETWORK, SOCKET, listen_at
from ...schemas.local.folder import Folder
from ...schemas.local.process import die_with
from ...schemas.node import WantedActor
from ...schemas.wire.errors import ConfigError, SandboxError, StorageError, TinkermqError
from ..storage.access import (
    MODELS_VARIABLE,
    is_of_another,
    own_folders,
    refuse_unshown_folder,
    shown_from,
    without_tilde,
)
from .forwarding import URL_VARIABLE, Forwarder

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
_ETC = (*SYSTEM_ETC, "group", "passwd")
_ETC_OF_NETWORK = ("hosts", "resolv.conf")
_ROOMS = ("actors", "broker", "clients", "envs", "schemas")
_OPTIONS = ("-I", "-S", "-B", "-X", "utf8")
_WHO = {"USER": "nobody", "LOGNAME": "nobody"}
"""The sandbox's user id is not in /etc/passwd."""
_OF_LEARNERS = frozenset(
    {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"}
    | {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TINKERMQ_LOG_FORMAT", "MLFLOW_TRACKING_URI"}
)
"""Further variables for learners; no key of the operator's is among them."""
_NEEDS_NETWORK = frozenset(
    {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"MLFLOW_TRACKING_URI", CA_VARIABLE}
)
"""Variables that are useless without a network, and may hold passwords."""
_COPIES = ("fork", "adapters", "models")
"""Folders of a run that the scheduler makes and other actors read."""
_PAUSE_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a machine or its network, not of rights: a second attempt may help."""


class PathRefused(SandboxError):
    """A path that a job names may not be shown to its processes; a retry does not help."""


class StartRefused(OSError):
    """An actor may not be started as its job requests it; a retry does not help."""

    @classmethod
    def of(cls, error: TinkermqError) -> "StartRefused":
        """Return the refusal with the message of an error."""
        return cls(f"{error.message}; {error.hint}")


class SandboxedActor:
    """An actor in a sandbox."""

    def __init__(
        self, process: SandboxProcess, interpreters: "InterpreterSocket", forwarder: Forwarder
    ) -> None:
        self._process = process
        self._interpreters = interpreters
        self._forwarder = forwarder
        self.pid = process.pid

    async def wait(self) -> int:
        """Wait for its end, and that of the code that it ran; return its exit code."""
        try:
            return await self._process.ended()
        finally:
            await self._forwarder.close()
            await self._interpreters.close()
            self._process.kill()
            self._process.close()

    def terminate(self) -> None:
        """Send SIGTERM so that it drains."""
        self._process.terminate()


class SandboxStarter:
    """Starts actors in sandboxes."""

    def __init__(self) -> None:
        self._proven = set[tuple[bool, bool]]()

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
        learns, shares = spec.own_code is not None, _shares_network(spec)
        variables = {**_allowed(os.environ, _OF_LEARNERS if learns else ()), **_WHO}
        interpreters = InterpreterSocket(_allowed(os.environ), has_network=shares)
        handles = _Handles()
        forwarder: Forwarder | None = None
        try:
            extra = {**environment}
            url = "" if shares else environment.get(URL_VARIABLE, "")
            forwarder = Forwarder(url, environment.get(KEY_VARIABLE, ""))
            if not shares:
                variables = {n: v for n, v in variables.items() if n not in _NEEDS_NETWORK}
                extra |= forwarder.environment()
                own = ("localhost", socket.gethostname().lower())
                interpreters.hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in own))
            program = Program(command, environment={**variables, **extra})
            sandbox = await asyncio.to_thread(
                self._proven_sandbox, spec, interpreters, forwarder, handles
            )
            process = await start_in_thread(sandbox, program, stdout=output, stderr=output)
            forwarder.serve(process.sockets)
        except BaseException as error:
            if forwarder is not None:
                await forwarder.close()
            await interpreters.close()
            if isinstance(error, PathRefused):
                raise StartRefused.of(error) from error
            if isinstance(error, SandboxError):
                raise OSError(f"{error.message}; {error.hint}") from error
            raise
        finally:
            handles.close()
        return SandboxedActor(process, interpreters, forwarder)

    def _proven_sandbox(
        self,
        spec: WantedActor,
        interpreters: "InterpreterSocket",
        forwarder: Forwarder,
        handles: "_Handles",
    ) -> Sandbox:
        """Return the sandbox of an actor; the first of a kind must pass its self-test."""
        kind = spec.own_code is not None, _shares_network(spec)
        sandbox = actor_sandbox(spec, interpreters, forwarder, handles)
        if kind not in self._proven:
            prove(sandbox)
            self._proven.add(kind)
        return sandbox


def actor_sandbox(
    spec: WantedActor,
    interpreters: "InterpreterSocket",
    forwarder: Forwarder,
    handles: "_Handles",
) -> Sandbox:
    """Return the sandbox of an actor; disks may be slow. Raises SandboxError."""
    learns, shares = spec.own_code is not None, _shares_network(spec)
    shown = [*_python(), *_named(FOLDERS_VARIABLE)]
    _refuse_runs(shown, Path(spec.run_dir))
    data = _read_by_learner(spec, handles) if learns else _data_files(spec)
    if authority := os.environ.get(CA_VARIABLE):
        shown.append(Path(authority))
    if unprivileged_user() is not None and not learns:
        _refuse_unreadable([*shown, *data.values()])
    etc = (*_ETC, *(_ETC_OF_NETWORK if shares else ()))
    here = _working_folder()
    return Sandbox(
        python=(sys.executable, *_OPTIONS),
        mounts=(
            memory_folder("/tmp"),  # noqa: S108 - its own
            memory_folder("/dev/shm"),  # noqa: S108 - its own
            *system_mounts(),
            *(Mount("folder", str(item), mode=0o1777) for item in sorted({Path.home(), here})),
            *etc_mounts(etc),
            *(readable(path, is_optional=True) for path in sorted(set(shown))),
            *(readable(path, place, is_optional=True) for path, place in data.items()),
            *(_run_folder(Path(spec.run_dir), handles) if learns else ()),
            *(_devices() if learns else ()),
            writable(SOCKET, interpreters.path),
            *(() if shares else (readable("/etc/hosts", interpreters.hosts),)),
        ),
        folder=str(here),
        is_read_only=False,  # its home and working folder lie in it, in memory
        is_ended_first=False,
        is_caller=learns,
        has_network=shares,
        has_memory_files=True,  # no limit is set for them
        listens=forwarder.listens,
        variables=python_variables(),
        fds=handles.fds,
    )


def _working_folder() -> Path:
    """Return the working folder of an actor: the node's, or the home folder if that is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path.home()


def _devices() -> Iterator[Mount]:
    """Yield the GPUs."""
    for device in sorted(Path("/dev").glob("nvidia*")):
        yield Mount("device", str(device), str(device), is_optional=True)


def _shares_network(spec: WantedActor) -> bool:
    """Return whether a program has the node's network, not only a connection to the broker."""
    return spec.own_code is None or spec.own_network


def _python() -> list[Path]:
    """Return the folders of the interpreter, its packages and this project."""
    root = Path(__file__).resolve().parents[2]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(root / room for room in _ROOMS),
        *(Path(item) for item in path if item),
    ]


def check_programs(spec: WantedActor) -> None:
    """Check the files of a host of agent programs, which is not in a sandbox itself.

    It does not run code of the job's owner, and each of its programs has a sandbox. It may read,
    and show them, only files that a hosted game would see. Raises PathRefused.
    """
    _data_files(spec)
    for folder in spec.programs or []:
        try:
            refuse_unshown_folder(without_tilde(folder.replace("\0", "?")).resolve(), spec)
        except ConfigError as error:
            raise PathRefused(error.message, hint=error.hint) from error


def _data_files(spec: WantedActor) -> dict[Path, Path]:
    """Return the real paths of a job's data files, by the paths that it names.

    Both must be names of datasets: a game must not see arbitrary files that its owner calls data,
    nor, through a link, a file of another user's run.
    """
    roots, own = [Path(root) for root in spec.output_roots], own_folders(spec)
    named = {path.absolute() for path in map(without_tilde, spec.reads) if path.is_file()}
    places = {path: path.resolve() for path in named if is_dataset_name(path)}
    for path, place in places.items():
        if place != path and (not is_dataset_name(place) or is_of_another(place, own, roots)):
            raise PathRefused(
                f"{path} leads to {place}, which is not a dataset of user {spec.user!r}",
                hint="name the file itself, or copy it",
            )
    return places


class _Handles:
    """Files and folders that are held open until bubblewrap has them, and their names for it.

    bubblewrap mounts what was opened without following a link, whatever happens to the path in
    between.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    def hold(self, fd: int) -> Path:
        self.fds.append(fd)
        return Path(f"/proc/self/fd/{fd}")

    def below(self, root: Path, path: Path) -> Path:
        """Open a regular file or a folder below a root; raises OSError, StorageError."""
        with Folder(root) as folder:
            name = str(path.relative_to(root))
            if name == "." or folder.has_folder(name):
                with folder.folder(name) as inner:
                    return self.hold(os.dup(inner.fileno()))
            with folder.open(name) as file:
                return self.hold(os.dup(file.fileno()))

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


def _run_folder(path: Path, handles: _Handles) -> Iterator[Mount]:
    """Yield the folder of a learner's run, with its copies read-only.

    Other actors of the job read the copies. Raises PathRefused for a folder replaced by a link.
    """
    yield writable(path, _opened(path, path, handles))
    with Folder(path) as folder:
        for name in _COPIES:
            if folder.has(name):
                yield readable(path / name, _opened(path, path / name, handles))


def _opened(root: Path, path: Path, handles: _Handles) -> Path:
    try:
        if os.path.realpath(root) != str(root):
            raise NotADirectoryError(errno.ENOTDIR, f"leads to {os.path.realpath(root)}")
        return handles.below(root, path)
    except (OSError, StorageError) as error:
        may_pass = isinstance(error, OSError) and error.errno in _MAY_PASS
        raise (SandboxError if may_pass else PathRefused)(
            f"{path} cannot be shown to functions of its owner: {error}",
            hint="the folder of a run, and what it reads, may be no link: remove it",
        ) from error


def _read_by_learner(spec: WantedActor, handles: _Handles) -> dict[Path, Path]:
    """Return a learner's models and data, held open, by the paths that it uses for them.

    Each must lie, after resolving links, in a folder of the operator's or the user's own, and is
    opened from there without following links: a writer of a folder may have made it a link since
    the job was accepted. Raises PathRefused.
    """
    roots = [Path(root) for root in spec.output_roots]
    named = map(without_tilde, spec.own_code or [])
    places: dict[Path, Path] = {}
    for path in sorted({path.absolute() for path in named if path.exists()}):
        place = path.resolve()
        root = shown_from(place, own_folders(spec), roots)
        if root is None:
            raise PathRefused(
                f"functions of user {spec.user!r} may not be shown {path}",
                hint=f"let the operator name its folder in ${MODELS_VARIABLE} of scheduler and "
                "nodes, or name a model or data in a run of your own",
            )
        places[path] = _opened(root, place, handles)
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return {**places, **({cache.absolute(): cache.resolve()} if cache.is_dir() else {})}


def _named(variable: str) -> list[Path]:
    return [Path(item) for item in os.environ.get(variable, "").split(":") if item]


def _allowed(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that code of users may see."""
    names = _VARIABLES.union(os.environ.get(VARIABLES_VARIABLE, "").split(":"), more)
    return {name: value for name, value in environment.items() if name in names}


def _refuse_runs(folders: Iterable[Path], run_dir: Path) -> None:
    """Raise PathRefused if a folder that every game may see contains the runs of all users."""
    for folder in folders:
        if run_dir.resolve().is_relative_to(folder.resolve()):
            raise PathRefused(
                f"games would see the run folders of all users in {folder}",
                hint="let the runs lie elsewhere (output_dir) than what games see: Python's own "
                f"folders, $PYTHONPATH and ${FOLDERS_VARIABLE}",
            )


def _refuse_unreadable(paths: Iterable[Path]) -> None:
    """Raise PathRefused for files that only root may read: the game runs under another user id."""
    for path in paths:
        needed = 0o005 if path.is_dir() else 0o004
        if path.exists() and path.stat().st_mode & needed != needed:
            raise PathRefused(
                f"hosted games may not read {path}: a node of root starts them as an unused user",
                hint=f"chmod -R o+rX {path}",
            )


class InterpreterSocket:
    """Runs code of a model for a sandboxed actor, outside of that sandbox.

    The server starts with the first connection, and again if it ends.
    """

    def __init__(self, environment: Mapping[str, str], *, has_network: bool) -> None:
        """Listen from now on; `environment` is that of the server.

        Programs of an actor that `has_network` may have a network. Raises OSError, with the remedy,
        if a socket cannot be made.
        """
        folders = os.environ.get(FOLDERS_VARIABLE)
        self._environment = {**environment, **({FOLDERS_VARIABLE: folders} if folders else {})}
        self._arguments = [NETWORK] if has_network else []
        self._folder = Path(tempfile.mkdtemp(prefix="tinkermq-"))
        self.path = self._folder / "socket"
        self.hosts = self._folder / "hosts"
        """A file for /etc/hosts of the actor."""
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
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environment, **ENVIRONMENT},
            pass_fds=[listening],
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
