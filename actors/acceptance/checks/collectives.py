"""Sums over processes, as the ranks of a learner meet: NCCL over all GPUs, gloo over two CPUs."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from ....schemas.config.learner import LearnerConfig
from ....schemas.wire.errors import DeadlineError
from ...learner.training.parallel import Meeting, Parallel
from ..figures import CheckSkipped, Figure, Found, Setting

_DEADLINE_S = 50.0
_TIMES = 5


def nccl(setting: Setting) -> Found:
    """Sum over all GPUs of the machine, one process each."""
    if not setting.on_gpu:
        raise CheckSkipped(
            "NCCL speaks between GPUs, of which none is used here",
            hint="run `tinkermq doctor --gpu` on a machine with GPUs",
        )
    return _all_reduce(torch.cuda.device_count(), 1 << 28)


def gloo(setting: Setting) -> Found:
    """Sum over two processes of this machine, in its memory."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # they would each want a GPU
    return _all_reduce(2, 1 << (24 if setting.on_gpu else 16))


def _all_reduce(num_ranks: int, num_values: int) -> Found:
    """Have each rank sum float32[N] with all others; 2 (n - 1) / n of it pass each link."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    meeting = Meeting.open()
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, num_ranks, num_values, meeting.told(), theirs)
        context.Process(target=_sum, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    deadline = time.monotonic() + _DEADLINE_S
    told = [_next(pipe, rank, deadline) for rank, pipe in enumerate(pipes)]
    wrong = max(error for error, _ in told)
    figures = [
        Figure("processes", num_ranks, at_least=1),
        Figure("a sum differs by", wrong, at_most=0),
    ]
    if num_ranks > 1:
        moved = 2 * (num_ranks - 1) / num_ranks * 4 * num_values
        slowest_s = max(seconds for _, seconds in told)
        figures.append(Figure("each link", moved / slowest_s / 1e9, "GB/s"))
    return Found(figures)


def _next(pipe: Connection, rank: int, deadline: float) -> tuple[float, float]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise DeadlineError(f"process {rank} summed nothing in {_DEADLINE_S:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise DeadlineError(f"process {rank} ended before it had summed anything") from error


def _sum(
    rank: int, num_ranks: int, num_values: int, told: dict[str, Any], pipe: Connection
) -> None:
    """Be a rank: tell the largest error and the seconds of the fastest sum."""
    config = LearnerConfig(ranks=num_ranks, slots=num_ranks)
    parallel = Parallel.join(rank, config, Meeting.reach(told))
    on_gpu = torch.cuda.is_available()
    where = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    took: list[float] = []
    error = 0.0
    for _ in range(_TIMES):
        values: Any = torch.full((num_values,), rank + 1.0, device=where)
        started = time.perf_counter()
        parallel.add_up(values)
        error = max(error, float((values - num_ranks * (num_ranks + 1) / 2).abs().max()))
        took.append(time.perf_counter() - started)
    pipe.send((error, min(took)))
    parallel.leave()
