"""Run the command line as users do, as a process; or in this process, where that shows as much.

A new process spends half a second of a core on imports.
"""

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tinkermq.clients.cli import main

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


def tinkermq_here(*words: str, env: Mapping[str, str] | None = None) -> Outcome:
    """Run one command to its end in this process; not two at a time."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    variables = {"TINKERMQ_HOME": "/nonexistent", **(env or {})}
    with (
        patch.dict(os.environ, variables),
        redirect_stdout(out),
        redirect_stderr(err),
        ThreadPoolExecutor(1) as thread,  # a command has an event loop of its own
    ):
        code = thread.submit(main, words).result()
    return Outcome(code, _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def command(words: Sequence[str]) -> list[str]:
    """Return the process's command line."""
    return [
        sys.executable,
        "-c",
        "import sys; from tinkermq.clients.cli import main; sys.exit(main())",
        *words,
    ]
