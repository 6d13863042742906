"""Walls around the games that a pool with users hosts: they are code of a job's owner.

An environment host of such a pool runs in bubblewrap. It sees this interpreter and its packages,
the data files that its job names, and what the operator names in `$TINKERMQ_GAME_FOLDERS`, all
read-only; a /tmp and a home of its own, in memory; its own processes. It sees no run folder, no
file of the node, no other process, and of the node's environment only what `_VARIABLES` and
`$TINKERMQ_GAME_VARIABLES` name. It shares the network, over which it reaches the broker.

It runs as a user that nobody is: the kernel lets root's number write its settings whatever else was
taken from it. A node run by root sets the walls up as root and gives its rights and its number up
before the game starts; one run by an ordinary user takes a user namespace. Either way a seccomp
filter refuses namespaces, mounts, tracing and the like, so no game makes walls, or a /proc, of its
own: its programs of a model run outside, in sandboxes that the node starts (`sandboxes.py`).

A host of agent programs runs no code of a job's owner and stands outside; its programs do not
(`envs/agents/programs`).

A learner that runs functions of its job's owner stands behind the same walls, as the user that the
node is, in a user namespace: it writes its own run's folder, and reads the models and data that its
job names, the cache of the hub's models, and its GPUs. It has no network but a way to the broker
(`forwarding.py`), unless its owner is an admin.
"""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...broker.client.login import CA_VARIABLE
from ...broker.disk.run_folder import Folder
from ...broker.programs.process import die_with
from ...envs.dataset import is_dataset_name
from ...envs.sandbox.program import bubblewrap_program, remedy, unprivileged_user
from ...envs.sandbox.seccomp import game_filter
from ...envs.sandbox.served import SOCKET
from ...envs.sandbox.watch import first_child
from ...schemas.node import WantedActor
from ...schemas.wire.errors import SandboxError, StorageError, TinkermqError
from ..folders.roots import MODELS_VARIABLE, is_of_another, shown_from
from .forwarding import URL_VARIABLE, Forwarder
from .sandboxes import SandboxSocket

FOLDERS_VARIABLE = "TINKERMQ_GAME_FOLDERS"
"""Further folders for games, joined by `:`, such as packages and data of theirs."""
VARIABLES_VARIABLE = "TINKERMQ_GAME_VARIABLES"
"""Further variables of the node's environment for games, joined by `:`."""
_VARIABLES = frozenset(
    {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    | {"LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "http_proxy"}
    | {"https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", CA_VARIABLE}
    | {"TINKERMQ_DEBUG", "TINKERMQ_LOG_LEVEL"}
)
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
_ETC = (
    *("alternatives", "ca-certificates", "fonts", "group", "host.conf", "hosts", "ld.so.cache"),
    *("ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki"),
    *("protocols", "resolv.conf", "services", "ssl", "timezone"),
)
_ROOMS = ("actors", "broker", "clients", "envs", "schemas")
_PROC_SETTINGS = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_WHO = {"USER": "nobody", "LOGNAME": "nobody"}
"""Its number stands in no list of users."""
_OF_LEARNERS = frozenset(
    {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME"}
    | {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TINKERMQ_LOG_FORMAT", "MLFLOW_TRACKING_URI"}
)
"""Further variables for learners; no key of the operator's is among them."""
_NEEDS_NETWORK = frozenset(
    {"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    | {"MLFLOW_TRACKING_URI"}
)
"""Of no use without one, and they may hold passwords."""
_OF_NETWORK = ("hosts", "resolv.conf")
_COPIES = ("fork", "adapters", "models")
"""Folders of a run that the scheduler makes, and other actors read."""
_TRIAL_DEADLINE_S = 20.0
_DROP = """
import ctypes, os, sys
libc, user = ctypes.CDLL(None), int(sys.argv[1])
right, drop_right = 0, 24
while not libc.prctl(drop_right, right, 0, 0, 0):
    right += 1
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
libc.capset((ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)())
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Runs before the game: gives up every right, for good, and becomes somebody else."""
_CLOSE = """
import os, sys
os.closerange(3, 1 << 20)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs before a learner: a folder that bubblewrap was handed open would lead out by `..`."""


class EnclosedChild:
    """A process behind walls; bubblewrap stands before it and goes with it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        sandboxes: SandboxSocket,
        forwarder: Forwarder | None,
    ) -> None:
        self._process = process
        self._sandboxes = sandboxes
        self._forwarder = forwarder
        self.pid = process.pid

    async def wait(self) -> int:
        """Wait for its end, and that of the programs it has asked for; return its exit code."""
        try:
            return await self._process.wait()
        finally:
            if self._forwarder is not None:
                await self._forwarder.close()
            await self._sandboxes.close()

    def terminate(self) -> None:
        """Ask it to drain; bubblewrap hands no signal on, and to end that would end all at once."""
        first = first_child(self.pid)
        actor = None if first is None else first_child(first)
        os.kill(actor or self.pid, signal.SIGTERM)


_MAY_PASS = frozenset({errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Of a machine or its network, not of rights."""


class NotShown(SandboxError):
    """What a job names may not be shown to what runs for it: no second try changes that."""


class StartRefused(OSError):
    """An actor may not be started as its job asks for it: no second try changes that."""

    @classmethod
    def of(cls, error: TinkermqError) -> "StartRefused":
        """Say it as the error does."""
        return cls(f"{error.message}; {error.hint}")


class Enclosure:
    """Starts environment hosts behind walls."""

    def __init__(self) -> None:
        self._tried = set[tuple[bool, bool]]()

    async def start(
        self,
        command: Sequence[str],
        wanted: WantedActor,
        environment: Mapping[str, str],
        output: int,
    ) -> EnclosedChild:
        """Start the program of one; OSError where none can be enclosed, with the remedy.

        StartRefused where it may not be shown what its job names.
        """
        learns, shares = wanted.own_code is not None, _shares_network(wanted)
        variables = {**_allowed(os.environ, _OF_LEARNERS if learns else ()), **_WHO}
        sandboxes = SandboxSocket(_allowed(os.environ))
        handles = _Handles()
        forwarder: Forwarder | None = None
        try:
            # disks may be slow
            arguments = await asyncio.to_thread(self._arguments, wanted, handles)
            arguments += ["--bind", str(sandboxes.path), str(SOCKET)]
            program, given = _closed(command) if learns else _dropped(command), {**environment}
            if not shares:
                variables = {n: v for n, v in variables.items() if n not in _NEEDS_NETWORK}
                forwarder = Forwarder(environment.get(URL_VARIABLE, ""))
                hosts = sandboxes.path.with_name("hosts")
                hosts.write_text(forwarder.hosts)
                arguments += ["--unshare-net", "--ro-bind", str(hosts), "/etc/hosts"]
                program, given = forwarder.command(program), {**given, **forwarder.environment()}
            if (learns, shares) not in self._tried:
                trial = [*arguments, "--", *(["true"] if learns else _dropped(["true"]))]
                await _try(trial, handles.fds)
                self._tried.add((learns, shares))
            process = await _start(
                [*arguments, "--", *program],
                [*handles.fds, *([forwarder.fd] if forwarder is not None else [])],
                {**variables, **given},
                stdout=output,
                stderr=output,
            )
            if forwarder is not None:
                forwarder.serve()
        except BaseException as error:
            if forwarder is not None:
                await forwarder.close()
            await sandboxes.close()
            if isinstance(error, NotShown):
                raise StartRefused.of(error) from error
            if isinstance(error, SandboxError):
                raise OSError(f"{error.message}; {error.hint}") from error
            raise
        finally:
            handles.close()
        return EnclosedChild(process, sandboxes, forwarder)

    def _arguments(self, wanted: WantedActor, handles: "_Handles") -> list[str]:
        """Return bubblewrap's command line up to the program that it is to run."""
        shown = [*_python(), *_named(FOLDERS_VARIABLE)]
        _refuse_runs(shown, Path(wanted.run_dir))
        learns = wanted.own_code is not None
        data = _read_by_learner(wanted, handles) if learns else _data_files(wanted)
        if authority := os.environ.get(CA_VARIABLE):
            shown.append(Path(authority))
        command = [
            bubblewrap_program(),
            "--die-with-parent",
            "--new-session",
            *_rights(as_itself=learns),
        ]
        command += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for name in _PROC_SETTINGS:
            command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
        for folder in ("/tmp", "/dev/shm"):  # noqa: S108 - its own, in memory
            command += ["--perms", "1777", "--tmpfs", folder]
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                command += ["--symlink", str(path.readlink()), str(path)]
            else:
                command += ["--ro-bind-try", str(path), str(path)]
        absent = () if _shares_network(wanted) else _OF_NETWORK
        etc = (Path("/etc", name) for name in _ETC if name not in absent)
        if unprivileged_user() is not None and not learns:
            _refuse_unreadable([*shown, *data.values()])
        own, shown = {Path.home(), Path.cwd()}, [*etc, *sorted(set(shown))]
        written = [Path(wanted.run_dir)] if learns else []
        above = {parent for path in [*own, *shown, *data, *written] for parent in path.parents}
        for folder in sorted(above | own):
            command += ["--perms", "1777" if folder in own else "0755", "--dir", str(folder)]
        for path in shown:
            command += ["--ro-bind-try", str(path), str(path)]
        for path, place in data.items():
            command += ["--ro-bind-try", str(place), str(path)]
        for path in written:
            command += _run_folder(path, handles)
        for device in sorted(Path("/dev").glob("nvidia*")) if learns else ():
            command += ["--dev-bind-try", str(device), str(device)]
        return [*command, "--chdir", str(Path.cwd())]


def _shares_network(wanted: WantedActor) -> bool:
    """Whether a program has the network of the node, and not only a way to the broker."""
    return wanted.own_code is None or wanted.own_network


def _rights(*, as_itself: bool) -> list[str]:
    """Return what takes the rights of root: those it needs to become somebody else go later.

    A learner writes files of the node's user, so it stays that one, without a right.
    """
    if as_itself:
        who = ["--uid", str(os.getuid()), "--gid", str(os.getgid())]
        return ["--unshare-user", *who, "--cap-drop", "ALL"]
    if unprivileged_user() is None:
        return ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")
    return ["--cap-drop", "ALL", *(word for one in rights for word in ("--cap-add", one))]


def _dropped(command: Sequence[str]) -> list[str]:
    """Return what runs a program as nobody, where root has set the walls up."""
    user = unprivileged_user()
    if user is None:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _DROP, str(user), *command]


def _closed(command: Sequence[str]) -> list[str]:
    """Return what runs a program with no file open but the usual three."""
    return [sys.executable, "-I", "-S", "-c", _CLOSE, *command]


async def _start(
    command: Sequence[str],
    fds: Sequence[int],
    environment: Mapping[str, str],
    **settings: Any,
) -> asyncio.subprocess.Process:
    """Start bubblewrap with the filter of system calls, and with descriptors that it may name.

    The program has the environment, with the keys of its job, and bubblewrap itself has none.
    """
    given = [word for name, value in environment.items() for word in ("--setenv", name, value)]
    rules, words = _memory_file(game_filter()), _memory_file("\0".join(given).encode())
    try:
        return await asyncio.create_subprocess_exec(
            *[command[0], "--args", str(words), "--seccomp", str(rules), *command[1:]],
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[rules, words, *fds],
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
            env={},
            **settings,
        )
    finally:
        os.close(rules)
        os.close(words)


def _memory_file(data: bytes) -> int:
    file = os.memfd_create("bubblewrap")
    os.write(file, data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


async def _try(command: list[str], fds: Sequence[int]) -> None:
    """Raise SandboxError if a program that does nothing does not run behind the walls."""
    process = await _start(
        command,
        fds,
        {},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TRIAL_DEADLINE_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SandboxError("bubblewrap hangs", hint="see the machine's load") from None
    if process.returncode:
        text = said.decode(errors="replace").strip()
        raise SandboxError(f"games of users cannot be enclosed: {text}", hint=remedy(text))


def _python() -> list[Path]:
    """Return where the interpreter, its packages and this project lie."""
    root = Path(__file__).resolve().parents[2]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(root / room for room in _ROOMS),
        *(Path(one) for one in path if one),
    ]


def check_programs(wanted: WantedActor) -> None:
    """Look at what a host of agent programs reads; it stands outside of these walls itself.

    It runs no code of the job's owner, and each of its programs has walls of its own. What it shows
    to them, and its data, may be no more than a hosted game would see. Raises NotShown.
    """
    _data_files(wanted)
    roots = [Path(root) for root in wanted.output_roots]
    named = [one.resolve() for one in (*_python(), *_named(FOLDERS_VARIABLE))]
    for folder in wanted.programs or []:
        path = Path(folder).expanduser().resolve()
        is_own = any(path.is_relative_to(root.resolve()) for root in roots) and not is_of_another(
            path, wanted.user, roots
        )
        if not is_own and not any(path.is_relative_to(one) for one in named):
            raise NotShown(
                f"agent programs of user {wanted.user!r} may not be shown {folder!r}",
                hint="name a folder in a run of theirs, or let the operator name it in "
                f"${FOLDERS_VARIABLE} of the nodes",
            )


def _data_files(wanted: WantedActor) -> dict[Path, Path]:
    """Return where the data files of a job lie, links followed, by the names that it gives them.

    Both must be names of datasets: a game must not be shown whatever its owner calls data, nor, by
    a link, what lies in a run of somebody else.
    """
    roots = [Path(root) for root in wanted.output_roots]
    named = {Path(one).expanduser().absolute() for one in wanted.reads}
    places = {path: path.resolve() for path in named if is_dataset_name(path) and path.is_file()}
    for path, place in places.items():
        if place != path and (
            not is_dataset_name(place) or is_of_another(place, wanted.user, roots)
        ):
            raise NotShown(
                f"{path} leads to {place}, which is no dataset of user {wanted.user!r}",
                hint="name the file itself, or copy it",
            )
    return places


class _Handles:
    """Files and folders that are held open until bubblewrap has them, and their names for it.

    What is opened without following a link is what bubblewrap shows, whatever is done to the path
    in between.
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


def _run_folder(path: Path, handles: _Handles) -> list[str]:
    """Return what shows a learner the folder of its run, the copies in it read-only.

    Other actors of the job read these. Raises NotShown for a folder that was made a link.
    """
    arguments = ["--bind", str(_opened(path, path, handles)), str(path)]
    with Folder(path) as folder:
        for name in _COPIES:
            if folder.has(name):
                place = path / name
                arguments += ["--ro-bind", str(_opened(path, place, handles)), str(place)]
    return arguments


def _opened(root: Path, path: Path, handles: _Handles) -> Path:
    try:
        if os.path.realpath(root) != str(root):
            raise NotADirectoryError(errno.ENOTDIR, f"leads to {os.path.realpath(root)}")
        return handles.below(root, path)
    except (OSError, StorageError) as error:
        may_pass = isinstance(error, OSError) and error.errno in _MAY_PASS
        raise (SandboxError if may_pass else NotShown)(
            f"{path} cannot be shown to functions of its owner: {error}",
            hint="the folder of a run, and what it reads, may be no link: remove it",
        ) from error


def _read_by_learner(wanted: WantedActor, handles: _Handles) -> dict[Path, Path]:
    """Return models and data of a learner, held open, by the names that it has for them.

    Each must lie, links followed, where the operator's folders or the user's own let it, and is
    opened from there without following one: whoever may write a folder may have made it a link
    since the job was accepted. Raises NotShown.
    """
    roots = [Path(root) for root in wanted.output_roots]
    named = {Path(one).expanduser().absolute() for one in wanted.own_code or []}
    places: dict[Path, Path] = {}
    for path in sorted(one for one in named if one.exists()):
        place = path.resolve()
        root = shown_from(place, wanted.user, roots)
        if root is None:
            raise NotShown(
                f"functions of user {wanted.user!r} may not be shown {path}",
                hint=f"let the operator name its folder in ${MODELS_VARIABLE} of scheduler and "
                "nodes, or name a model or data in a run of your own",
            )
        places[path] = _opened(root, place, handles)
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser().absolute()
    return {**places, **({cache: cache.resolve()} if cache.is_dir() else {})}


def _named(variable: str) -> list[Path]:
    return [Path(one) for one in os.environ.get(variable, "").split(":") if one]


def _allowed(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that code of users may see."""
    names = _VARIABLES.union(os.environ.get(VARIABLES_VARIABLE, "").split(":"), more)
    return {name: value for name, value in environment.items() if name in names}


def _refuse_runs(folders: Iterable[Path], run_dir: Path) -> None:
    """Raise NotShown if what every game may see holds the runs of all."""
    for folder in folders:
        if run_dir.resolve().is_relative_to(folder.resolve()):
            raise NotShown(
                f"games would see the run folders of all users in {folder}",
                hint="let the runs lie elsewhere (output_dir) than what games see: Python's own "
                f"folders, $PYTHONPATH and ${FOLDERS_VARIABLE}",
            )


def _refuse_unreadable(paths: Iterable[Path]) -> None:
    """Raise NotShown for what only root may read: the game is somebody else."""
    for path in paths:
        needed = 0o005 if path.is_dir() else 0o004
        if path.exists() and path.stat().st_mode & needed != needed:
            raise NotShown(
                f"hosted games may not read {path}: a node that root runs lets them run as nobody",
                hint=f"chmod -R o+rX {path}",
            )
