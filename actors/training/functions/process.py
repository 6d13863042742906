"""Start the process of a learner's own functions, in a pool with users in a sandbox.

The sandbox is that of piped programs (`envs/sandbox/piped.py`): no network, no file of the host but
the interpreter, its packages and the operator's folders for games, an unprivileged user, and bounds
on memory, processes and files. The process has one descriptor of the learner's besides its output:
the socket of its requests.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ....envs.sandbox.piped import LocalPipedProgram, PipedProgram, PipedSettings
from ....envs.sandbox.shown import code_folders, refuse_runs
from ....schemas.local.process import die_with

MEMORY_MB = 4096
"""Memory of a sandboxed process of functions."""
_PROCESSES = 256
_DISK_MB = 64
_STDERR = 2
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
_starter = ThreadPoolExecutor(1, thread_name_prefix="functions")
"""Thread that starts processes: they end with it, so it runs as long as this process."""


def start_process(threads: int, hidden: Path | None) -> tuple[PipedProgram, socket.socket]:
    """Start the process; return it and the socket to it.

    In a pool with users it is sandboxed, and must not see `hidden`, the run's folder. Raises
    SandboxError, with the remedy.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            if hidden is None:
                return _ChildProcess(theirs, threads), ours
            return LocalPipedProgram(_settings(threads, hidden), theirs.fileno(), _STDERR), ours
        except BaseException:
            ours.close()
            raise


def _command(threads: int, python: str) -> list[str]:
    return [python, "-P", "-m", "tinkermq.actors.training.functions.worker", str(threads)]


def _settings(threads: int, hidden: Path) -> PipedSettings:
    folders = code_folders()
    refuse_runs(folders, hidden)
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *_working_folder()]
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return PipedSettings(
        command=_command(threads, "{python}"),
        environment={
            **dict.fromkeys(_THREADS, str(threads)),
            **_NO_GPUS,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
        },
        read=[str(folder.absolute()) for folder in folders if folder.exists()],
        memory_mb=MEMORY_MB,
        processes=_PROCESSES,
        disk_mb=_DISK_MB,
    )


def _working_folder() -> Sequence[str]:
    try:
        return [str(Path.cwd())]
    except FileNotFoundError:
        return []


class _ChildProcess:
    """The process in a pool without users: a plain child."""

    def __init__(self, theirs: socket.socket, threads: int) -> None:
        """Start it; it dies with this process."""
        environment: Mapping[str, str] = {
            **os.environ,
            **dict.fromkeys(_THREADS, str(threads)),
            **_NO_GPUS,
        }
        self._process = _starter.submit(
            subprocess.Popen[bytes],
            _command(threads, sys.executable),
            stdin=theirs.fileno(),
            env=environment,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        ).result()

    def end(self, grace_s: float = 0.0) -> str:
        """Wait up to `grace_s`, then kill it; return how it ended. Blocks; may be repeated."""
        try:
            exit_code = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "was ended"
        return f"exited with code {exit_code}"
