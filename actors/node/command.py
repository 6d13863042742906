"""How an actor's process is started: command line, environment, tie to its node's life.

Secrets never stand on a command line: the broker's URL travels in the environment.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from ...schemas.node import WantedActor

Command = Callable[[WantedActor], list[str]]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def actor_command(wanted: WantedActor) -> list[str]:
    """Return the command line of an actor."""
    module = f"tinkermq.actors.{wanted.role}"
    names = ["--user", wanted.user, "--job", wanted.job, "--name", wanted.name]
    return [sys.executable, "-m", module, *names]


def actor_environment(wanted: WantedActor, nats_url: str) -> dict[str, str]:
    """Return the node's environment with what the actor needs; threads are set before torch."""
    return {
        **os.environ,
        "TINKERMQ_NATS_URL": nats_url,
        "TINKERMQ_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **dict.fromkeys(_THREAD_VARIABLES, str(wanted.threads)),
    }


def die_with(parent: int) -> Callable[[], None]:
    """Return what a child runs before its program: the kernel kills it when `parent` dies."""

    def before_exec() -> None:
        if sys.platform != "linux":
            return
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return before_exec
