"""A folder that jobs may write leads services nowhere else, whatever lies in it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tinkermq.broker.disk.run_folder import Folder
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
