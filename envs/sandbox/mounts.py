"""What the sandbox shows of the host, all of it read-only: an interpreter, its libraries, packages.

No folder of users, no /etc, no programs: the root is empty but for the system's libraries
(/usr/lib), this interpreter (/python) and the packages asked for (/packages).
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from ...schemas.wire.errors import ConfigError

PYTHON = "/python/bin/python3"
PACKAGES = "/packages"


def system_mounts() -> list[str]:
    """Return bubblewrap's arguments for the interpreter and the libraries it needs."""
    arguments = [*_folder("/usr"), *_folder("/python"), *_folder("/python/bin")]
    for name in ("lib", "lib64"):
        arguments += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
        if Path(f"/{name}").is_symlink():
            arguments += ["--symlink", f"usr/{name}", f"/{name}"]
        else:
            arguments += ["--ro-bind-try", f"/{name}", f"/{name}"]
        arguments += ["--ro-bind-try", f"{sys.base_prefix}/{name}", f"/python/{name}"]
    return [*arguments, "--ro-bind", str(Path(sys.executable).resolve()), PYTHON]


def package_mounts(names: list[str]) -> list[str]:
    """Return bubblewrap's arguments for installed packages and all that these need.

    Raises ConfigError for one that is not installed.
    """
    arguments = _folder(PACKAGES)
    for top in sorted(_top_level(names)):
        arguments += ["--ro-bind", str(top), f"{PACKAGES}/{top.name}"]
    return arguments


def _folder(path: str) -> list[str]:
    return ["--perms", "0755", "--dir", path]


def _top_level(names: list[str]) -> set[Path]:
    """Return the files and folders in site-packages that belong to packages and their needs."""
    found: dict[str, Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise ConfigError(
                f"package {name!r} of the sandbox is not installed",
                hint=f"pip install {name}, or take it out of env.kwargs.sandbox.packages",
            ) from None
        required = found[name].requires or []
        wanted += [re.split(r"[^\w.-]", one)[0] for one in required if ";" not in one]
    tops: set[Path] = set()
    for one in found.values():
        for file in one.files or []:
            if file.parts[0] not in ("..", "__pycache__") and not file.parts[0].endswith(".pth"):
                tops.add(Path(str(one.locate_file(file.parts[0]))))
    return {top for top in tops if top.exists()}
