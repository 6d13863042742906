"""Runs programs for a hosted game: `python -m tinkermq.envs.sandbox.server FD`, a listening socket.

A node starts one for each game behind walls that asks for it (see `served.py`), outside of the
walls and as the node's user, so that each sandbox is made and bounded as for a game without walls.
The game at the other end is code of a user: whatever it sends costs at most its own session, and
sessions and kinds of settings are bounded.
"""

import contextlib
import os
import socket
import sys
import threading
from dataclasses import asdict
from typing import Any

from ...schemas.wire.errors import SandboxError, TinkermqError
from .served import receive_frame, send_frame
from .settings import Sandbox, SandboxSettings
from .shared import shared_sandbox

_MAX_SESSIONS = 1024
_MAX_KINDS = 16
_places = threading.BoundedSemaphore(_MAX_SESSIONS)
_kinds: set[str] = set()
_lock = threading.Lock()


def main() -> None:
    """Serve connections until whoever started this ends it."""
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        while True:
            connection, _ = listening.accept()
            if _places.acquire(blocking=False):
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()
            else:
                connection.close()


def _serve(connection: socket.socket) -> None:
    """Serve one session to its end; what is no request ends it."""
    try:
        with connection, contextlib.suppress(OSError, EOFError, ValueError, RecursionError):
            _session(connection)
    finally:
        _places.release()


def _session(connection: socket.socket) -> None:
    try:
        sandbox = _proven(receive_frame(connection))
    except TinkermqError as error:
        send_frame(connection, _refusal(error))
        return
    send_frame(connection, {})
    with contextlib.closing(sandbox.session()) as session:
        while True:
            asked = receive_frame(connection)
            code, time_s = asked.get("code"), asked.get("time_s")
            if not isinstance(code, str) or not isinstance(time_s, float | int | None):
                return
            try:
                answer = asdict(session.run(code, time_s))
            except TinkermqError as error:
                answer = _refusal(error)
            send_frame(connection, answer)


def _proven(values: dict[str, Any]) -> Sandbox:
    """Return the sandbox for these settings; SandboxError or ConfigError says why there is none."""
    settings = SandboxSettings.parse(values)
    cores = len(os.sched_getaffinity(0))
    settings = settings.model_copy(update={"at_once": min(settings.at_once or cores, cores)})
    with _lock:
        _kinds.add(settings.model_dump_json())
        if len(_kinds) > _MAX_KINDS:
            _kinds.remove(settings.model_dump_json())
            raise SandboxError(
                f"a hosted game uses more than {_MAX_KINDS} kinds of sandboxes",
                hint="let its episodes share the values of env.kwargs.sandbox",
            )
    return shared_sandbox(settings)


def _refusal(error: TinkermqError) -> dict[str, Any]:
    return {"code": error.code, "error": error.message, "hint": error.hint}


if __name__ == "__main__":
    main()
