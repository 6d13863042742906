"""A rank of a learner other than the first: `python -m …learner.ranks.worker RANK PIPE FILE`.

It reads orders from its standard input, written by rank 0 or the rank's actor, and ends with that
input. It writes the reason for its end into the pipe, and its progress into the file, both given by
their descriptors.
"""

import faulthandler
import os
import signal
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import structlog
import torch

from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import OutOfMemoryError, StorageError, TinkermqError
from ...policy.devices import let_segments_grow, own_device
from ...runtime import EXIT_CRASHED, EXIT_DONE, EXIT_FAILED, EXIT_OUT_OF_MEMORY, configure_logging
from ...training.functions.calls import OwnFunctions
from ...training.functions.wire import STEP_KINDS
from ...training.numerics import settle_numerics
from ...training.parallel import Meeting, Parallel, whole_tensors
from ...training.policies import Policies, load_models
from ...training.progress import ProcessPhases
from ...training.ranks import Order, folder_here

_log = structlog.get_logger()


def serve(rank: int, orders: Connection, progress: ProcessPhases | None = None) -> None:
    """Carry out orders until there are no more; `progress` reports their phases."""
    progress = progress or ProcessPhases()
    order = Order.receive(orders)
    with order.during(progress.training):
        policies, parallel = _begin(rank, order, progress)
    _log.info("rank_ready")
    saves = Saves(policies)
    try:
        while True:
            order = Order.receive(orders)
            with order.during(progress.training):
                _do(order, policies, saves)
    except EOFError:
        saves.wait()
        parallel.leave()


def _begin(rank: int, order: Order, progress: ProcessPhases) -> tuple[Policies, Parallel]:
    """Meet the other ranks, and load with them the models and what has been trained."""
    config = JobConfig.model_validate_json(order.fields["config"])
    let_segments_grow()
    settle_numerics(config.learner, on_gpu=own_device().type == "cuda")
    torch.set_num_threads(config.learner.threads)
    meeting = Meeting.reach(order.fields["meeting"])
    parallel = Parallel.join(rank, config.learner, meeting, progress)
    parallel.phases.enter("load")
    folder, hidden = (
        None if order.fields[name] is None else Path(order.fields[name])
        for name in ("folder", "hidden")
    )
    functions = OwnFunctions.of(config, hidden, STEP_KINDS)
    with folder_here(folder, parallel) as here:
        policies = Policies(
            config,
            load_models(config, here, hollow=parallel.filled_by_another),
            total_steps=order.fields["total_steps"],
            functions=functions,
            folder=here,
            parallel=parallel,
        )
    return policies, parallel


class Saves:
    """The checkpoint that this rank writes with the others while training continues."""

    def __init__(self, policies: Policies) -> None:
        """There is no checkpoint yet."""
        self._policies = policies
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(self) -> None:
        """Copy the next checkpoint when the last one is written, and start writing it."""
        self.wait()
        self._writing = self._writer.submit(self._policies.copy(None).write, None)

    def check(self) -> None:
        """Raise the last checkpoint's error, except errors of its disk."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint; raise its error, except errors of its disk."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except StorageError as error:  # rank 0 also raises it, and the run continues
            _log.warning("checkpoint_failed", message=error.message)


def _do(order: Order, policies: Policies, saves: Saves) -> None:
    saves.check()
    match order.do:
        case "step":
            fields = order.fields
            tokens = fields["microbatch_tokens"]
            policies.step(order.groups, fields["step"], fields["oldest"], microbatch_tokens=tokens)
        case "gather":
            dtype = order.fields["dtype"]
            if dtype is None:
                policies.gather()
                return
            for model in policies.models.values():
                for _ in whole_tensors(model, getattr(torch, dtype)):
                    pass  # used by rank 0 only
        case "save":
            saves.begin()
        case "begin" | "end":
            raise ValueError("a rank gets `begin` once, and no order after `end`")


def main(argv: list[str]) -> int:
    """Serve as the given rank; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 receives it, and ends the others
    faulthandler.enable()
    rank = int(argv[0])
    configure_logging(role="learner", rank=rank)
    try:
        serve(rank, Connection(sys.stdin.fileno(), writable=False), ProcessPhases(int(argv[2])))
    except TinkermqError as error:
        _log.error("rank_failed", code=error.code, message=error.message, hint=error.hint)
        os.write(int(argv[1]), str(error).encode())
        if isinstance(error, OutOfMemoryError):
            return EXIT_OUT_OF_MEMORY
        return EXIT_CRASHED if error.may_pass else EXIT_FAILED
    return EXIT_DONE


def _end_with(code: int) -> NoReturn:
    """End without waiting for a checkpoint in another thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _end_with(main(sys.argv[1:]))
    except Exception:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
        _end_with(EXIT_CRASHED)
