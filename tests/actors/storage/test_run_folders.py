"""Folders of runs are archived and removed wherever an operator has moved them."""

from pathlib import Path

from tinkermq.actors.storage.run_folders import (
    archive_of,
    begin_archive,
    drop_archive,
    remove_run_folder,
)


def test_a_run_is_archived_and_removed_behind_a_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "large" / "run").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "large")
    run = str(tmp_path / "outputs" / "run")
    assert begin_archive(run, "j").is_dir()
    assert archive_of(run, "j").samefile(tmp_path / "large" / ".archives" / "j")
    drop_archive(run, "j")
    remove_run_folder(run, "j")
    assert list((tmp_path / "large").iterdir()) == []


def test_a_run_that_is_a_link_takes_nothing_else_with_it(tmp_path: Path) -> None:
    (tmp_path / "other" / "kept").mkdir(parents=True)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "run").symlink_to(tmp_path / "other")
    remove_run_folder(str(tmp_path / "outputs" / "run"), "j")
    assert list((tmp_path / "outputs").iterdir()) == []
    assert (tmp_path / "other" / "kept").is_dir()
