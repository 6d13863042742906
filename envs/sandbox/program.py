"""Bubblewrap on this machine, the user as whom it runs programs, and what helps where it cannot."""

import os
import secrets
import shutil
from pathlib import Path

from ...schemas.wire.errors import SandboxError

_FIRST_USER, _NUM_USERS = 1 << 30, 1 << 28
_LEAST_USER = 1000
_NUM_MAPPED = 5000


def bubblewrap_program() -> str:
    """Return the path of `bwrap`; SandboxError for a machine without it."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "there is no bubblewrap on this machine: programs of others cannot be enclosed",
            hint="apt-get install bubblewrap (dnf install bubblewrap) where environment hosts run",
        )
    return found


def unprivileged_user() -> int | None:
    """Return the number of a user that nobody is, another one at each call, for what root starts.

    None for a process that is not root, and for one that has no other user to become.
    """
    if os.getuid() != 0:
        return None
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    end = max(int(line.split()[0]) + int(line.split()[2]) for line in lines)
    if end >= _FIRST_USER + _NUM_USERS:
        return _FIRST_USER + secrets.randbelow(_NUM_USERS)
    # in a container with users of its own; the last two mean nobody and an error
    least = max(_LEAST_USER, end - _NUM_MAPPED)
    return least + secrets.randbelow(end - 2 - least) if end - 2 > least else None


def remedy(said: str) -> str:
    """Return what to do about an error of bubblewrap."""
    if "namespace" in said or "Operation not permitted" in said or "uid map" in said:
        return (
            "let processes make namespaces: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
            "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), user.max_user_namespaces "
            "above 0; in a container: --security-opt seccomp=unconfined --security-opt "
            "systempaths=unconfined --cap-add SYS_ADMIN"
        )
    return "try `bwrap --unshare-all --ro-bind / / true` as the user of the environment host"


def first_process(about: int) -> int:
    """Return the first process of a sandbox, as `--info-fd` tells it; ValueError if nothing does.

    Closes `about`.
    """
    told = b""
    try:
        while b"}" not in told:
            chunk = os.read(about, 4096)
            if not chunk:
                raise ValueError("it ended")
            told += chunk
    finally:
        os.close(about)
    return int(told.split(b'"child-pid":')[1].split(b",")[0].strip(b" \n}"))
