"""Groups appended to the rollout log and read again, against TransferQueue, which is in memory.

    python -m benchmarks.transfer_queue [--seconds 4] [--rounds 3]

TransferQueue is the data plane of verl and others. 32 writers put groups of 8 episodes, of 256 and
of 4,096 tokens, and as many readers get them again; here 32 writers append them to the log, where
they lie on disk, are checked, and a reader gets them in order. Both in turns on this machine.

The peer wants an environment of its own:

    python -m venv .transfer-queue && .transfer-queue/bin/pip install torch==2.13.0 \\
      TransferQueue==0.1.11
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import uvloop
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.broker import make_group, measure_reading, per_second
from benchmarks.report import Report, parser

REPOSITORY = Path(__file__).resolve().parents[1]
PEER = REPOSITORY / ".transfer-queue" / "bin" / "python"
WRITERS, TOKENS = 32, (256, 4096)
_DEADLINE_S = 300


async def ours(tokens: int, seconds: float) -> dict[str, float]:
    """Return the groups of 8 episodes per second that are appended, and read again."""
    scope = JobScope("local", "bench")
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder) / "nats") as server:
        async with await connect(server.url, name="bench") as broker:
            await create_job_streams(broker, scope, LimitsConfig(rollout_bytes=8 << 30))
            log, group = RolloutLog(broker, scope), make_group(0, 8, tokens)

            async def append(number: int) -> None:
                task = group.task.model_copy(update={"task": number})
                await log.append(group.model_copy(update={"task": task}))

            rate = await per_second(append, WRITERS, seconds)
            return {"put": rate, "got": await measure_reading(log)}


def theirs(tokens: int, seconds: float) -> dict[str, float]:
    """Return the same of TransferQueue."""
    command = [str(PEER), "-m", "benchmarks.transfer_queue_peer"]
    done = subprocess.run(
        [*command, str(tokens), str(seconds), str(WRITERS)],
        cwd=REPOSITORY,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=_DEADLINE_S,
    )
    return json.loads(done.stdout.splitlines()[-1])


async def run(arguments: argparse.Namespace) -> dict[tuple[int, str, str], float]:
    """Measure both in turns; return the medians by tokens, side and what is done."""
    rates: dict[tuple[int, str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for tokens in TOKENS:
            here = await ours(tokens, arguments.seconds)
            there = await asyncio.to_thread(theirs, tokens, arguments.seconds)
            for side, found in (("ours", here), ("theirs", there)):
                for what, rate in found.items():
                    rates.setdefault((tokens, side, what), []).append(rate)
    return {key: median(values) for key, values in rates.items()}


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=4.0, help="time for each measurement")
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.3, 1
    if not PEER.exists():
        options.error(f"there is no {PEER}: make the environment as the module's docstring says")
    report = Report("transfer_queue", "the rollout log and TransferQueue", quick=arguments.quick)
    rates = uvloop.run(run(arguments))
    rows = [[f"8 × {tokens:,}", *key, f"{rate:,.0f}"] for (tokens, *key), rate in rates.items()]
    report.table("Groups per second", ["tokens", "", "", "rate"], rows)
    for tokens in TOKENS:
        for what, said in (("put", "appended per group put"), ("got", "read per group got")):
            ratio = rates[tokens, "ours", what] / rates[tokens, "theirs", what]
            report.at_least(f"{said}, 8 × {tokens:,} tokens", ratio, 1.0)
    report.note("Ours lie on disk and are checked as they are read; TransferQueue's are in memory.")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
