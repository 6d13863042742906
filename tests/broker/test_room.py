"""What is to be done about a write that failed is said by its cause."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinkermq.actors.storage.files import storage_error
from tinkermq.broker.disk import remedy
from tinkermq.broker.tracking import JsonlTracker
from tinkermq.schemas.wire.errors import StorageError

from tests.support import disks


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EPERM, "may not write at"),
        (errno.EACCES, "may not write at"),
        (errno.EROFS, "mounted read-only"),
        (errno.EFBIG, "ulimit"),
        (errno.EIO, "see the disk"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "as a cause"])
def test_a_write_that_failed_is_remedied_by_its_number(
    tmp_path: Path, number: int, said: str, wrapped: bool
) -> None:
    error: Exception = OSError(number, os.strerror(number))
    if wrapped:
        cause, error = error, RuntimeError("a library failed")
        error.__cause__ = cause
    told = remedy(error, tmp_path / "runs" / "new")
    assert said in told
    assert ("free some space" in told) == (number in (errno.ENOSPC, errno.EDQUOT))


@contextlib.contextmanager
def immutable(folder: Path) -> Iterator[None]:
    if shutil.which("chattr") is None or subprocess.call(["chattr", "+i", str(folder)]):
        pytest.skip("making a folder immutable needs root and a disk that can")
    try:
        yield
    finally:
        subprocess.check_call(["chattr", "-i", str(folder)])


def test_an_immutable_run_folder_is_not_told_to_be_full(tmp_path: Path) -> None:
    with immutable(tmp_path):
        for error in (RuntimeError("a library failed"), OSError(errno.EPERM, "no")):
            failure = storage_error(tmp_path / "checkpoints" / "step_000001", error)
            assert failure is not None
            assert not failure.is_full
            assert "lsattr" in failure.hint
            assert "free some space" not in failure.hint
        with pytest.raises(StorageError) as told:
            JsonlTracker(tmp_path)
        assert "lsattr" in told.value.hint


def test_a_disk_that_is_mounted_read_only_is_named(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path / "disk", 4) as disk:
        subprocess.check_call(["mount", "-o", "remount,ro", str(disk)])
        failure = storage_error(disk / "checkpoints" / "step_000001", RuntimeError("it failed"))
        assert failure is not None
        assert "mounted read-only" in failure.hint
        assert "free some space" not in failure.hint
