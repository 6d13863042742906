"""One asynchronous run of the whole stack: broker, scheduler, node, learner and generator."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ....broker.batches import BatchLog
from ....broker.calls.scheduler import SchedulerCalls
from ....broker.client.connection import Broker, connect
from ....broker.programs.process import die_with
from ....broker.programs.server import NatsServer
from ....broker.rollouts import RolloutLog
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.wire.errors import DeadlineError, InternalError
from ..figures import Figure, Found, Setting
from ..material import RandomPolicy

_NUM_STEPS, _STALENESS, _BATCH = 12, 2, 4
_DEADLINE_S = 100.0
_POLL_S = 0.2
_LINES = 15


def asynchronous_run(setting: Setting) -> Found:
    """Train some steps of a game; generators and learner have devices of their own."""
    with NatsServer(setting.folder / "nats") as server, _actors(setting, server.url):
        return asyncio.run(_run(server.url, setting))


@contextmanager
def _actors(setting: Setting, url: str) -> Iterator[None]:
    """Run a scheduler and nodes; the actors of the job end with their nodes."""
    wanted = [["scheduler"], *(["node", *words] for words in _nodes(setting))]
    processes = [_start(setting.folder, url, words) for words in wanted]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _nodes(setting: Setting) -> list[list[str]]:
    """Return the arguments of nodes that give two slots away; two of them share a single GPU."""
    if not setting.on_gpu:
        return [["--name", "cpu", "--slots", "2"]]
    if torch.cuda.device_count() > 1:
        return [["--name", "gpus"]]
    return [["--name", name, "--gpus", "0"] for name in ("learning", "generating")]


def _start(folder: Path, url: str, words: list[str]) -> subprocess.Popen[bytes]:
    role, *more = words
    with (folder / f"{role}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"tinkermq.actors.{role}", "--nats", url, *more],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with(os.getpid()),
        )


async def _run(url: str, setting: Setting) -> Found:
    async with await connect(url, name="acceptance") as broker:
        calls = SchedulerCalls(broker)
        submitted = await calls.submit(_job(setting))
        record = await _until_ended(calls, submitted.scope.job)
        if record.state != "COMPLETED":
            raise InternalError(
                f"the run ended as {record.state}: {record.reason}", hint=_last_lines(record)
            )
        return Found(await _figures(broker, record))


def _job(setting: Setting) -> dict[str, Any]:
    """Return a bandit with a random model: what is learnt does not matter, what travels does."""
    policy = RandomPolicy.make(setting)
    dtype = "bfloat16" if setting.on_gpu else "float32"
    return {
        "name": "acceptance",
        "output_dir": str(setting.folder / "runs"),
        "model": {"path": str(policy.folder)},
        "env": {"game": "bandit", "num_val": 0},
        "rollout": {
            "group_size": 4,
            "max_prompt_tokens": 32,
            "max_turn_tokens": 6,
            "max_response_tokens": 24,
        },
        "generator": {"max_episodes": 32, "max_requests": 32, "dtype": dtype},
        "learner": {"lr": 1e-3, "dtype": dtype, "row_tokens": 512, "microbatch_tokens": 2048},
        "training": {
            "num_steps": _NUM_STEPS,
            "batch_size": _BATCH,
            "max_staleness": _STALENESS,
            "keep_rollouts": True,
        },
    }


async def _until_ended(calls: SchedulerCalls, job: str) -> JobRecord:
    deadline = time.monotonic() + _DEADLINE_S
    record = await calls.get(job)
    while record.state not in FINAL_STATES:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the run was {record.state} after {_DEADLINE_S:g} s: {record.reason}",
                hint=_last_lines(record),
            )
        await asyncio.sleep(_POLL_S)
        record = await calls.get(job)
    return record


async def _figures(broker: Broker, record: JobRecord) -> list[Figure]:
    """Read the run's own records: what was trained, how stale it was, how often twice."""
    batches = [batch for _, batch in await BatchLog(broker, record.scope).read_all()]
    trained = [task for batch in batches for task in batch.tasks]
    step_of = {seq: batch.step for batch in batches for seq in batch.seqs}
    lags: list[int] = []
    async for entry in RolloutLog(broker, record.scope).read():
        if entry.group is not None and entry.seq in step_of:
            lags.append(step_of[entry.seq] - 1 - entry.group.min_version)
        if len(lags) == len(step_of):
            break
    seconds = (record.finished or time.time()) - (record.started or record.created)
    return [
        Figure("steps", len(batches), at_least=_NUM_STEPS, at_most=_NUM_STEPS),
        Figure("trained twice", len(trained) - len(set(trained)), at_most=0),
        Figure("versions behind", max(lags), at_least=1, at_most=_STALENESS),
        Figure("took", seconds, "s"),
    ]


def _last_lines(record: JobRecord) -> str:
    """Return the last lines of the logs of a run's actors."""
    logs = sorted(Path(record.run_dir).glob("logs/*"))
    texts = [(log.name, log.read_text(errors="replace").splitlines()) for log in logs]
    return "\n".join(f"{name}: {line}" for name, lines in texts for line in lines[-_LINES:])
