"""A checkpoint is written while training goes on, and counts only when it is whole."""

import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tinkermq.actors.policy.model_folder import save_model
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.checkpoint import load_state
from tinkermq.actors.training.checkpoint_copy import HostCopies, ModelCopy, trained_weights
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import EngineError, StorageError

from tests.support import disks
from tests.support.saving import (
    BackgroundRun,
    config_of,
    fork_context,
    make_store,
    make_trainer,
    train,
    train_and_save,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

NUM_STEPS = 5


class HangingDisk:
    """A disk whose fsync returns when it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()
        patch.setattr(os, "fsync", self._fsync)

    def _fsync(self, _: int) -> None:
        self.asked.set()
        assert self.let_go.wait(PATIENCE_S)


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    """One that is let go at the end at the latest."""
    disk = HangingDisk(monkeypatch)
    yield disk
    disk.let_go.set()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_goes_on_while_a_disk_hangs_and_the_checkpoint_is_of_its_step(
    folder: Path, tmp_path: Path, hanging_disk: HangingDisk, num_ranks: int
) -> None:
    run = BackgroundRun(folder, tmp_path, num_ranks)
    try:
        run.train()
        expected = run.digest()
        run.begin_save()
        assert hanging_disk.asked.wait(PATIENCE_S)
        for _ in range(3):
            run.train()
        assert run.writing is not None
        assert not run.writing.done()
        assert run.store.steps() == []
        hanging_disk.let_go.set()
        run.finish_save()
        assert run.store.steps() == [1]
    finally:
        run.ranks.close()
    again = BackgroundRun(folder, tmp_path, num_ranks)
    try:
        assert again.digest() == expected
    finally:
        again.ranks.close()


def test_the_next_checkpoint_waits_for_the_one_that_is_written(
    folder: Path, tmp_path: Path, hanging_disk: HangingDisk
) -> None:
    run = BackgroundRun(folder, tmp_path, 1)
    run.train()
    run.begin_save()
    assert hanging_disk.asked.wait(PATIENCE_S)
    run.train()
    with ThreadPoolExecutor(1) as other:
        second = other.submit(run.begin_save)
        assert [path.name.split(".")[1] for path in run.store.folder.iterdir()] == ["step_000001"]
        assert not second.done()
        hanging_disk.let_go.set()
        second.result(PATIENCE_S)
    run.finish_save()
    assert run.store.steps() == [1, 2]


def test_a_copy_stays_as_it_was_and_keeps_tied_weights_tied(folder: Path) -> None:
    trainer = make_trainer(folder)
    train(trainer, range(1, 2))
    weights = trained_weights(trainer.model)
    first = next(iter(weights))
    copied = HostCopies().take({"a": weights, "b": {"tied": weights[first]}})
    before = {name: tensor.clone() for name, tensor in weights.items()}
    train(trainer, range(2, 3))
    assert not torch.equal(before[first], weights[first])
    for name, tensor in before.items():
        assert torch.equal(copied["a"][name], tensor), name
    assert copied["b"]["tied"] is copied["a"][first]


def _tensors_of(copied: ModelCopy) -> list[torch.Tensor]:
    states = copied.optimizer["state"].values()
    return [*copied.weights.values(), *(value for state in states for value in state.values())]


def test_a_checkpoint_is_copied_before_an_update_alone(folder: Path) -> None:
    trainer = make_trainer(folder)
    train(trainer, range(1, 2))
    copied = trainer.copy(None).policy
    held = _tensors_of(copied)
    before = [tensor.clone() for tensor in held]
    assert held[0].data_ptr() in {one.data_ptr() for one in trainer.model.parameters()}
    train(trainer, range(2, 3))
    assert not torch.equal(held[0], before[0])
    for tensor, expected in zip(_tensors_of(copied), before, strict=True):
        assert torch.equal(tensor, expected)


def test_a_file_that_an_update_overtakes_is_written_again_and_the_update_does_not_wait(
    folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(folder)
    train(trainer, range(1, 2))
    copied = trainer.copy(None).policy
    before = {name: tensor.clone() for name, tensor in copied.weights.items()}
    begun, go_on = threading.Event(), threading.Event()
    seen: list[dict[str, torch.Tensor]] = []

    def write(weights: dict[str, torch.Tensor]) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        seen.append({name: tensor.clone() for name, tensor in weights.items()})

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(copied.write_weights, write)
        assert begun.wait(PATIENCE_S)
        train(trainer, range(2, 3))
        go_on.set()
        writing.result(PATIENCE_S)
    assert len(seen) == 2
    assert all(torch.equal(seen[1][name], tensor) for name, tensor in before.items())
    copied.write_optimizer(tmp_path / "optimizer", Parallel())()
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
    assert {float(one["step"]) for one in state.values()} == {1.0}


def test_writing_a_model_leaves_the_weights_to_be_written_again(
    folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(folder)
    weights = trained_weights(trainer.model)
    before = dict(weights)
    for name in ("first", "second"):
        save_model(trainer.model, tmp_path / name, weights)
        assert weights == before
    first, second = (load_file(tmp_path / one / "model.safetensors") for one in ("first", "second"))
    assert first.keys() == second.keys()


def test_what_was_read_is_let_go_of_though_no_update_comes() -> None:
    copies, read = HostCopies(), list[weakref.ref[Future[None]]]()
    for _ in range(5):
        reading = Future[None]()
        reading.set_result(None)
        copies.wait_before_change(reading)
        read.append(weakref.ref(reading))
        del reading
    assert [one() is None for one in read] == [True] * 4 + [False]


def test_weights_are_read_beside_the_passes_of_a_step_and_its_update_waits(
    folder: Path, tmp_path: Path
) -> None:
    run = BackgroundRun(folder, tmp_path, 1)
    trainer = run.policies.trainers[MAIN]
    weights = [one for one in trainer.model.parameters() if one.requires_grad]
    before = [one.detach().clone() for one in weights]
    go_on, updates = threading.Event(), list[bool]()

    def read() -> list[torch.Tensor]:
        assert go_on.wait(PATIENCE_S)
        return [one.detach().clone() for one in weights]

    reading = run.policies.read_beside_training(read)
    assert reading is not None
    trainer.optimizer.register_step_pre_hook(lambda *_: updates.append(reading.done()))
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(run.train)
        while not vars(reading)["_waiters"]:  # until the step waits
            assert not training.done()
            time.sleep(0.001)
        assert all(one.grad is not None for one in weights)  # its passes are over
        go_on.set()
        training.result(PATIENCE_S)
    assert updates == [True]
    assert all(torch.equal(one, old) for one, old in zip(reading.result(), before, strict=True))
    assert not torch.equal(weights[0], before[0])


def test_a_reading_that_fails_does_not_stop_the_step(folder: Path, tmp_path: Path) -> None:
    run = BackgroundRun(folder, tmp_path, 1)

    def read() -> None:
        raise OSError("no room")

    reading = run.policies.read_beside_training(read)
    assert reading is not None
    run.train()
    with pytest.raises(OSError, match="no room"):
        reading.result()


def test_what_is_written_and_released_is_not_copied(folder: Path) -> None:
    trainer = make_trainer(folder)
    train(trainer, range(1, 2))
    copied = trainer.copy(None)
    copied.release()
    train(trainer, range(2, 3))
    assert (copied.policy.weights, copied.policy.optimizer) == ({}, {})


@pytest.mark.parametrize("rank", [0, 4])
def test_the_weights_of_a_copy_have_the_names_that_versions_have(folder: Path, rank: int) -> None:
    config = config_of(folder)
    model = load_model(config.model, config.learner, lora=LoraConfig(rank=rank))
    trainer = Trainer(model, config, total_steps=2)
    copied, expected = trainer.copy(None).named_weights(), trainer.weights()
    assert copied.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(copied[name], tensor), name


def test_a_disk_that_fills_while_training_goes_on_leaves_the_earlier_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    with disks.small_disk(tmp_path / "disk", 8) as place:
        run = BackgroundRun(folder, place, 1)
        run.train()
        run.begin_save()
        run.finish_save()
        ballast = disks.fill(place)
        run.train()
        run.begin_save()
        run.train()
        with pytest.raises(StorageError, match="the disk is full") as raised:
            run.finish_save()
        assert raised.value.is_full
        assert run.store.steps() == [1]
        load_state(run.store.path(1))
        ballast.unlink()
        run.writing = None
        run.begin_save()
        run.finish_save()
        assert run.store.steps() == [1, 3]


# -- kills -----------------------------------------------------------------------------------------


def _start(folder: Path, run: Path, num_ranks: int) -> tuple[BaseProcess, Connection]:
    context = fork_context()
    listen, told = context.Pipe(duplex=False)
    process = context.Process(target=train_and_save, args=(folder, run, told, num_ranks, NUM_STEPS))
    process.start()
    told.close()
    return process, listen


def _until_writing(run: Path, process: BaseProcess) -> None:
    """Wait until a checkpoint has begun to be written."""
    while not any((run / "checkpoints").glob(".step_*/*")):
        assert process.is_alive()
        threading.Event().wait(0.002)


def _until_trained(told: Connection, step: int) -> None:
    assert told.poll(PATIENCE_S)
    while told.recv() < step:
        assert told.poll(PATIENCE_S)


def _digest_at_the_end(folder: Path, run: Path, num_ranks: int) -> str:
    """Run to the last step; return the digest of the weights."""
    process, told = _start(folder, run, num_ranks)
    while True:
        assert told.poll(PATIENCE_S)
        if isinstance(said := told.recv(), str):
            process.join()
            return said
        assert isinstance(said, int), said


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_while_a_checkpoint_is_written_a_run_goes_on_to_the_same_bits(
    folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    expected = _digest_at_the_end(folder, tmp_path / "uninterrupted", num_ranks)
    run, rng = tmp_path / "killed", random.Random(num_ranks)
    store, newest = make_store(run), 0
    for step in (1, 3):
        process, told = _start(folder, run, num_ranks)
        _until_trained(told, step)
        _until_writing(run, process)
        threading.Event().wait(rng.uniform(0, 0.2))  # anywhere in what is written
        process.kill()
        process.join()
        latest, damaged = store.latest_whole()
        assert damaged == []
        state = 0 if latest is None else load_state(latest).step
        assert state >= max(newest, step - 1)  # the one before was whole when its next began
        newest = state
    assert _digest_at_the_end(folder, run, num_ranks) == expected
    assert not list(store.folder.glob(".step_*"))


def test_a_rank_killed_while_a_checkpoint_is_written_ends_the_run_with_its_name(
    folder: Path, tmp_path: Path
) -> None:
    expected = _digest_at_the_end(folder, tmp_path / "uninterrupted", 2)
    run = tmp_path / "killed"
    process, told = _start(folder, run, 2)
    _until_trained(told, 2)
    _until_writing(run, process)
    (rank,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "tinkermq.actors.learner.ranks.worker" in child.cmdline()
    ]
    rank.kill()
    said: object = 0
    while isinstance(said, int):
        assert told.poll(PATIENCE_S)
        said = told.recv()
    assert isinstance(said, EngineError)
    assert "rank 1 of the learner" in str(said)
    process.join()
    assert make_store(run).latest_whole()[1] == []
    assert _digest_at_the_end(folder, run, 2) == expected
