"""Prompts lost per kill: the same processes killed at equal moments, here and in TRL.

    python -m benchmarks.lost_prompts [--kills 20] [--peer PYTHON] [--quick]

Each run has as many prompts as its steps train, so that each is trained once if nothing is killed.
It is killed with SIGKILL in one role, at steps spread evenly, and goes on until it has ended.
Counted are prompts that the final weights were never trained with, or more than once, and steps
that were computed and lost: TRL's since its newest checkpoint, ours those that are trained again
from the log. Both save every five steps.

TRL is its asynchronous trainer (1.16, `trl.experimental.async_grpo`, lost_prompts_peer.py), by a
Python that has it; its own worker generates and its own checkpoints resume, at once. Two parts are
replaced, because they need GPUs: vLLM by a server of random tokens (its generator), the transfer of
weights by none. Its rollout worker, which plays environments and computes rewards, is a process of
its own. It has no broker. Ours is the whole stack.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.clients.verify import verify
from tinkermq.envs.write_data import write_rows

from benchmarks.evidence.cells import RESULTS
from benchmarks.report import parser
from benchmarks.stack import REPOSITORY, Stack
from benchmarks.tasks import addition_job, questions, random_model

BATCH, GROUP, SAVE_EVERY = 4, 4, 5
MAX_STALENESS = 8
THEIR_STALENESS, THEIR_REQUESTS = 64, 32
"""So large that nothing is dropped for its age: TRL does not issue such prompts again."""
STEPS_PER_KILL, LEAST_STEPS = 6, 18
ROLES = ("none", "generator", "environment", "learner", "broker")
_POLL_S = 0.05
_DEADLINE_S = 900.0
_HANGS_S = 60.0
"""Time after which a trainer whose worker is dead is killed, too."""
Row = dict[str, Any]


def moments(kills: int) -> tuple[int, list[int]]:
    """Return the number of steps of a run, and those after which it is killed."""
    steps = max(LEAST_STEPS, STEPS_PER_KILL * (kills + 1))
    return steps, [round((number + 1) * steps / (kills + 1)) - 1 for number in range(kills)]


def counted(side: str, role: str, kills: int, trained: Iterable[int], steps_lost: int) -> Row:
    """Return the result of a run whose final weights were trained with these prompts."""
    times, (steps, _) = Counter(trained), moments(kills)
    return {
        "side": side,
        "role": role,
        "kills": kills,
        "prompts": steps * BATCH,
        "never": sum(prompt not in times for prompt in range(steps * BATCH)),
        "twice": sum(count > 1 for count in times.values()),
        "steps_lost": steps_lost,
        "date": time.strftime("%Y-%m-%d"),
    }


# -- ours ------------------------------------------------------------------------------------------


async def ours(role: str, kills: int, folder: Path) -> Row:
    """Train and kill in our stack."""
    steps, at = moments(kills)
    rows = questions("addition").read_text().splitlines()[: steps * BATCH]
    data = write_rows(folder / "train.jsonl", map(json.loads, rows))
    job = addition_job(random_model("lost-prompts"), steps)
    job["env"]["train_data"] = [str(data)]
    job["rollout"]["group_size"] = GROUP
    job["limits"] = {"max_restarts": 10 * kills + 10}
    job["training"] = {
        "num_epochs": 1,
        "batch_size": BATCH,
        "max_staleness": MAX_STALENESS,
        "save_freq": SAVE_EVERY,
        "keep_rollouts": True,
    }
    async with Stack(folder / "stack") as stack:
        running = asyncio.create_task(stack.run(job, deadline_s=_DEADLINE_S))
        try:
            for step in at if role != "none" else ():
                await _kill_ours(stack, role, step, running)
            run = await running
        finally:
            running.cancel()
        result = await verify(stack.connection, await stack.pool.find(run.record.job))
        assert result.passed, str(result)
        log = RolloutLog(stack.connection, run.record.scope)
        trained: list[int] = []
        for _, record in await BatchLog(stack.connection, run.record.scope).read_all():
            entries = await asyncio.gather(*map(log.get, record.seqs))
            groups = [entry.group for entry in entries if entry is not None]
            samples = [group.task.sample for group in groups if group is not None]
            trained += [sample for sample in samples if sample is not None]
    again = [event for event in run.events if event.kind == "training_recovered"]
    steps_lost = sum(int(event.message.split()[1]) for event in again)  # training N recorded steps
    return counted("tinkermq", role, kills, trained, steps_lost)


async def _kill_ours(stack: Stack, role: str, step: int, running: "asyncio.Task[Any]") -> None:
    """Kill a process of the run once the run has trained a step."""
    while not running.done():
        for record in await stack.pool.list_jobs():
            if record.version >= step:
                break
        else:
            await asyncio.sleep(_POLL_S)
            continue
        if role == "broker":
            await asyncio.to_thread(stack.server.kill)
            await asyncio.to_thread(stack.server.start)
            return
        name = "learner" if role == "learner" else f"{role}-0"
        if (presence := (await stack.presences(record)).get(name)) is not None:
            with contextlib.suppress(ProcessLookupError):  # of the one that was killed before
                os.kill(presence.pid, signal.SIGKILL)
                return
        await asyncio.sleep(_POLL_S)
    await running


# -- theirs ----------------------------------------------------------------------------------------


class _Peer:
    """TRL's trainer and the server that generates for it, as processes."""

    def __init__(self, python: str, kills: int, folder: Path) -> None:
        steps, self.at = moments(kills)
        self._python, self._folder = python, folder
        self.trained = folder / "trained.jsonl"
        settings = {
            "model": str(random_model("lost-prompts")),
            "folder": str(folder),
            "prompts": steps * BATCH,
            "batch": BATCH,
            "group": GROUP,
            "save_every": SAVE_EVERY,
            "max_staleness": THEIR_STALENESS,
            "max_requests": THEIR_REQUESTS,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        self.server = self.start("serve")
        self.trainer = self.start("train")

    def start(self, part: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{part}.log").open("ab") as log:
            command = (self._python, "-m", "benchmarks.lost_prompts_peer", part)
            return subprocess.Popen(
                [*command, str(self._folder / "settings.json")],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[tuple[int, list[int]]]:
        """Return each step that was trained, also those that were lost, with its prompts."""
        if not self.trained.is_file():
            return []
        lines = self.trained.read_text().splitlines()
        return [(row["step"], row["prompts"]) for row in map(json.loads, lines)]

    def kill(self, role: str) -> None:
        """Kill one process; the trainer's children end with it, and it resumes if it ended."""
        if role == "generator":
            self.server.kill()
            self.server.wait()
            self.server = self.start("serve")
            return
        if role == "environment":
            os.kill(int((self._folder / "worker.pid").read_text()), signal.SIGKILL)
        else:
            self.trainer.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for its worker
            self.trainer.wait(_HANGS_S)
        os.killpg(self.trainer.pid, signal.SIGKILL)
        self.trainer = self.start("train")

    def close(self) -> None:
        for process in (self.trainer, self.server):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def theirs(python: str, role: str, kills: int, folder: Path) -> Row:
    """Train and kill with TRL's asynchronous trainer."""
    deadline = time.monotonic() + _DEADLINE_S + kills * _HANGS_S
    peer = _Peer(python, kills, folder)
    try:
        waiting = list(peer.at) if role != "none" else []
        while peer.trainer.poll() is None or waiting:
            assert time.monotonic() < deadline, f"not done: {folder}"
            if waiting and (steps := peer.steps()) and max(step for step, _ in steps) >= waiting[0]:
                waiting.pop(0)
                peer.kill(role)
            elif peer.trainer.poll() is not None:
                break
            time.sleep(_POLL_S)
        assert peer.trainer.poll() == 0, (folder / "train.log").read_text()[-2000:]
    finally:
        peer.close()
    lineage: dict[int, list[int]] = {}
    steps = peer.steps()
    for step, prompts in steps:
        for later in [known for known in lineage if known >= step]:
            del lineage[later]  # the trainer resumed from a checkpoint before it
        lineage[step] = prompts
    trained: list[int] = []
    for step, prompts in lineage.items():  # a group's samples may be in two steps in succession
        before = lineage.get(step - 1, [])
        trained += [prompt for prompt in prompts if prompt not in before]
    return counted("TRL, asynchronous", role, kills, trained, len(steps) - len(lineage))


def main() -> None:
    """Run all roles on both sides, print a table, and keep the results if they are whole."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=20, help="in each run (default: 20)")
    options.add_argument("--peer", metavar="PYTHON", help="a Python with TRL; default: ours alone")
    options.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="default: all")
    arguments = options.parse_args()
    kills, console = 1 if arguments.quick else arguments.kills, Console()
    results: list[Row] = []
    for role in arguments.roles:
        for side in ("tinkermq", *(["TRL"] if arguments.peer and role != "broker" else [])):
            with tempfile.TemporaryDirectory(prefix="lost-prompts-") as name:
                folder = Path(name)
                (folder / "stack").mkdir()
                if side == "TRL":
                    row = theirs(arguments.peer, role, kills, folder)
                else:
                    row = asyncio.run(ours(role, kills, folder))
            if role == "none":
                row["kills"] = 0
            results.append(row)
            console.print(" ".join(f"{key}={value}" for key, value in row.items()), soft_wrap=True)
    lines = "".join(f"{json.dumps(row)}\n" for row in results)
    if arguments.json:
        arguments.json.write_text(lines)
    elif arguments.peer and not arguments.quick:
        (RESULTS / "lost_prompts.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
