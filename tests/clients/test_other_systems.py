"""The client needs no module that only Unix has: it is meant to run on Windows, too."""

import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE_S

UNIX_ONLY = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop")


@pytest.mark.parametrize(
    "words", ["ps --nats-url nats://127.0.0.1:1", "config schema env", "env list", "user --help"]
)
def test_commands_of_users_run_without_what_only_unix_has(words: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({UNIX_ONLY}))\n"
        "import tinkermq.clients\n"
        "from tinkermq.clients.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in done.stderr
    if words.startswith("ps"):
        assert "cannot connect" in done.stderr.lower() or "127.0.0.1:1" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr
