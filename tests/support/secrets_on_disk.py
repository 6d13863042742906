"""What stands in files, where a secret must not stand."""

import contextlib
from pathlib import Path


def files_with(secret: str, *folders: Path) -> list[Path]:
    """Return the files that hold a secret: logs, run folders, and what the broker has stored."""
    found: list[Path] = []
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the broker renames its files
                if path.is_file() and secret.encode() in path.read_bytes():
                    found.append(path)
    return found
