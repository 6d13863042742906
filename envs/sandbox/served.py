"""The sandbox of a game that is behind walls itself: programs run outside of these.

Walls in walls would need namespaces, which a hosted game may not make. So the node offers a socket,
behind which `server.py` runs the programs, each in a sandbox as ever; here is the side of the game.
A connection is a session: the settings go ahead, then programs and what became of each, as JSON
after a length of four bytes.
"""

import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any, cast

from ...schemas.wire.errors import SandboxError, TinkermqError, error_from_reply
from .settings import Outcome, SandboxSettings, too_long

SOCKET = Path("/sandbox.socket")
"""Where a game behind walls finds the socket."""
SHORT_FOLDER = "set TMPDIR to a short folder of this machine's own disk, as /tmp"
_MAX_NAME_BYTES = 107
"""Of the name of a Unix socket."""
MAX_FRAME_BYTES = 8 << 20
"""A program or an answer, at most, as JSON."""


class ServedSandbox:
    """Sandboxes that the server behind the socket runs."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Connect nothing yet."""
        self._settings = settings

    def session(self) -> "ServedSession":
        """Return an enclosed interpreter, which starts with its first program."""
        return ServedSession(self._settings)

    def self_test(self) -> str:
        """Let the server prove that it encloses; SandboxError says what fails, and the remedy."""
        _connected(self._settings).close()
        return "the node runs programs outside of this game's walls, and its sandbox encloses them"


class ServedSession:
    """One episode's sandbox on the server; it ends with its connection."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._connection: socket.socket | None = None

    def run(self, code: str, time_s: float | None = None) -> Outcome:
        """Run a program after those before it; SandboxError when the sandbox itself fails."""
        if (refused := too_long(code)) is not None:
            return refused
        if self._connection is None:
            self._connection = _connected(self._settings)
            weakref.finalize(self, self._connection.close)
        told = _asked(self._connection, {"code": code, "time_s": time_s})
        return Outcome(told["text"], told["status"], told["seconds"])

    def close(self) -> None:
        """End whatever runs in it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def listen_at(path: Path) -> socket.socket:
    """Return a Unix socket that listens at `path`, however long its folder's name is.

    The kernel takes names of 107 bytes, so the folder is named by a handle on it where it is
    longer. Raises OSError that says what is to be done where there can be no socket.
    """
    listening = socket.socket(socket.AF_UNIX)
    try:
        if len(os.fsencode(path)) <= _MAX_NAME_BYTES:
            listening.bind(str(path))
        else:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                listening.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        listening.listen()
    except OSError as error:
        listening.close()
        raise OSError(
            f"no socket for the programs of games can be made at {path}: {error.strerror or error}"
            f"; {SHORT_FOLDER}"
        ) from error
    return listening


def send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; OSError when the other side has gone."""
    encoded = json.dumps(message).encode()
    connection.sendall(len(encoded).to_bytes(4, "little") + encoded)


def receive_frame(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message; EOFError when the other side has gone, ValueError for what is none."""
    length = int.from_bytes(_exactly(connection, 4), "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return cast(dict[str, Any], message)


def _exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(min(length - len(received), 1 << 16))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _connected(settings: SandboxSettings) -> socket.socket:
    """Return a session's connection; the server has proven by then that its sandbox encloses."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(SOCKET))
        _asked(connection, settings.model_dump(exclude_defaults=True))
    except OSError as error:
        connection.close()
        raise _lost() from error
    except TinkermqError:
        connection.close()
        raise
    return connection


def _asked(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    try:
        send_frame(connection, message)
        told = receive_frame(connection)
    except (OSError, EOFError) as error:
        raise _lost() from error
    if "error" in told:
        raise error_from_reply(told["code"], told["error"], told["hint"])
    return told


def _lost() -> SandboxError:
    return SandboxError(
        "the node runs no programs for this game any more", hint="see the node's log"
    )
