"""Checks of GPUs that go wrong in each way that a check can."""

import os
import signal
import subprocess
import sys
import time

from tinkermq.schemas.checks import CheckSkipped


def pass_check() -> str:
    """Hold."""
    return "2 GPUs"


def skip() -> str:
    """Not apply here."""
    raise CheckSkipped("there is no card", hint="bring one")


def fail() -> str:
    """Raise an error that nobody foresaw."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")


def crash() -> str:
    """Die as a broken kernel lets a process die."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hang() -> str:
    """Wait for ever, with a child that does, too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(f"child {child.pid}", flush=True)
    time.sleep(1000)
    raise AssertionError
