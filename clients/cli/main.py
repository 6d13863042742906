"""Run one command of the command line and turn its end into an exit code.

0 done, 1 failed, 2 wrong usage, 130 interrupted. An error of ours is printed as its message and
its hint; `--debug` anywhere on the line shows the traceback instead. `decode` runs once per message
under `nats sub --translate`, so it goes around the command parser, which takes longer to import
than the message takes to print.
"""

import os
import sys
from collections.abc import Callable, Sequence

from ...schemas.wire.errors import TinkermqError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    return guarded(lambda: _dispatch(words), debug=debug)


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Return the exit code of `command`, printing an error of ours for people to read."""
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
    except BrokenPipeError:
        # The reader (head, less) has gone; the interpreter would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _dispatch(tokens: list[str]) -> int:
    if tokens and tokens[0] == "decode" and not {"-h", "--help"} & set(tokens):
        from .models.decode import run

        return run(tokens[1:])
    from .fast_start import importing

    with importing():
        from .app import find_command

        command = find_command(tokens)
    return WRONG_USAGE if command is None else command()


def _print_error(error: TinkermqError) -> None:
    from .output import literal, stderr

    stderr().print(f"[bold red]error:[/] {literal(error.message)}", highlight=False)
    if error.hint:
        stderr().print(f"  [dim]{literal(error.hint)}[/]", highlight=False)
