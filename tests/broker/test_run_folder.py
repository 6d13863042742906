"""Run folders: links lead nowhere, lines are whole, rollouts are bounded, causes are named."""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tinkermq.actors.node.process import LogFile
from tinkermq.actors.storage.files import storage_error
from tinkermq.actors.storage.run_folders import checkpoint_folders
from tinkermq.broker import run_folder
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.disk import append_lines, read_objects, remedy
from tinkermq.broker.jetstream.streams import delete_job_streams
from tinkermq.broker.kept_rollouts import (
    RolloutKeeper,
    RunRollouts,
    keep_rollout,
    kept_rollouts,
    spread,
    thin_out,
)
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.broker.run_folder import Folder
from tinkermq.broker.tracking import JsonlTracker
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.errors import StorageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support import disks
from tests.support.strategies import make_group

SECRET = b"the pool's secret"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A folder beside the run's with a secret."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "key").write_bytes(SECRET)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path, secrets: Path) -> Path:
    """A run folder with all that a hostile learner may make there."""
    run = tmp_path / "run"
    (run / "good" / "inner").mkdir(parents=True)
    (run / "good" / "file").write_bytes(b"one")
    (run / "good" / "inner" / "file").write_bytes(b"two")
    (run / "good" / "link").symlink_to(secrets / "key")
    (run / "good" / "inner" / "folder").symlink_to(secrets)
    (run / "link").symlink_to(secrets / "key")
    (run / "away").symlink_to(secrets)
    (run / "dangling").symlink_to(secrets / "new")
    os.mkfifo(run / "pipe")
    return run


READERS: dict[str, Callable[[Folder, str], object]] = {
    "open": lambda folder, name: folder.open(name),
    "read": lambda folder, name: folder.read(name, 100),
    "append": lambda folder, name: folder.append(name),
    "create": lambda folder, name: folder.create(name),
    "folder": lambda folder, name: folder.folder(name),
    "make": lambda folder, name: folder.folder(f"{name}/new", make=True),
    "entries": lambda folder, name: folder.entries(name),
    "files": lambda folder, name: list(folder.files(name)),
}


@pytest.mark.parametrize("name", ["link", "away", "away/key", "dangling", "pipe", "good/link"])
@pytest.mark.parametrize("verb", READERS)
def test_nothing_is_reached_through_a_link_or_a_pipe(
    run_dir: Path, secrets: Path, verb: str, name: str
) -> None:
    with Folder(run_dir) as folder, pytest.raises((OSError, StorageError)):
        READERS[verb](folder, name)
    assert [one.name for one in secrets.iterdir()] == ["key"]
    assert (secrets / "key").read_bytes() == SECRET


@pytest.mark.parametrize(
    "name", ["../secrets/key", "/etc/passwd", "good/../../secrets/key", "a\0b"]
)
@pytest.mark.parametrize("verb", READERS)
def test_a_name_that_leads_out_is_refused(run_dir: Path, verb: str, name: str) -> None:
    with Folder(run_dir) as folder, pytest.raises(ValueError, match="leads out of a folder"):
        READERS[verb](folder, name)


def test_a_run_folder_that_became_a_link_is_not_opened(tmp_path: Path, secrets: Path) -> None:
    (tmp_path / "run").symlink_to(secrets)
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "run")


def test_what_is_written_takes_the_place_of_a_link(run_dir: Path, secrets: Path) -> None:
    with Folder(run_dir) as folder:
        folder.write("link", b"new")
        folder.write("a/new/one", b"deep")
    assert (run_dir / "link").read_bytes() == b"new"
    assert (run_dir / "a/new/one").read_bytes() == b"deep"
    assert (secrets / "key").read_bytes() == SECRET


def test_links_are_removed_and_what_they_lead_to_stays(run_dir: Path, secrets: Path) -> None:
    with Folder(run_dir) as folder:
        for name in ("link", "away", "good", "pipe", "nothing"):
            folder.remove(name)
    assert sorted(one.name for one in run_dir.iterdir()) == ["dangling"]
    assert (secrets / "key").read_bytes() == SECRET


@pytest.mark.parametrize("link", [False, True])
def test_a_copy_holds_regular_files_alone(run_dir: Path, tmp_path: Path, link: bool) -> None:
    (run_dir / "good" / "learner").mkdir()
    (run_dir / "good" / "learner" / "state").write_bytes(b"x")
    target = tmp_path / "other"
    target.mkdir()
    with Folder(run_dir) as folder, Folder(target) as other:
        folder.copy("good", other, "fork", link=link, leave_out=["learner"])
    found = sorted(str(one.relative_to(target)) for one in target.rglob("*") if not one.is_dir())
    assert found == ["fork/file", "fork/inner/file"]
    assert (target / "fork/file").stat().st_nlink == (2 if link else 1)
    assert (target / "fork/file").read_bytes() == b"one"
    assert (target / "fork/file").stat().st_mtime == (run_dir / "good/file").stat().st_mtime


def test_a_copy_of_more_than_the_disk_holds_is_refused_before_it_begins(tmp_path: Path) -> None:
    for name in ("run/checkpoint", "other"):
        (tmp_path / name).mkdir(parents=True)
    with (tmp_path / "run/checkpoint/huge").open("wb") as file:
        file.truncate(1 << 42)  # sparse: it takes no room itself
    with Folder(tmp_path / "run") as folder, Folder(tmp_path / "other") as other:
        with pytest.raises(StorageError, match="there is room for"):
            folder.copy("checkpoint", other, "fork")
        assert list(other.files()) == []


def test_a_file_over_its_bound_is_refused(run_dir: Path) -> None:
    with Folder(run_dir) as folder:
        assert folder.read("good/file", 3) == b"one"
        with pytest.raises(StorageError, match="has 3 bytes; at most 2 are read"):
            folder.read("good/file", 2)


def test_what_is_no_file_and_no_folder_is_told(run_dir: Path) -> None:
    with Folder(run_dir) as folder:
        assert sorted(folder.strange(["away"])) == [
            *("dangling", "good/inner/folder", "good/link", "link", "pipe")
        ]


def test_a_folder_that_never_ends_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "/".join(["d"] * 20)).mkdir(parents=True)
    with Folder(tmp_path) as folder, pytest.raises(StorageError, match="folders more than 16 deep"):
        list(folder.files())
    with Folder(tmp_path) as folder, pytest.raises(StorageError, match="more than 16 folders deep"):
        list(folder.strange())


def test_a_folder_that_was_moved_is_still_the_one_that_was_opened(run_dir: Path) -> None:
    with Folder(run_dir) as folder:
        run_dir.rename(run_dir.with_name("moved"))
        assert folder.read("good/file", 10) == b"one"


ODD_NAMES = [
    *(b"a\nb", b"\r\n", b" ", b"-rf", b"*", b"~", b"$(id)", b"%2e%2e", b"...", b"\\..\\secrets"),
    *("\u202ename".encode(), "é".encode(), "e\u0301".encode(), b"\x1b[2J", b"a" * 255, b"\x7f"),
]
NO_TEXT = [b"\xff", b"\xfe\n", b"\xed\xa0\x80", b"\xc3", b"a\xffb"]


def test_odd_names_are_names_and_what_is_no_text_is_left_out_and_told(tmp_path: Path) -> None:
    checkpoint, other = tmp_path / "run/checkpoint", tmp_path / "other"
    (checkpoint / os.fsdecode(b"folder\xff") / "inner").mkdir(parents=True)
    for name in [*ODD_NAMES, *NO_TEXT]:
        (checkpoint / os.fsdecode(name)).write_bytes(name)
    other.mkdir()
    with Folder(tmp_path / "run") as folder, Folder(other) as target:
        found = {entry.name: folder.read(entry.path, 300) for entry in folder.files()}
        assert found == {name.decode(): name for name in ODD_NAMES}
        "".join(found).encode()  # each can be sent as text
        strange = set(folder.strange())
        assert len(strange) == len(NO_TEXT) + 1
        assert {r"checkpoint/\xff", r"checkpoint/a\xffb", r"checkpoint/folder\xff"} <= strange
        folder.copy("checkpoint", target, "fork")
        folder.remove("checkpoint")
        assert not folder.has("checkpoint")
    assert sorted(os.fsencode(one.name) for one in (other / "fork").iterdir()) == sorted(ODD_NAMES)


def nested(folder: Path, depth: int) -> None:
    """Make a folder in a folder in a folder."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_a_folder_however_deep_is_removed(tmp_path: Path, secrets: Path) -> None:
    (tmp_path / "run").mkdir()
    nested(tmp_path / "run", 3000)  # deeper than Python's stack, and longer than a path may be
    (tmp_path / "run/d/d/link").symlink_to(secrets)
    with Folder(tmp_path) as folder:
        folder.remove("run")
    assert [one.name for one in tmp_path.iterdir()] == ["secrets"]
    assert (secrets / "key").read_bytes() == SECRET


def as_an_ordinary_user(act: Callable[[], None]) -> bool:
    """Whether something can be done by a process that root's rights do not help."""
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            act()
        except BaseException:  # noqa: BLE001 - nothing of it may go on as the test
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o400, 0o500, 0o600, 0o300])
def test_folders_that_their_owner_has_locked_are_removed(mode: int) -> None:
    def act() -> None:
        with tempfile.TemporaryDirectory() as made:
            inner = Path(made, "run", "a", "b")
            inner.mkdir(parents=True)
            (inner / "file").write_text("x")
            (inner / "file").chmod(0)
            for one in (inner, inner.parent, inner.parent.parent):
                one.chmod(mode)
            with Folder(made) as folder:
                folder.remove("run")
            assert list(Path(made).iterdir()) == []

    assert as_an_ordinary_user(act)


def test_more_files_than_are_walked_are_told_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MAX_FILES", 50)
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for number in range(60):
        (tmp_path / "run/checkpoints" / f"{number}").touch()
    with Folder(tmp_path) as folder:
        with pytest.raises(StorageError, match="holds more than 50 files"):
            folder.entries("run/checkpoints")
        with pytest.raises(StorageError, match="holds more than 50 files"):
            list(folder.files("run"))
        assert checkpoint_folders(str(tmp_path / "run")) == {}
        folder.remove("run")
        assert not folder.has("run")


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link"])
def test_nothing_is_appended_to_what_is_no_file(tmp_path: Path, secrets: Path, kind: str) -> None:
    place = tmp_path / "run/logs/learner.log"
    place.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as unix:
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            with Folder(place.parent) as folder:
                unix.bind(f"/proc/self/fd/{folder.fileno()}/learner.log")
        elif kind == "folder":
            place.mkdir()
        else:
            place.symlink_to(secrets / "key")
        with pytest.raises((OSError, StorageError)):
            LogFile(tmp_path / "run", "logs/learner.log").append(["a line"])
    assert (secrets / "key").read_bytes() == SECRET


def test_a_huge_sparse_log_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "logs/learner.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(1 << 42)
    LogFile(tmp_path, "logs/learner.log").append(["one"])
    LogFile(tmp_path, "logs/learner.log").append(["two"])
    assert log.read_text().split() == ["two"]


# Rollouts in a run's folder: what the log no longer has, bounded in bytes, for people to read.


PLENTY = 1 << 20
STEPS = 40


async def trained(broker: Broker, scope: JobScope) -> tuple[RolloutLog, int]:
    """Fill a log: step N trains the entries 2N - 1 and 2N; return it and the last batch record."""
    log, batches, last = RolloutLog(broker, scope), BatchLog(broker, scope), 0
    for step in range(1, STEPS + 1):
        seqs = [2 * step - 1, 2 * step]
        for seq in seqs:
            assert await log.append(make_group(seq))
        record = BatchRecord(
            step=step, tasks=seqs, seqs=seqs, seed=0, digest="", learner="learner-0", time=0.0
        )
        last = await batches.append(record, last)
    return log, last


async def test_what_is_trimmed_archived_or_lost_is_still_read(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    log, last = await trained(broker, scope)
    keeper = RolloutKeeper(broker, scope, tmp_path, PLENTY)
    await keeper.sample(last // 2)
    await log.trim(STEPS)
    await keeper.sample(last)
    await log.trim(2 * STEPS - 3)
    await keeper.keep_newest()

    there = await RunRollouts.open(broker, scope, str(tmp_path))
    in_log = list(range(2 * STEPS, 2 * STEPS - 4, -1))
    assert there.before(None, 4) == in_log
    older = there.before(in_log[-1], 100)
    assert 8 <= len(older) <= 16
    assert min(older) < 10
    assert older == sorted(older, reverse=True)
    assert all(there.steps[seq] == (seq + 1) // 2 for seq in older)
    entry = await there.get(older[-1])
    assert entry is not None
    assert entry.group is not None
    assert entry.group.task.task == older[-1] == entry.number
    assert there.after(older[0]) == in_log[-1]
    assert there.after(2 * STEPS) is None

    await delete_job_streams(broker, scope)
    lost = await RunRollouts.open(broker, scope, str(tmp_path))
    assert lost.before(None, 100) == [*in_log, *older]
    assert RunRollouts.of_folder(tmp_path).before(None, 100) == [*in_log, *older]
    newest = await lost.get(2 * STEPS)
    assert newest is not None
    assert newest.payload == make_group(2 * STEPS).to_bytes()


async def test_a_folder_is_bounded_and_0_bytes_keep_nothing(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    _, last = await trained(broker, scope)
    nothing = RolloutKeeper(broker, scope, tmp_path / "nothing", 0)
    await nothing.sample(last)
    await nothing.keep_newest()
    assert not (tmp_path / "nothing").exists()

    size = len(make_group(1).to_bytes())
    keeper = RolloutKeeper(broker, scope, tmp_path, 12 * size)
    for seq in range(4, last + 1, 4):
        await keeper.sample(seq)
    await keeper.keep_newest()
    kept = kept_rollouts(tmp_path)
    assert sum(one.num_bytes for one in kept) <= 12 * size
    assert len(kept) >= 6
    assert [one.seq for one in kept][-3:] == [2 * STEPS - 2, 2 * STEPS - 1, 2 * STEPS]


async def test_a_folder_without_room_ends_no_run(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    _, last = await trained(broker, scope)
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    keeper = RolloutKeeper(broker, scope, tmp_path, PLENTY)
    await keeper.sample(last)
    await keeper.keep_newest()
    assert kept_rollouts(tmp_path) == []


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    keep_rollout(tmp_path, 7, b"not a group", 3, None)
    (folder / "2-1-1.group").symlink_to("/etc/passwd")
    (folder / "notes.txt").write_text("mine")
    (folder / "3-1-1.group").mkdir()
    (found,) = kept_rollouts(tmp_path)
    assert (found.seq, found.step, found.task) == (7, None, 3)
    thin_out(tmp_path, 1)
    assert kept_rollouts(tmp_path) == []
    assert (folder / "notes.txt").read_text() == "mine"
    assert kept_rollouts(tmp_path / "nowhere") == kept_rollouts("") == []


async def test_a_file_that_is_no_group_is_told_as_such(tmp_path: Path) -> None:
    keep_rollout(tmp_path, 7, b"not a group", 3, 1)
    entry = await RunRollouts.of_folder(tmp_path).get(7)
    assert entry is not None
    assert entry.group is None
    assert entry.error is not None


@pytest.mark.parametrize(
    ("behind", "last", "expected"),
    [(0, 3, [1, 2, 3]), (0, 8, [2, 4, 6, 8]), (5, 6, [6]), (10, 19, [13, 16, 19]), (4, 4, [])],
)
def test_records_are_picked_evenly(behind: int, last: int, expected: list[int]) -> None:
    assert spread(behind, last, 4) == expected


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
from tinkermq.broker.disk import append_lines
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
