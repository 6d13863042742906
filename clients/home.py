"""The folder of the stack of `tinkermq up`, and how clients find its broker.

One folder per stack (`$TINKERMQ_HOME`, default `~/.local/share/tinkermq`): the state file with
broker URL and process ids, logs, and the broker's store. The supervisor holds a lock on the folder
for its whole life, so a state file left behind by a crash is never mistaken for a running stack.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, Field

from ..schemas.wire.errors import BrokerError, StateError, StorageError

URL_VARIABLE = "TINKERMQ_NATS_URL"
HOME_VARIABLE = "TINKERMQ_HOME"
GATEWAY_VARIABLE = "TINKERMQ_GATEWAY_URL"
_LOCK_TRIES = 20
_LOCK_PAUSE_S = 0.05


class StackState(BaseModel):
    """The running stack, as last written by the supervisor."""

    url: str
    """The broker."""
    gateway: str | None = None
    """Address of the dashboard; None without one."""
    pid: int
    """The supervisor."""
    children: dict[str, int] = Field(default_factory=dict[str, int])
    """Process ids of broker, scheduler, node and gateway."""
    restarts: dict[str, int] = Field(default_factory=dict[str, int])
    """Number of restarts of each of them."""
    home: str
    """The folder of the stack."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The options with which it was started."""
    started: float
    """Seconds since the epoch."""


class Home:
    """The folder of one stack."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """Name the folder; None: `$TINKERMQ_HOME`, or the default one."""
        self.folder = Path(folder) if folder is not None else default_folder()
        self._held: IO[str] | None = None
        """The lock, while this process holds it."""

    @property
    def state_path(self) -> Path:
        """The state file."""
        return self.folder / "stack.json"

    @property
    def _lock_path(self) -> Path:
        return self.folder / "stack.lock"

    @property
    def store(self) -> Path:
        """The broker's store."""
        return self.folder / "nats"

    @property
    def logs(self) -> Path:
        """Folder of the logs of supervisor, scheduler and node."""
        return self.folder / "logs"

    @property
    def secrets(self) -> Path:
        """Folder of the secrets of a pool with authentication; `tinkermq init` makes it."""
        return self.folder / "secrets"

    def read_running_stack(self) -> StackState | None:
        """Return the state of the running stack, or None."""
        if not self.state_path.exists() or not self.is_locked():
            return None
        try:
            return StackState.model_validate_json(self.state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None  # the stack stopped between the two lines above

    def check_place(self) -> None:
        """Raise FileNotFoundError unless the locked folder is still at its path."""
        if not self._is_in_place():
            raise FileNotFoundError(
                f"{self.folder}, the folder of this stack, has been moved or removed"
            )

    def _is_in_place(self) -> bool:
        if self._held is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._held.fileno()), self._lock_path.stat())
        except OSError:
            return False

    def write(self, state: StackState) -> None:
        """Write the state file atomically, while the folder is locked; raises OSError."""
        self.check_place()
        part = self.state_path.with_suffix(".part")
        part.write_text(json.dumps(state.model_dump(), indent=2) + "\n", encoding="utf-8")
        part.replace(self.state_path)

    def clear(self) -> None:
        """Remove the state file, unless another stack has taken the path meanwhile."""
        if self._is_in_place():
            self.state_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for the duration of the block.

        Raises StateError when another supervisor holds it, StorageError when it cannot be made.
        """
        with self._open_lock() as lock:
            if not _try_lock(lock):
                raise StateError(
                    f"a stack is already up in {self.folder}",
                    hint="stop it with `tinkermq down`, or use another folder: --store DIR",
                )
            self._held = lock
            try:
                yield
            finally:
                self._held = None

    def is_locked(self) -> bool:
        """Return whether a supervisor has locked the folder; False without file locks (Windows)."""
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows, where only clients run
            return False
        with self._open_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def _open_lock(self) -> IO[str]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return self._lock_path.open("a")
        except OSError as error:
            raise StorageError(
                f"the folder {self.folder} cannot be used: {error.strerror}",
                hint=f"set {HOME_VARIABLE}, or give --store DIR",
            ) from error


def default_folder() -> Path:
    """Return `$TINKERMQ_HOME`, or `~/.local/share/tinkermq`; StorageError without a home."""
    folder = os.environ.get(HOME_VARIABLE)
    try:
        return Path(folder or "~/.local/share/tinkermq").expanduser()
    except RuntimeError as error:
        raise StorageError(
            f"there is no folder for tinkermq: this user has no home ({error})",
            hint=f"set {HOME_VARIABLE} to a folder that you may write to",
        ) from error


def find_url(named: str | None = None) -> str:
    """Return the broker's URL: `named`, `$TINKERMQ_NATS_URL`, or that of the local stack.

    Raises BrokerError when there is none.
    """
    url = named or os.environ.get(URL_VARIABLE)
    if url:
        return url
    state = Home().read_running_stack()
    if state is None:
        raise BrokerError(
            f"no stack is up in {default_folder()}, and no broker was named",
            hint=f"start one with `tinkermq up`, or name a broker: --nats-url URL or "
            f"{URL_VARIABLE}",
        )
    return state.url


def find_openai(named: str | None = None) -> str | None:
    """Return the OpenAI-compatible base URL of a gateway, or None if none is known.

    It is `named`, `$TINKERMQ_GATEWAY_URL`, or that of the local stack.
    """
    url = named or os.environ.get(GATEWAY_VARIABLE)
    state = None if url else Home().read_running_stack()
    url = url or (state.gateway if state else None)
    return f"{url.rstrip('/')}/v1" if url else None


def _try_lock(lock: IO[str]) -> bool:
    """Try to take the lock; a process that only checks it releases it at once."""
    import fcntl

    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False
