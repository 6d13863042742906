"""A process ends with its code, whatever its threads do."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from tinkermq.schemas.local.process import leave

def spin(started):
    started.set()
    while True:
        sum(range(100))

started = threading.Event()
if sys.argv[1] == "busy":
    threading.Thread(target=spin, args=(started,), daemon=True).start()
    started.wait()
atexit.register(print, "cleaned up")
sys.stdout.write("half a line ")
leave(3)
"""


@pytest.mark.parametrize("thread", ["busy", "none"])
def test_a_process_leaves_with_its_code_and_its_output_while_a_thread_computes(thread: str) -> None:
    command = [sys.executable, "-c", PROGRAM, thread]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "half a line cleaned up\n", "")
