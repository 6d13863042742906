"""Walls around the games that a pool with users hosts: they are code of a job's owner.

An environment host of such a pool runs in bubblewrap. It sees this interpreter and its packages,
the data files that its job names, and what the operator names in `$TINKERMQ_GAME_FOLDERS`, all
read-only; a /tmp and a home of its own, in memory; its own processes. It sees no run folder, no
file of the node, no other process, and of the node's environment only what `_VARIABLES` and
`$TINKERMQ_GAME_VARIABLES` name. It shares the network, over which it reaches the broker.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...broker.login import CA_VARIABLE
from ...broker.process import die_with
from ...envs.dataset import is_dataset_name
from ...envs.sandbox.program import bubblewrap_program, remedy
from ...envs.sandbox.watch import first_child
from ...schemas.errors import SandboxError
from ...schemas.node import WantedActor

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
_TRIAL_DEADLINE_S = 20.0


class EnclosedChild:
    """A process behind walls; bubblewrap stands before it and goes with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain; bubblewrap hands no signal on, and to end that would end all at once."""
        first = first_child(self.pid)
        actor = None if first is None else first_child(first)
        os.kill(actor or self.pid, signal.SIGTERM)


class Enclosure:
    """Starts environment hosts behind walls."""

    def __init__(self) -> None:
        self._tried = False

    async def start(
        self,
        command: Sequence[str],
        wanted: WantedActor,
        environment: Mapping[str, str],
        output: int,
    ) -> EnclosedChild:
        """Start the program of one; OSError where none can be enclosed, with the remedy."""
        try:
            walls = await asyncio.to_thread(self.walls, wanted)  # disks may be slow
            if not self._tried:
                await _try(walls)
                self._tried = True
        except SandboxError as error:
            raise OSError(f"{error.message}; {error.hint}") from error
        process = await asyncio.create_subprocess_exec(
            *walls,
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**_allowed(os.environ), **environment},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        return EnclosedChild(process)

    def walls(self, wanted: WantedActor) -> list[str]:
        """Return bubblewrap's command line up to the program that it is to run."""
        shown = [*_python(), *_named(FOLDERS_VARIABLE)]
        _refuse_runs(shown, Path(wanted.run_dir))
        data = (Path(one).expanduser().absolute() for one in wanted.reads)
        # by their names datasets: a game must not be shown whatever its owner calls data
        shown += [path for path in data if is_dataset_name(path) and path.is_file()]
        if authority := os.environ.get(CA_VARIABLE):
            shown.append(Path(authority))
        command = [bubblewrap_program(), "--die-with-parent", "--new-session"]
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        command += ["--unshare-pid", "--unshare-ipc", "--proc", "/proc", "--dev", "/dev"]
        command += ["--tmpfs", "/tmp"]  # noqa: S108 - its own, in memory
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                command += ["--symlink", str(path.readlink()), str(path)]
            else:
                command += ["--ro-bind-try", str(path), str(path)]
        etc = (Path("/etc", name) for name in _ETC)
        for path in [*etc, *sorted(set(shown))]:
            command += ["--ro-bind-try", str(path), str(path)]
        for folder in (Path.home(), Path.cwd()):
            command += ["--dir", str(folder)]
        return [*command, "--chdir", str(Path.cwd())]


async def _try(walls: list[str]) -> None:
    """Raise SandboxError if no program runs behind the walls."""
    process = await asyncio.create_subprocess_exec(
        *walls,
        "true",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with(os.getpid()),
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


def _named(variable: str) -> list[Path]:
    return [Path(one) for one in os.environ.get(variable, "").split(":") if one]


def _allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a game may see."""
    names = _VARIABLES.union(os.environ.get(VARIABLES_VARIABLE, "").split(":"))
    return {name: value for name, value in environment.items() if name in names}


def _refuse_runs(folders: Iterable[Path], run_dir: Path) -> None:
    """Raise SandboxError if what every game may see holds the runs of all."""
    for folder in folders:
        if run_dir.resolve().is_relative_to(folder.resolve()):
            raise SandboxError(
                f"games would see the run folders of all users in {folder}",
                hint="let the runs lie elsewhere (output_dir) than what games see: Python's own "
                f"folders, $PYTHONPATH and ${FOLDERS_VARIABLE}",
            )
