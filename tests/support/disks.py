"""Small file systems, which tests fill up and make room on."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Make `place` a file system of its own as long as the block runs."""
    place.mkdir(parents=True, exist_ok=True)
    with _mounted(place, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs"):
        yield place


@contextlib.contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """Let reading a file fail with an input/output error, as from a disk that is away."""
    with _mounted(file, "--bind", f"/proc/{os.getpid()}/mem"):
        yield


@contextlib.contextmanager
def _mounted(place: Path, *options: str) -> Iterator[None]:
    command = ["mount", *options, str(place)]
    is_root = os.geteuid() == 0 and shutil.which("mount") is not None
    if not is_root or subprocess.call(command, stderr=subprocess.DEVNULL):
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.check_call(["umount", "--lazy", str(place)])


def fill(disk: Path) -> Path:
    """Leave no byte on a disk; return the file to remove for room."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
