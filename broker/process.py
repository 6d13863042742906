"""The tie between a process and its parent: what is started here ends with whoever started it."""

import ctypes
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
