"""One child process of the supervisor: a scheduler or a node that is started again when it dies."""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from ....broker.service_process import die_with
from ....schemas.wire.errors import TinkermqError, error_from_reply

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0
HEALTHY_S = 30.0


class StackProcess:
    """A process that shall always run."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        """Describe it; `start` starts it. Its output is appended to `log`."""
        self.name = name
        self.log = log
        self.restarts = 0
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause_s = FIRST_PAUSE_S

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """Exit code of a process that has ended."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start the process; the kernel kills it when the supervisor dies."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        self._started = time.monotonic()

    def revive(self) -> bool:
        """Start it again if it has died and its pause is over; return whether it was started."""
        if self.pid is not None:
            return False
        alive_s = time.monotonic() - self._started
        if alive_s >= HEALTHY_S:
            self._pause_s = FIRST_PAUSE_S
        if alive_s < self._pause_s:
            return False
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        self.restarts += 1
        self.start()
        return True

    def stop(self, deadline_s: float) -> None:
        """Stop it with SIGTERM, and with SIGKILL once the deadline is over."""
        if self._process is None or self.pid is None:
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> TinkermqError:
        """Return why it ended, from the last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            told = _told(line)
            if told is not None:
                return told
        shown = "\n".join([line for line in lines if line.strip()][-5:]) or "it said nothing"
        return TinkermqError(
            f"the {self.name} ended with code {self.exit_code}: {shown}", hint=f"see {self.log}"
        )


def _told(line: str) -> TinkermqError | None:
    """Return the error in an actor's last log line (`actor_failed`), if this is one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    fields = cast("dict[str, str]", entry)
    if fields.get("event") != "actor_failed":
        return None
    return error_from_reply(fields["code"], fields["message"], fields.get("hint", ""))
