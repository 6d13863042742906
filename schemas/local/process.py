"""Processes and threads: end with the parent, hide secrets, report to systemd, run in a daemon."""

import asyncio
import atexit
import contextlib
import contextvars
import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None


FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that no program receives by a mistake of its own; SIGKILL also when memory is short."""
_COUNTERS = Path("/proc/vmstat")


def is_killed_from_outside(exit_code: int | None, oom_kills: int | None) -> bool:
    """Return whether a process was ended by a signal from outside, not by a fault of its own.

    `exit_code` is -n for signal n; `oom_kills` was `num_oom_kills()` before its start. A process
    that was killed while the kernel killed some for their memory may be one of those.
    """
    if exit_code is None or -exit_code not in FROM_OUTSIDE:
        return False
    return exit_code != -signal.SIGKILL or (oom_kills is not None and num_oom_kills() == oom_kills)


def num_oom_kills() -> int | None:
    """Return how many processes the kernel has killed for their memory; None where unknown."""
    with contextlib.suppress(OSError):
        for line in _COUNTERS.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for `preexec_fn`: the kernel then signals the child when `parent` dies.

    Nothing may be imported between fork and exec, so everything is loaded before. Does nothing on
    systems other than Linux.
    """

    def in_child() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, number)
            if os.getppid() != parent:  # the parent died before the call above
                os._exit(1)

    return in_child


def erase_variable(name: str) -> str:
    """Remove a variable from the environment and return its value; empty if it is not set.

    Neither children of this process nor, on Linux, readers of `/proc/<pid>/environ` see it.
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


def in_daemon_thread(work: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Call `work` in a thread of its own; return the future of its result.

    Unlike threads of `asyncio.to_thread`, the end of the process does not wait for this one.
    """
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    future = asyncio.wrap_future(done)
    # If no task awaits it any more, asyncio would report its exception as never retrieved.
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return future


def leave(code: int) -> NoReturn:
    """End this process with an exit code, also while daemon threads run Python code.

    The interpreter's own end stops such a thread wherever it is; in native code, as at the import
    of NumPy or torch, that aborts the process (`Fatal Python error: PyThreadState_Get`).
    """
    if not any(thread.daemon for thread in threading.enumerate()):
        sys.exit(code)
    for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(module, name)()  # what the interpreter does before it stops the threads
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


async def finish(work: Awaitable[T]) -> T:
    """Await an awaitable to its end, even if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        task.exception()  # retrieved: the cancellation takes precedence
        raise asyncio.CancelledError
    return task.result()


async def owned(work: Awaitable[T], give_back: Callable[[T], object]) -> T:
    """Await what acquires something, which is given back if this task is cancelled meanwhile.

    The work continues then, for example in its thread, and `give_back` gets its result.
    """
    task = asyncio.ensure_future(work)

    def ended(done: "asyncio.Future[T]") -> None:
        if not done.cancelled() and done.exception() is None:
            give_back(done.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(ended)
        raise


# Notifications to systemd: the service is ready, its loop runs, it stops.
#
# The protocol is that of sd_notify(3): a datagram to the socket that `NOTIFY_SOCKET` names. Without
# that variable nothing is sent.


@contextlib.asynccontextmanager
async def notifying_systemd() -> AsyncGenerator[None, None]:
    """Send systemd READY now, STOPPING at the end, and WATCHDOG twice in each interval.

    systemd restarts a service whose event loop is blocked for longer than the unit's WatchdogSec.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")  # this process sets it only for itself
    if not address:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        _notify(channel, "READY=1")
        beating = asyncio.create_task(_send_watchdog(channel), name="systemd watchdog")
        try:
            yield
        finally:
            beating.cancel()
            _notify(channel, "STOPPING=1")


async def _send_watchdog(channel: socket.socket) -> None:
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    while interval_s:
        _notify(channel, "WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)


def _notify(channel: socket.socket, text: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # systemd restarts, or its queue is full; the next message follows
        channel.send(text.encode())
