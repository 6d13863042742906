"""Folders that jobs can write: links lead nowhere, sizes are bounded, odd names are names."""

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from tinkermq.actors.node.process import LogFile
from tinkermq.actors.storage.run_folders import checkpoint_folders
from tinkermq.schemas.local import folder as folders
from tinkermq.schemas.local.folder import Folder, process_folder
from tinkermq.schemas.wire.errors import StorageError

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
    (run_dir / "good" / "learner" / "link").symlink_to(run_dir)
    with Folder(run_dir) as folder, Folder(target) as other:
        for odd in ("link", "inner/folder"):
            with pytest.raises(StorageError, match=f"good/{odd} is a link, or no regular file"):
                folder.copy("good", other, "fork", link=link, leave_out=["learner"])
            folder.unlink(f"good/{odd}")
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


def as_an_ordinary_user(home: Path, act: Callable[[], None]) -> bool:
    """Whether something can be done in `home` by a process that root's rights do not help."""
    child = os.fork()
    if not child:
        try:
            os.chdir(home)  # to which no path may lead without root's rights
            if os.getuid() == 0:
                os.chown(".", 65534, 65534)
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
def test_folders_that_their_owner_has_locked_are_removed(mode: int, tmp_path: Path) -> None:
    def act() -> None:
        inner = Path("run", "a", "b")
        inner.mkdir(parents=True)
        (inner / "file").write_text("x")
        (inner / "file").chmod(0)
        for one in (inner, inner.parent, inner.parent.parent):
            one.chmod(mode)
        with Folder(".") as folder:
            folder.remove("run")

    assert as_an_ordinary_user(tmp_path, act)
    assert list(tmp_path.iterdir()) == []


def test_more_files_than_are_walked_are_told_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 50)
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


def test_folders_that_killed_processes_have_left_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    kept = {
        f"tinkermq-ours-{os.getppid()}-12345678",
        "tinkermq-ours-x",
        f"tinkermq-image-{ended.pid}-{'0' * 32}",
        f"other-ours-{ended.pid}-12345678",
    }
    for name in (*kept, *(f"tinkermq-{kind}-{ended.pid}-12_45678" for kind in ("ours", "theirs"))):
        (tmp_path / name).mkdir()
    made = process_folder("ours", tmp_path)
    assert made.name.startswith(f"tinkermq-ours-{os.getpid()}-")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, made.name}
