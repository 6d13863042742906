"""The process in which games run under `isolation: process`: one socket, one call at a time.

Started by `process_runner` as `python -m tinkermq.envs.running.worker <fd> <parent pid>`. Frames
are a length of four bytes and a body. The host's frames are pickled, since the host is trusted; the
answers are msgpack, since the game's code makes them.
"""

import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from ...schemas.local.process import die_with
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import GameError, MessageError, TinkermqError
from ...schemas.wire.message import ErrorReply
from ..game import AbstractGame, StepResult, game_failure
from ..registry import import_needs, load_game
from .episodes import Episodes, GameFacts, refuse_async

LENGTH = struct.Struct("<I")
_STATM_DATA = 5
"""Field of /proc/self/statm: pages of private writable memory, which RLIMIT_DATA bounds."""


def main() -> None:
    """Serve the socket whose number is the first argument until its other end closes."""
    die_with(int(sys.argv[2]))()
    signal.signal(signal.SIGINT, _pass)
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rb") as incoming:
        game_class: type[AbstractGame] | None = None
        episodes: Episodes | None = None
        while head := incoming.read(LENGTH.size):
            body = incoming.read(LENGTH.unpack(head)[0])
            number, verb, arguments = pickle.loads(body)  # noqa: S301 - from our own parent
            if verb == "import":
                call: Callable[..., Any] = _import
            elif verb == "start":
                assert game_class is not None
                call = partial(_start, game_class)
            else:
                assert episodes is not None
                call = getattr(episodes, verb)
            outcome, error = _attempt(verb, call, arguments)
            if verb == "import" and error is None:
                game_class, outcome = outcome, None
            elif verb == "start" and error is None:
                episodes, outcome = outcome
            answer = _answer(number, outcome, error)
            sock.sendall(LENGTH.pack(len(answer)) + answer)


def _pass(*_: Any) -> None:
    """Ignore Ctrl-C: the host receives it as well, and ends its workers."""


def _import(game: str, path: list[str], kwargs: dict[str, Any]) -> type[AbstractGame]:
    sys.path[:] = path
    game_class = load_game(game)
    refuse_async(game_class)
    import_needs(game_class, kwargs)
    return game_class


def _start(
    game_class: type[AbstractGame], kwargs: dict[str, Any], memory_mb: int | None
) -> tuple[Episodes, GameFacts]:
    if memory_mb is not None:
        _bound_memory(memory_mb)
    episodes = Episodes(game_class, kwargs)
    return episodes, episodes.probe()


def _bound_memory(megabytes: int) -> None:
    """Bound the memory that is allocated from now on. Raises GameError except on Linux."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        raise GameError(
            f"env.worker_memory_mb={megabytes} needs Linux", hint="leave it out on this machine"
        )
    used_bytes = int(statm.read_text().split()[_STATM_DATA]) * resource.getpagesize()
    limit_bytes = used_bytes + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def _attempt(verb: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    try:
        return call(*arguments), None
    except TinkermqError as error:
        return None, _error_fields(error)
    except BaseException as error:  # noqa: BLE001 - one call's failure must not end the others
        return None, _error_fields(game_failure("the game", verb, error))


def _error_fields(error: TinkermqError) -> list[str]:
    reply = ErrorReply.of(error.code, error.message, error.hint)
    return [reply.code, reply.message, reply.hint]


def _answer(number: int, outcome: Any, error: Any) -> bytes:
    if isinstance(outcome, StepResult):
        outcome = [getattr(outcome, field.name) for field in fields(StepResult)]
    try:
        return pack([number, outcome, error])
    except MessageError as failure:
        return pack([number, None, _error_fields(failure)])


if __name__ == "__main__":
    main()
