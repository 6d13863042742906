"""A checkpoint with a damaged file is noticed and named, and the one before is taken."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tinkermq.actors.learner.start import starting_point, unlike_records
from tinkermq.actors.policy.model_folder import check_model_folder
from tinkermq.actors.storage.files import TABLE, check_digests, flush
from tinkermq.actors.storage.run_folders import checkpoint_name
from tinkermq.actors.training.checkpoint import CheckpointStore, load_state
from tinkermq.actors.training.state import LearnerState
from tinkermq.schemas.task import BatchRecord, Dropped
from tinkermq.schemas.wire.errors import StorageError, StoreAwayError

from tests.support import disks

FILES = (
    "adapter_model.safetensors",
    "config.json",
    "learner/critic.safetensors",
    "learner/optimizer.pt",
    "learner/optimizer/__0_0.distcp",
    "learner/optimizer/__1_0.distcp",
    "model.safetensors",
    "policies/second/learner/optimizer.pt",
    "policies/second/model.safetensors",
    "tokenizer.json",
)
"""What learners of every kind write: adapters, critics, ranks, several policies."""


def _write(folder: Path) -> None:
    for number, name in enumerate(FILES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}".ljust(1000) if name == "config.json" else bytes([number]) * 1000)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


def _store(run: Path, steps: range) -> CheckpointStore:
    store = CheckpointStore(run, keep_last=3, keep_every=0)
    for step in steps:
        store.save(LearnerState(step=step, batch_seq=step), _write)
    return store


@pytest.mark.parametrize("name", [*FILES, "learner/state.json", TABLE])
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink], ids=["cut", "flipped", "gone"])
def test_whichever_file_is_damaged_the_checkpoint_before_is_taken_and_the_file_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    store = _store(tmp_path, range(1, 4))
    damage(store.path(3) / name)
    with pytest.raises((StorageError, ValueError)) as raised:
        load_state(store.path(3))
    assert name in str(raised.value)
    start = starting_point(store, "")
    assert start.folder == store.path(2)
    assert start.state.step == 2
    assert [name in error.message for error in start.damaged] == [True]
    assert store.steps() == [1, 2]
    assert (tmp_path / "latest").resolve() == store.path(2).resolve()
    assert (store.folder / "damaged_step_000003").is_dir()
    assert starting_point(store, "").damaged == []
    assert store.save(LearnerState(step=3), _write) == store.path(3)  # trained again


def test_damaged_ones_are_passed_over_one_after_the_other(tmp_path: Path) -> None:
    store = _store(tmp_path, range(1, 3))
    for step in (1, 2):
        _flip(store.path(step) / "model.safetensors")
    start = starting_point(store, "")
    assert (start.folder, start.state.step, len(start.damaged)) == (None, 0, 2)
    aside = sorted(path.name for path in store.folder.iterdir())
    assert aside == ["damaged_step_000001", "damaged_step_000002"]  # people may want their weights


@pytest.mark.parametrize("name", ["model.safetensors", "learner/state.json", TABLE])
def test_a_checkpoint_that_cannot_be_read_now_is_no_damaged_one(tmp_path: Path, name: str) -> None:
    store = _store(tmp_path, range(1, 4))
    with (
        disks.unreadable(store.path(3) / name),
        pytest.raises(StoreAwayError, match=f"{name} cannot be read: Input/output error"),
    ):
        starting_point(store, "")
    assert store.steps() == [1, 2, 3]
    assert starting_point(store, "").state.step == 3


def test_folders_of_people_beside_the_checkpoints_are_left_alone(tmp_path: Path) -> None:
    store = _store(tmp_path, range(1, 4))
    names = ["step_000003-copy", "step_3", "step_old", "step_000002.bak"]
    for name in names:
        shutil.copytree(store.path(3), store.folder / name)
    assert starting_point(store, "").folder == store.path(3)
    for step in range(4, 8):
        store.save(LearnerState(step=step), _write)
    assert store.steps() == [5, 6, 7]
    assert all((store.folder / name).is_dir() for name in names)


def test_an_older_damaged_one_keeps_no_other_from_a_store(tmp_path: Path) -> None:
    store = _store(tmp_path, range(1, 4))
    _cut(store.path(1) / "learner" / "state.json")
    assert store.first_seqs() == {2: 1, 3: 1}


def test_what_starts_from_a_damaged_checkpoint_is_told_the_file(tmp_path: Path) -> None:
    store = _store(tmp_path / "run", range(1, 2))
    whole, served = store.path(1), tmp_path / "fork"
    shutil.copytree(whole, served, ignore=shutil.ignore_patterns("learner"))
    check_model_folder(str(served))  # a copy without the learner's state is whole
    fork = tmp_path / "other"
    shutil.copytree(whole, fork)
    _cut(fork / "tokenizer.json")
    for start in (
        lambda: starting_point(CheckpointStore(tmp_path, keep_last=1, keep_every=0), str(fork)),
        lambda: check_model_folder(str(fork)),
    ):
        with pytest.raises(StorageError, match=r"other is damaged: tokenizer.json differs"):
            start()


def test_a_folder_that_was_written_without_digests_is_taken_as_it_is(tmp_path: Path) -> None:
    _write(tmp_path)
    check_digests(tmp_path)


def test_what_cannot_be_removed_keeps_no_checkpoint_from_being_written(tmp_path: Path) -> None:
    store = _store(tmp_path, range(1, 4))
    with disks.small_disk(store.path(1) / "busy", 1):  # as what is being read over NFS
        assert store.save(LearnerState(step=4), _write) == store.path(4)
        assert store.steps() == [2, 3, 4]
        (left,) = store.folder.glob(".step_000001.*")
        left.rename(store.path(1))  # it is unmounted there
    store.path(1).rename(left)
    store.save(LearnerState(step=5), _write)
    assert sorted(path.name for path in store.folder.iterdir()) == [
        checkpoint_name(step) for step in (3, 4, 5)
    ]


def test_a_file_that_may_not_be_written_is_flushed(tmp_path: Path) -> None:
    """As code that came with a model, which keeps its mode when it is copied."""
    (tmp_path / "modeling.py").touch(mode=0o444)
    tmp_path.chmod(0o755)
    child = os.fork()
    if not child:
        try:
            os.chdir(tmp_path)
            if os.geteuid() == 0:
                os.setuid(65534)
            flush(Path())
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _record(step: int, *dropped: int) -> BatchRecord:
    return BatchRecord(
        step=step,
        seqs=[100 + step],
        tasks=[100 + step],
        dropped=[Dropped(seq=seq, task=seq, reason="stale") for seq in dropped],
        oldest=0,
        seed=0,
        digest="",
        learner="l",
        time=0.0,
    )


@pytest.mark.parametrize(
    ("unrecorded", "records", "is_foreign"),
    [
        ([], [_record(4)], False),
        ([7], [], False),
        ([7], [_record(3)], False),
        ([7], [_record(3), _record(4, 7)], False),
        ([7], [_record(4, 6, 7, 8)], False),
        ([7], [_record(4)], True),
        ([7, 8], [_record(4, 7)], True),
        ([7], [_record(3, 7), _record(4, 8), _record(5, 7)], True),
    ],
)
def test_a_checkpoint_that_decided_otherwise_than_the_record_behind_it_is_of_another_learner(
    tmp_path: Path, unrecorded: list[int], records: list[BatchRecord], is_foreign: bool
) -> None:
    dropped = [Dropped(seq=seq, task=seq, reason="malformed") for seq in unrecorded]
    error = unlike_records(tmp_path, LearnerState(step=3, unrecorded=dropped), records)
    assert (error is not None) == is_foreign
