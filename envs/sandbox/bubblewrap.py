"""The sandbox of bubblewrap: namespaces of its own, a root of its own, limits by the kernel.

Run by an ordinary user, bubblewrap makes a user namespace; run by root it needs none, and the
interpreter inside takes on a user that nobody else is. What it needs of the machine is told by
`self_test`, which every process that runs programs calls once.
"""

import contextlib
import os
import threading
import weakref
from dataclasses import replace
from typing import Self

from ...schemas.wire.errors import SandboxError
from .enclosed import Enclosed
from .mounts import PACKAGES, package_mounts, system_mounts
from .program import bubblewrap_program, remedy, unprivileged_user
from .seccomp import program_filter
from .self_test import PROBE, check_answer
from .settings import Outcome, SandboxSettings, too_long

_UNBOUNDED = 1 << 20
_NAMESPACES = ("pid", "net", "ipc", "uts")
_NICETIES = {"hostname": ["--hostname", "sandbox"], "proc": ["--proc", "/proc"]}
"""What some machines refuse (ProtectHostname of systemd, a masked /proc) and programs can do
without: they then see the machine's name, or no /proc at all."""
_REFUSALS = {"hostname": "set hostname", "proc": "mount proc"}
_TMP = "/tmp"  # noqa: S108 - the sandbox's own, in memory
_VARIABLES = {
    "HOME": _TMP,
    "LD_LIBRARY_PATH": "/python/lib",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": PACKAGES,
}


class Bubblewrap:
    """Interpreters in bubblewrap, of which `at_once` run at the same time."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Prepare; SandboxError for a machine without bubblewrap, ConfigError for a package."""
        self._settings = settings
        self._filter = program_filter()
        self._mounts = [*system_mounts(), *package_mounts(settings.packages)]
        self._program = bubblewrap_program()
        self._niceties = dict(_NICETIES)
        cores = len(os.sched_getaffinity(0))
        self._places = threading.BoundedSemaphore(settings.at_once or cores)
        kept = settings.max_sessions if settings.keep_state else _UNBOUNDED
        self._sessions = threading.BoundedSemaphore(kept)

    def session(self) -> "BubblewrapSession":
        """Return an enclosed interpreter, which starts with its first program."""
        return BubblewrapSession(self, self._places, self._sessions)

    def start(self) -> Enclosed:
        """Start an interpreter in a sandbox."""
        return Enclosed(self._command(), self._filter, self._settings)

    def self_test(self) -> str:
        """Prove that the sandbox encloses; SandboxError says what fails, and the remedy."""
        while True:
            try:
                check_answer(self._probe())
                break
            except SandboxError as error:
                said = error.message
                refused = next((one for one in self._niceties if _REFUSALS[one] in said), None)
                if refused is None:
                    raise SandboxError(said, hint=error.hint or remedy(said)) from error
                self._niceties.pop(refused)
        who = "user namespaces" if unprivileged_user() is None else "root"
        without = [f"without {name}" for name in _NICETIES if name not in self._niceties]
        told = ", ".join([who, *without])
        return f"bubblewrap at {self._program} encloses programs ({told})"

    def _probe(self) -> Outcome:
        settings = self._settings
        limits = f"memory, disk, processes = {settings.memory_mb}, {settings.disk_mb}, "
        with contextlib.closing(self.session()) as session:
            return session.run(f"{limits}{settings.processes}\n{PROBE}")

    def _command(self) -> list[str]:
        command = [self._program, "--die-with-parent", "--new-session", "--clearenv"]
        command += [f"--unshare-{name}" for name in _NAMESPACES]
        command += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        if unprivileged_user() is not None:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        for name, value in _VARIABLES.items():
            command += ["--setenv", name, value]
        size = str(self._settings.disk_mb << 20)
        command += [*self._mounts, "--dev", "/dev", "--remount-ro", "/dev"]
        for arguments in self._niceties.values():
            command += arguments
        command += ["--perms", "1777", "--size", size, "--tmpfs", _TMP]
        return [*command, "--remount-ro", "/", "--chdir", _TMP]


class BubblewrapSession:
    """A sandbox that is kept between programs, in which nothing runs meanwhile."""

    def __init__(
        self,
        sandbox: Bubblewrap,
        places: threading.BoundedSemaphore,
        sessions: threading.BoundedSemaphore,
    ) -> None:
        self._sandbox = sandbox
        self._places = places
        self._sessions = sessions
        self._enclosed: Enclosed | None = None
        self._finalizer: weakref.finalize[[Enclosed, threading.BoundedSemaphore], Self] | None
        self._finalizer = None

    def run(self, code: str, time_s: float | None = None) -> Outcome:
        """Run a program after those before it; one that was stopped takes its state with it."""
        if (refused := too_long(code)) is not None:
            return refused
        with self._places:
            enclosed = self._living()
            enclosed.thaw()
            outcome = enclosed.run(code, time_s)
            if enclosed.alive:
                enclosed.freeze()
            if enclosed.alive:
                return outcome
            self.close()
            return outcome if outcome.lost_state else replace(outcome, status="exited")

    def close(self) -> None:
        """End the sandbox."""
        if self._finalizer is not None:
            self._finalizer()
        self._enclosed = None

    def _living(self) -> Enclosed:
        if self._enclosed is not None:
            return self._enclosed
        if not self._sessions.acquire(blocking=False):
            raise SandboxError(
                "no more episodes can keep their state: max_sessions are running",
                hint="raise env.kwargs.sandbox.max_sessions, or lower generator.max_episodes",
            )
        try:
            self._enclosed = self._sandbox.start()
        except SandboxError:
            self._sessions.release()
            raise
        # an episode that is forgotten takes its sandbox with it
        self._finalizer = weakref.finalize(self, _end, self._enclosed, self._sessions)
        return self._enclosed


def _end(enclosed: Enclosed, sessions: threading.BoundedSemaphore) -> None:
    enclosed.kill()
    sessions.release()
