"""Checks that do all that a check can do wrong."""

import os
import signal
import subprocess
import sys
import time

from tinkermq.actors.acceptance.figures import CheckSkipped, Figure, Found, Setting


def well(setting: Setting) -> Found:
    """Hold."""
    return Found([Figure("figures", 2, at_least=2)], {"driver": "none"})


def slow(setting: Setting) -> Found:
    """Be slower than is expected."""
    return Found([Figure("speed", 3, "GB/s", at_least=10), Figure("lag", 1, at_most=2)])


def meaningless(setting: Setting) -> Found:
    """Mean nothing here."""
    raise CheckSkipped("there is no card", hint="bring one")


def wrong(setting: Setting) -> Found:
    """Meet an error that nobody foresaw."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more lines")


def crash(setting: Setting) -> Found:
    """Die as a broken kernel lets a process die."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hang(setting: Setting) -> Found:
    """Wait for ever, with a child that does, too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(f"child {child.pid}", flush=True)
    time.sleep(1000)
    raise AssertionError
