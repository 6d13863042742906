"""Another release of the package: its code with another version, found before the installed one."""

import os
import re
import shutil
from pathlib import Path

from tests.support.configs import REPOSITORY
from tests.support.wheel import PACKAGE, ROOMS


def other_release(folder: Path, version: str, *, schema_version: int = 1) -> dict[str, str]:
    """Lay out a release below `folder`; return the environment in which Python imports it."""
    package = folder / "tinkermq"
    shutil.copytree(REPOSITORY / PACKAGE, package)
    for room in ROOMS:
        (package / room).symlink_to(REPOSITORY / room)
    (package / "schemas").unlink()
    shutil.copytree(REPOSITORY / "schemas", package / "schemas")
    _replace(package / "schemas" / "version.py", r'"[\d.]+"', f'"{version}"')
    message = package / "schemas" / "wire" / "message.py"
    _replace(message, r"(?m)^(SCHEMA_VERSION = )\d+", rf"\g<1>{schema_version}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}


def _replace(file: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, file.read_text())
    assert count == 1, f"{file} has {pattern} {count} times"
    file.write_text(text)
