"""One interpreter in bubblewrap, from outside: start it, give it programs, stop it.

Everything that is read from it is bounded and believed by nobody: what it prints goes to `text`, a
byte on `done` ends a program, and all else (limits, the end of its processes) is decided out here.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...schemas.wire.errors import SandboxError
from .mounts import PYTHON
from .program import first_process, unprivileged_user
from .settings import Outcome, SandboxSettings, Status
from .watch import descendants, exceeded, first_child

_LOOK_S = 0.05
_FREEZE_S = 0.5
_CHUNK = 1 << 16
_NUM_FILES = 256
_INSIDE = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
_launcher = ThreadPoolExecutor(1, thread_name_prefix="sandbox-launcher")
"""A sandbox dies with the thread that started it: this one lives as long as the process."""


class Enclosed:
    """A started sandbox; `run` programs in it, then `kill` it."""

    def __init__(
        self, bubblewrap: Sequence[str], filter_: bytes, settings: SandboxSettings
    ) -> None:
        """Start `bubblewrap`, a command line up to where the program stands.

        Raises SandboxError with what it said when it does not start.
        """
        self._settings = settings
        self._process, self._text, self._done, about = _launcher.submit(
            _launch, bubblewrap, filter_, settings
        ).result()
        assert self._process.stdin is not None
        self._programs = self._process.stdin.fileno()
        for file in (self._text, self._programs):
            os.set_blocking(file, False)
        self._poll = select.poll()
        for file in (self._text, self._done):
            self._poll.register(file, select.POLLIN)
        self.alive = True
        self._handle: int | None = None
        try:
            self._first = first_process(about)
        except ValueError:
            said = self._rest().decode(errors="replace").strip()
            self.kill()
            raise SandboxError(
                f"the sandbox does not start: {said or 'it ended without a word'}"
            ) from None
        self._handle = os.pidfd_open(self._first)

    def run(self, code: str, time_s: float | None = None) -> Outcome:
        """Run a program within the limits; after a limit or an exit the sandbox is dead."""
        time_s = min(self._settings.time_s, time_s or self._settings.time_s)
        encoded = code.encode("utf-8", "replace")
        frame = len(encoded).to_bytes(4, "little") + encoded
        started = time.monotonic()
        printed = bytearray()
        try:
            status = self._wait(frame, printed, started + time_s)
        except BrokenPipeError:
            status = "exited"
        if status not in ("ok", "error"):  # the program is still running, or gone with all else
            self.kill()
        most = self._settings.output_kb << 10
        text = printed[:most].decode("utf-8", "replace")
        return Outcome(text, status, time.monotonic() - started)

    def freeze(self) -> None:
        """Let nothing run between two programs: end what was left running, stop the rest.

        A sandbox that makes new processes faster than they can be ended is killed.
        """
        interpreter = first_child(self._first)
        if interpreter is not None:
            _signal(interpreter, signal.SIGSTOP)
            deadline = time.monotonic() + _FREEZE_S
            while time.monotonic() < deadline:
                left = set(descendants(self._first)) - {self._first, interpreter}
                if not left:
                    return
                for pid in left:
                    _signal(pid, signal.SIGKILL)
                time.sleep(_FREEZE_S / 500)
        self.kill()

    def thaw(self) -> None:
        """Let the interpreter go on after `freeze`."""
        interpreter = first_child(self._first)
        if interpreter is not None:
            _signal(interpreter, signal.SIGCONT)

    def kill(self) -> None:
        """End every process of the sandbox; returns when all are gone."""
        if not self.alive:
            return
        self.alive = False
        if self._handle is None:
            self._process.kill()
        else:
            # the end of the first process of a namespace is the end of all; bubblewrap follows it
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._text)
        os.close(self._done)

    def _wait(self, frame: bytes, printed: bytearray, deadline: float) -> Status:
        """Send a program, and collect what it prints until it has ended or is beyond a limit."""
        settings = self._settings
        look = time.monotonic() + _LOOK_S
        self._poll.register(self._programs, select.POLLOUT)
        while True:
            ready = dict(self._poll.poll(_LOOK_S * 1000))
            if frame and self._programs in ready:
                frame = frame[os.write(self._programs, frame) :]
                if not frame:
                    self._poll.unregister(self._programs)
            if self._text in ready and not self._collect(printed):
                self._poll.unregister(self._text)
            if len(printed) > settings.output_kb << 10:
                return "output"
            if self._done in ready:
                said = os.read(self._done, 1)
                self._collect(printed)
                return "ok" if said == b"." else "error" if said else "exited"
            now = time.monotonic()
            if now > deadline:
                return "time"
            if now > look:
                if (limit := exceeded(self._first, settings.memory_mb << 20)) is not None:
                    return limit
                look = now + _LOOK_S

    def _collect(self, printed: bytearray) -> bool:
        """Read what there is, as far as it is wanted; return whether there may be more."""
        while len(printed) <= self._settings.output_kb << 10:
            try:
                chunk = os.read(self._text, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            printed += chunk
        return True

    def _rest(self) -> bytes:
        os.set_blocking(self._text, True)
        return os.read(self._text, _CHUNK)


def _launch(
    bubblewrap: Sequence[str], filter_: bytes, settings: SandboxSettings
) -> tuple["subprocess.Popen[bytes]", int, int, int]:
    """Start the process; return it with our ends of what it prints, of `done` and of `about`."""
    text, text_in = os.pipe()
    done, done_in = os.pipe()
    about, about_in = os.pipe()
    rules, rules_in = os.pipe()
    os.write(rules_in, filter_)
    os.close(rules_in)
    # a user of its own, where the sandbox is started by root: limits are counted by user
    user = unprivileged_user() or 0
    arguments = [user, done_in, settings.memory_mb << 20, settings.disk_mb << 20]
    arguments += [settings.processes + 1, _NUM_FILES]
    command = [*bubblewrap, "--seccomp", str(rules), "--info-fd", str(about_in), "--"]
    command += [PYTHON, "-S", "-B", "-X", "utf8", "-c", _INSIDE, *map(str, arguments)]
    try:
        process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=text_in,
            stderr=text_in,
            pass_fds=(done_in, about_in, rules),
        )
    finally:
        for file in (text_in, done_in, about_in, rules):
            os.close(file)
    return process, text, done, about


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
