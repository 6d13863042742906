"""Processes that save checkpoints until something stops them; tests kill them or fill their disk.

They are forked from a server that has imported torch once.
"""

import multiprocessing
import resource
import shutil
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.wire.errors import StorageError

from tests.support.groups import random_group


def fork_context() -> ForkServerContext:
    """Return what starts the processes of this module quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.saving"])
    return context


def make_trainer(folder: Path, source: Path | None = None) -> Trainer:
    """Load the model of a folder, or of a checkpoint with its optimiser."""
    torch.set_num_threads(1)
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "learner": {"lr": 1e-3, "schedule": "cosine"},
        }
    )
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
