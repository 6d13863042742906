"""Processes that save checkpoints until something stops them; tests kill them or fill their disk.

They are forked from a server that has imported torch once.
"""

import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import torch
from tinkermq.actors.learner.ranks.processes import ChildRanks
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import StorageError, TinkermqError

from tests.support.groups import random_group


def fork_context() -> ForkServerContext:
    """Return what starts the processes of this module quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.saving"])
    return context


def config_of(folder: Path, ranks: int = 1) -> JobConfig:
    """Return the configuration of a run on a model."""
    learner = {"lr": 1e-3, "schedule": "cosine", "ranks": ranks, "slots": ranks}
    return JobConfig.model_validate(
        {"model": {"path": str(folder)}, "env": {"game": "none"}, "learner": learner}
    )


def make_trainer(folder: Path, source: Path | None = None) -> Trainer:
    """Load the model of a folder, or of a checkpoint with its optimiser."""
    torch.set_num_threads(1)
    config = config_of(folder)
    trainer = Trainer(load_model(config.model, config.learner, source), config, total_steps=20)
    if source is not None:
        trainer.restore(source)
    return trainer


def train(trainer: Trainer, steps: range) -> None:
    """Train some steps, each on a batch of its own."""
    for step in steps:
        rng = np.random.default_rng(step)
        trainer.step(assemble([random_group(rng, number) for number in range(2)]), step)


def make_store(run: Path, keep_every: int = 0) -> CheckpointStore:
    """Return the store of a run that keeps two checkpoints."""
    return CheckpointStore(run, keep_last=2, keep_every=keep_every)


def save(store: CheckpointStore, trainer: Trainer, folder: Path, step: int) -> Path:
    """Save a checkpoint of a step."""
    tokenizer = load_tokenizer(str(folder))
    return store.save(LearnerState(step=step), lambda made: trainer.save(made, tokenizer))


def save_in_a_loop(folder: Path, run: Path, told: Connection) -> None:
    """Save each step twice, and tell when it is saved, for ever."""
    store, trainer = make_store(run), make_trainer(folder)
    step = max(store.steps(), default=0)
    while True:
        step += 1
        save(store, trainer, folder, step)
        save(store, trainer, folder, step)
        told.send(step)


def save_on_a_full_disk(folder: Path, run: Path, told: Connection, limit: int, left: int) -> None:
    """Save step 1, then step 2 with a limit on file size (0: none) and `left` bytes of room.

    Tells what the error says.
    """
    store, trainer = make_store(run), make_trainer(folder)
    train(trainer, range(1, 2))
    save(store, trainer, folder, 1)
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if left:
        (run / "ballast").write_bytes(b"x" * (shutil.disk_usage(run).free - left))
    try:
        save(store, trainer, folder, 2)
    except StorageError as error:
        told.send(str(error))


# -- saving while training goes on -----------------------------------------------------------------


class BackgroundRun:
    """A run that saves after each step, and trains the next one meanwhile, as a learner does."""

    def __init__(self, folder: Path, run: Path, num_ranks: int) -> None:
        """Go on from the newest checkpoint, where there is one."""
        torch.set_num_threads(1)
        config = config_of(folder, num_ranks)
        self.store = make_store(run)
        newest = self.store.latest()
        self.step = self.store.steps()[-1] if newest is not None else 0
        self.ranks = ChildRanks.start(config)
        self.policies = Policies.open(
            config, load_models(config, newest), self.ranks, total_steps=20, folder=newest
        )
        self._tokenizer = load_tokenizer(str(folder))
        self._writer = ThreadPoolExecutor(1)
        self.writing: Future[Path] | None = None

    def train(self) -> None:
        """Train one step."""
        self.step += 1
        rng = np.random.default_rng(self.step)
        groups = [random_group(rng, number, version=self.step - 1) for number in range(2)]
        self.policies.step(groups, self.step)

    def begin_save(self) -> None:
        """Begin to write a checkpoint, once the last one is written."""
        self.finish_save()
        copied = self.policies.copy(self._tokenizer)
        state = LearnerState(step=self.step)
        self.writing = self._writer.submit(self.store.save, state, copied.write)

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self.writing is not None:
            self.writing.result()

    def digest(self) -> str:
        """Return a digest of all weights and of the optimiser's state."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.policies.gather()[MAIN].items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()


def slow_fsync(seconds: float) -> Callable[[int], None]:
    """Return an fsync of a disk that takes so long for each file."""
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        fsync(descriptor)

    return slow


def train_and_save(
    folder: Path, run: Path, told: Connection, num_ranks: int, num_steps: int
) -> None:
    """Train and save on a slow disk; tell each step, and at the end a digest, or an error."""
    os.fsync = slow_fsync(0.05)
    made = BackgroundRun(folder, run, num_ranks)
    try:
        while made.step < num_steps:
            made.train()
            made.begin_save()
            told.send(made.step)
        made.finish_save()
        told.send(made.digest())
    except TinkermqError as error:
        told.send(error)
    finally:
        made.ranks.close()
