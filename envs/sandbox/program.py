"""Bubblewrap on this machine, and what helps where it cannot enclose."""

import shutil

from ...schemas.errors import SandboxError


def bubblewrap_program() -> str:
    """Return the path of `bwrap`; SandboxError for a machine without it."""
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError(
            "there is no bubblewrap on this machine: programs of others cannot be enclosed",
            hint="apt-get install bubblewrap (dnf install bubblewrap) where environment hosts run",
        )
    return found


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
