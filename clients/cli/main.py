"""Run one command of the command line and return its exit code.

0 done, 1 failed, 2 wrong usage, 130 interrupted. A TinkermqError is printed as its message and its
hint; `--debug` anywhere on the line shows the traceback instead. `decode` runs once per message
under `nats sub --translate`, so it bypasses the command parser, whose import takes longer than
printing the message.
"""

import errno
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import LazyLoader
from types import FrameType, ModuleType
from typing import Any

from ...schemas.local.proxies import keep_proxies_out
from ...schemas.wire.errors import StorageError, TinkermqError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    warnings.formatwarning = _format_warning
    keep_proxies_out(os.environ)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)  # not in a notebook
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # what the encoding lacks
    code = guarded(lambda: _dispatch(words), debug=debug)
    if argv is None and threading.active_count() > 1:  # one may still run a game that hangs
        from ...schemas.local.process import leave

        leave(code)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, so that a command stops and cleans up."""
    signal.raise_signal(signal.SIGINT)


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run `command` and return its exit code; print a TinkermqError with its hint.

    An OSError (no permission, no space) is printed as its reason and its file.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except TinkermqError as error:
        if debug:
            raise
        _print_error(error)
        return WRONG_USAGE if isinstance(error, ValueError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe (head, less) has ended
        _discard_output()
        return DONE
    except OSError as error:
        if debug or error.errno is None:
            raise
        _print_error(_of_system(error))
        if error.errno == errno.ENOSPC:
            _discard_output()
        return FAILED


def _discard_output() -> None:
    """Drop unwritten output, which the interpreter could not write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_system(error: OSError) -> StorageError:
    if error.filename is None:  # a socket, or the output
        return StorageError(error.strerror or str(error), hint="`--debug` shows where")
    return StorageError(
        f"{error.filename} cannot be used: {error.strerror}",
        hint="`--debug` shows the traceback",
    )


def _dispatch(tokens: list[str]) -> int:
    if tokens and tokens[0] == "decode" and not {"-h", "--help"} & set(tokens):
        from .decode import run

        return run(tokens[1:])

    with importing():
        from .app import find_command

        command = find_command(tokens)
    return WRONG_USAGE if command is None else command()


_format_with_place = warnings.formatwarning


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of tinkermq as one line without its location in the code."""
    if category.__module__.startswith("tinkermq."):
        return f"warning: {message}\n"
    return _format_with_place(message, category, filename, lineno, line)


def _print_error(error: TinkermqError) -> None:
    from .output import literal, stderr

    stderr().print(f"[bold red]error:[/] {literal(error.message)}", highlight=False)
    if error.hint:
        stderr().print(f"  [dim]{literal(error.hint)}[/]", highlight=False)


# Fast start of commands, which would otherwise spend most of their time on unused imports.
#
# nats-py imports aiohttp, if it is installed, for WebSockets only, which tinkermq does not use;
# that takes longer than most commands' own work. Only in the process of the command line, the first
# `import` of a module named here returns a lazy module (`importlib.util.LazyLoader`), which is
# loaded at the first access to an attribute.
#
# structlog imports rich's tracebacks, if rich is installed, and with them pygments. A command
# prints its errors itself, so structlog is imported here as if rich were not installed.

LAZY = frozenset({"aiohttp"})
_LOGS, _UNSEEN = "structlog", "rich"


class FastFinder:
    """A finder of `sys.meta_path` for a few modules by name."""

    def __init__(self, lazy: frozenset[str]) -> None:
        self._lazy = lazy

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the modules, with a faster loader."""
        if name not in self._lazy and name != _LOGS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        if name in self._lazy:
            spec.loader = LazyLoader(spec.loader)
        elif isinstance(spec.loader, SourceFileLoader) and _UNSEEN not in sys.modules:
            spec.loader = _Without(name, spec.loader.path)
        return spec


class _Without(SourceFileLoader):
    """Loads a module as if rich were not installed."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[_UNSEEN] = None  # pyright: ignore[reportArgumentType]  # as Python has it
        try:
            super().exec_module(module)
        finally:
            del sys.modules[_UNSEEN]


@contextmanager
def importing(lazy: frozenset[str] = LAZY) -> Iterator[None]:
    """Import fast in this block: some modules lazily, and without garbage collection.

    Imported modules are never freed, and collecting them takes a tenth of the time.
    """
    finder = FastFinder(lazy)
    sys.meta_path.insert(0, finder)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            gc.enable()
