"""Lines are appended whole, causes of failed writes are named, a hanging disk blocks its user."""

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tinkermq.actors.storage.files import storage_error
from tinkermq.schemas.local.disk import DiskThreads, append_lines, read_objects, remedy
from tinkermq.schemas.local.tracking import JsonlTracker
from tinkermq.schemas.wire.errors import StorageError

from tests.support import disks
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually

# -- Lines are appended whole or not at all, and one that was cut swallows no other ----------------


def test_a_line_that_was_cut_does_not_swallow_the_next_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    append_lines(path, ['{"step": 1}', '{"step": 2}'])
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
    size = append_lines(path, ['{"step": 4}'])
    assert size == path.stat().st_size
    with capture_logs() as told:
        assert [one["step"] for one in read_objects(path)] == [1, 2, 4]
    assert [(one["event"], one["line"]) for one in told] == [("line_cut", 3)]


def test_what_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, ["short"])
    script = f"""
import errno, resource, signal
from pathlib import Path
from tinkermq.schemas.local.disk import append_lines
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
try:
    append_lines(Path({str(path)!r}), ["x" * 10, "y" * 10])
except OSError as error:
    assert error.errno == errno.EFBIG
else:
    raise AssertionError("it fitted")
append_lines(Path({str(path)!r}), ["fits"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "short\nfits\n"


# -- What is to be done about a write that failed is said by its cause -----------------------------


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


async def test_a_disk_that_hangs_holds_up_nobody_but_who_named_it() -> None:
    released = threading.Event()
    threads = DiskThreads(most=2, deadline_s=0.05)
    for _ in range(3):  # two threads hang, and the third look waits for one of them
        with pytest.raises(TimeoutError):
            await threads.look("eve", released.wait, AFTER_PATIENCE_S)
    patient = DiskThreads(most=2, deadline_s=PATIENCE_S)
    assert await patient.look("ada", sorted, [2, 1]) == [1, 2]
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(sorted, [2, 1]) == [1, 2]
    released.set()

    async def is_free() -> bool:
        try:
            return await threads.look("eve", bool, 1)
        except TimeoutError:
            return False

    await eventually(is_free, "a thread of the user to be free again")


async def test_what_a_look_raises_is_raised() -> None:
    threads = DiskThreads(most=1, deadline_s=PATIENCE_S)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.look("ada", divmod, 1, 0)
