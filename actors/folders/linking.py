"""Second names for files, so that a folder stays when its first name goes."""

import errno
import os
import shutil
from pathlib import Path


def link_tree(source: Path, target: Path) -> None:
    """Give all files of a folder a second name in a new folder. Raises shutil.Error, OSError."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=link_file)


def link_file(source: str, target: str) -> str:
    """Link a file, or copy it to another disk. Raises OSError."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        shutil.copy2(source, target)
    return target
