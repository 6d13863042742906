"""Interpreters and programs for games that are in a sandbox themselves.

A sandbox in a sandbox would need namespaces, which a hosted game may not make. So the node makes a
socket, and starts `python -m tinkermq.envs.sandbox.served FD` to serve it, outside of the game's
sandbox and as the node's user. A connection is a session: first the settings, then programs and
their outcomes, as JSON after a length of four bytes. After `piped` the session is one program with
its own descriptors, which are sent with the message. It ends with the connection and sees the
operator's folders for games.

The game is a user's code. Its messages can at most end its own session, and the numbers of sessions
and of kinds of settings are bounded.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from ...schemas.wire.errors import ConfigError, SandboxError, TinkermqError, error_from_reply
from .interpreters import CodeSandbox, LocalCodeSandbox, Outcome, SandboxSettings, too_long
from .piped import LocalPipedProgram, PipedProgram, PipedSettings
from .shown import FOLDERS_VARIABLE, operator_folders

SOCKET = Path("/sandbox.socket")
"""The socket's path in a game's sandbox."""
SHORT_FOLDER = "set TMPDIR to a short folder of this machine's own disk, as /tmp"
_MAX_NAME_BYTES = 107
"""Maximum length of the name of a Unix socket."""
MAX_FRAME_BYTES = 8 << 20
"""Bound on a program or an answer, as JSON."""
BACKENDS: dict[str, Callable[[SandboxSettings], CodeSandbox]] = {"bubblewrap": LocalCodeSandbox}
"""What `backend` may name."""
_NUM_FDS = 2
_MAX_GRACE_S = 5.0
_MAX_SESSIONS = 1024
_MAX_KINDS = 16
_places = threading.BoundedSemaphore(_MAX_SESSIONS)
_kinds: set[str] = set()
_kinds_lock = threading.Lock()
_proven: dict[str, CodeSandbox] = {}
_proven_lock = threading.Lock()


def shared_sandbox(settings: SandboxSettings) -> CodeSandbox:
    """Return the sandbox of this process for these settings, which has passed its self-test.

    A game in a sandbox uses the server outside. Raises SandboxError with what to do if programs
    cannot be sandboxed.
    """
    key = settings.model_dump_json()
    with _proven_lock:
        if key not in _proven:
            make = ServedCodeSandbox if SOCKET.exists() else BACKENDS[settings.backend]
            sandbox = make(settings)
            sandbox.self_test()
            _proven[key] = sandbox
        return _proven[key]


class ServedCodeSandbox:
    """Interpreters that the server behind the socket runs."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Connect nothing yet."""
        self._settings = settings

    def session(self) -> "ServedCodeSession":
        """Return an interpreter, which starts with its first program."""
        return ServedCodeSession(self._settings)

    def self_test(self) -> str:
        """Let the server test its sandbox; SandboxError says what fails and what to do."""
        _connected(self._settings.model_dump(exclude_defaults=True)).close()
        return "the node runs programs in sandboxes that enclose them, outside of this game's"


class ServedCodeSession:
    """One episode's interpreter on the server; it ends with its connection."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._connection: socket.socket | None = None

    def run(self, code: str, time_s: float | None = None, clock_s: float | None = None) -> Outcome:
        """Run a program after those before it; SandboxError when the sandbox itself fails."""
        if (refused := too_long(code)) is not None:
            return refused
        if self._connection is None:
            self._connection = _connected(self._settings.model_dump(exclude_defaults=True))
            weakref.finalize(self, self._connection.close)
        reply = _request(self._connection, {"code": code, "time_s": time_s, "clock_s": clock_s})
        return Outcome(reply["text"], reply["status"], reply["seconds"], reply["clock_s"])

    def close(self) -> None:
        """Kill what runs in it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def start_piped(settings: PipedSettings, stdio: int, errors: int) -> PipedProgram:
    """Start a program with two descriptors, which the caller closes; blocks.

    For a game in a sandbox the server starts it. Raises SandboxError if it does not start,
    ConfigError for settings that cannot be used.
    """
    program = ServedPipedProgram if SOCKET.exists() else LocalPipedProgram
    return program(settings, stdio, errors)


class ServedPipedProgram:
    """A program that the server behind the socket has started."""

    def __init__(self, settings: PipedSettings, stdio: int, errors: int) -> None:
        """Let the server start it with two descriptors, which the caller closes; blocks."""
        self._connection = _connected({"piped": settings.model_dump()}, (stdio, errors))
        self._ended = ""

    def end(self, grace_s: float = 0.0) -> str:
        """Wait up to `grace_s`, then kill it; return how it ended. Blocks; may be repeated."""
        if not self._ended:
            try:
                self._ended = str(_request(self._connection, {"grace_s": grace_s})["ended"])
            except TinkermqError as error:
                self._ended = error.message
            self._connection.close()
        return self._ended


def listen_at(path: Path) -> socket.socket:
    """Return a Unix socket that listens at `path`, of any length.

    The kernel accepts names of up to 107 bytes, so a longer folder is named by an open descriptor.
    Raises OSError with a hint if no socket can be made.
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


def send_frame(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message, and descriptors with it; OSError if the other side has disconnected."""
    encoded = json.dumps(message).encode()
    head = len(encoded).to_bytes(4, "little")
    if fds:
        socket.send_fds(connection, [head], fds)
        head = b""
    connection.sendall(head + encoded)


def receive_frame(connection: socket.socket, head: bytes = b"") -> dict[str, Any]:
    """Wait for one message, whose first bytes may have been read already.

    Raises EOFError if the other side has disconnected, ValueError for a malformed message.
    """
    length = int.from_bytes(head + _exactly(connection, 4 - len(head)), "little")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_exactly(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return cast(dict[str, Any], message)


def _exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(min(length - len(received), 1 << 16))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _connected(settings: dict[str, Any], fds: Sequence[int] = ()) -> socket.socket:
    """Return a session's connection; the server has tested its sandbox by then."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(SOCKET))
        _request(connection, settings, fds)
    except OSError as error:
        connection.close()
        raise _node_error() from error
    except TinkermqError:
        connection.close()
        raise
    return connection


def _request(
    connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()
) -> dict[str, Any]:
    try:
        send_frame(connection, message, fds)
        reply = receive_frame(connection)
    except (OSError, EOFError) as error:
        raise _node_error() from error
    if "error" in reply:
        raise error_from_reply(reply["code"], reply["error"], reply["hint"])
    return reply


def _node_error() -> SandboxError:
    return SandboxError("the node no longer runs programs for this game", hint="see the node's log")


# -- the server ------------------------------------------------------------------------------------


def main() -> None:
    """Serve connections until the parent process ends this one."""
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        while True:
            connection, _ = listening.accept()
            if _places.acquire(blocking=False):
                threading.Thread(target=_serve, args=(connection,), daemon=True).start()
            else:
                connection.close()


def _serve(connection: socket.socket) -> None:
    """Serve one session to its end; a malformed request ends it."""
    try:
        with connection, contextlib.suppress(OSError, EOFError, ValueError, RecursionError):
            _session(connection)
    finally:
        _places.release()


def _session(connection: socket.socket) -> None:
    head, fds, _, _ = socket.recv_fds(connection, 4, _NUM_FDS)
    program: PipedProgram | None = None
    try:
        settings = receive_frame(connection, head)
        is_piped = "piped" in settings
        if is_piped and len(fds) == _NUM_FDS:
            program = _started(connection, settings["piped"], fds)
    finally:
        for fd in fds:  # only the program has the descriptors from here on
            os.close(fd)
    if program is not None:
        _serve_piped(connection, program)
    if is_piped:
        return
    try:
        sandbox = _checked_sandbox(settings)
    except TinkermqError as error:
        send_frame(connection, _refusal(error))
        return
    send_frame(connection, {})
    with contextlib.closing(sandbox.session()) as session:
        while True:
            request = receive_frame(connection)
            code, limits = request.get("code"), [request.get("time_s"), request.get("clock_s")]
            if not isinstance(code, str):
                return
            if not all(isinstance(limit, float | int | None) for limit in limits):
                return
            try:
                answer = asdict(session.run(code, *limits))
            except TinkermqError as error:
                answer = _refusal(error)
            send_frame(connection, answer)


def _started(
    connection: socket.socket, values: Any, fds: Sequence[int]
) -> LocalPipedProgram | None:
    """Start a program; None if it does not start, after the reason was sent to the game."""
    try:
        return LocalPipedProgram(_read_settings(values), *fds, may_read=_refuse_unshown)
    except TinkermqError as error:
        send_frame(connection, _refusal(error))
    except OSError as error:
        send_frame(connection, _refusal(SandboxError(f"the program does not start: {error}")))
    return None


def _serve_piped(connection: socket.socket, program: PipedProgram) -> None:
    """Let a program run until the game ends it or disconnects."""
    try:
        send_frame(connection, {})
        grace_s = receive_frame(connection).get("grace_s")
        if isinstance(grace_s, float | int):
            send_frame(connection, {"ended": program.end(min(max(0.0, grace_s), _MAX_GRACE_S))})
    finally:
        program.end()


def _read_settings(values: Any) -> PipedSettings:
    """Read the settings of a game's program; raises ConfigError."""
    try:
        return PipedSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"the program's settings cannot be used: {error}") from error


def _refuse_unshown(name: str, real: Path) -> None:
    """Raise ConfigError for a real path that a program of a hosted game may not see."""
    if not any(real.is_relative_to(folder.resolve()) for folder in operator_folders()):
        raise ConfigError(
            f"read: programs of hosted games may not see {name!r}",
            hint=f"let the operator name it in {FOLDERS_VARIABLE} of the node",
        )


def _checked_sandbox(values: dict[str, Any]) -> CodeSandbox:
    """Return the sandbox for these settings; raises SandboxError, ConfigError."""
    settings = SandboxSettings.parse(values)
    cores = len(os.sched_getaffinity(0))
    settings = settings.model_copy(update={"at_once": min(settings.at_once or cores, cores)})
    with _kinds_lock:
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
