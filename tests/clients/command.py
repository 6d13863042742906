"""Run the command line as users do: as a process."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.waiting import PATIENCE_S


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def tinkermq(
    *words: str,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout: float = PATIENCE_S,
    cwd: Path | None = None,
) -> Outcome:
    """Run one command to its end."""
    process = subprocess.run(
        command(words),
        input=stdin,
        capture_output=True,
        env={**os.environ, "TINKERMQ_HOME": "/nonexistent", **(env or {})},
        timeout=timeout,
        cwd=cwd,
        check=False,
    )
    return Outcome(process.returncode, process.stdout.decode(), process.stderr.decode())


def command(words: Sequence[str]) -> list[str]:
    """Return the process's command line."""
    return [
        sys.executable,
        "-c",
        "import sys; from tinkermq.clients.cli import main; sys.exit(main())",
        *words,
    ]
