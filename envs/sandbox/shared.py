"""The sandboxes of this process: made once for each kind of settings, and proven before use."""

import threading
from collections.abc import Callable

from .bubblewrap import Bubblewrap
from .served import SOCKET, ServedSandbox
from .settings import Sandbox, SandboxSettings

BACKENDS: dict[str, Callable[[SandboxSettings], Sandbox]] = {"bubblewrap": Bubblewrap}
"""What `backend` may name."""
_proven: dict[str, Sandbox] = {}
_lock = threading.Lock()


def shared_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return the sandbox for these settings, which has passed its self-test.

    A game behind walls may make no sandbox itself and is served one from outside.
    Raises SandboxError with the remedy where programs cannot be enclosed.
    """
    key = settings.model_dump_json()
    with _lock:
        if key not in _proven:
            make = ServedSandbox if SOCKET.exists() else BACKENDS[settings.backend]
            sandbox = make(settings)
            sandbox.self_test()
            _proven[key] = sandbox
        return _proven[key]
