"""The ties between a process and others: its parent's end is its own, its secrets are nobody's."""

import ctypes
import itertools
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return what a child runs before all else: the kernel signals it when `parent` dies.

    Nothing may be imported between fork and exec, so all is loaded before. Elsewhere than on
    Linux it does nothing.
    """

    def in_child() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return in_child


def erase_variable(name: str) -> str:
    """Take a variable out of the environment and return its value, empty without one.

    Neither this process's children nor, on Linux, those who read `/proc/<pid>/environ` find it.
    """
    value = os.environ.get(name, "")
    if _LIBC is not None:
        start = f"{name}=".encode()
        variables = ctypes.POINTER(ctypes.c_void_p).in_dll(_LIBC, "environ")
        for address in itertools.takewhile(bool, (variables[n] for n in itertools.count())):
            text = ctypes.string_at(address)
            if text.startswith(start):
                ctypes.memset(address + len(start), 0, len(text) - len(start))
    os.environ.pop(name, None)
    return value
