"""How fast the dashboard opens: 2,000 jobs, a job of 100,000 steps, ten runs over each other.

    python -m benchmarks.dashboard [--jobs 2000] [--steps 100000] [--compared 10000]

Real processes: nats-server, scheduler, gateway, and Debian's chromium, which opens the pages. The
jobs have ended; the newest fifty have a feed each. The long job has a feed with seventy numbers a
step. It is opened first by a gateway that has never read it (it shows a sample and reads the rest
meanwhile), then once all is read.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from playwright.async_api import Browser
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import create_shared, ensure_stream, job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, JobScope
from ulid import ULID

from benchmarks.report import Report, parser
from tests.support.browser import open_browser
from tests.support.gateway import Gateway, run_gateway
from tests.support.waiting import eventually

NAMES = (
    *("training_step_reward", "val/mean_score", "response_length/mean", "actor/entropy"),
    *("actor/ppo_kl", "actor/pg_loss", "actor/grad_norm", "staleness/lag_mean"),
    *("perf/throughput", "perf/time_per_step", *(f"game/number_{n}" for n in range(60))),
)
WITH_FEED = 50
COMPARED = 10
_AT_ONCE = 500
_WATCH = """
const look = () => { if (READY) window.readyAt ??= performance.now(); };
new MutationObserver(look).observe(document, { childList: true, subtree: true });
document.addEventListener("DOMContentLoaded", look);
"""


def record(number: int, steps: int) -> JobRecord:
    """Return a job that has ended."""
    return JobRecord(
        job=str(ULID()).lower(),
        name=f"bandit-tiny-run-{number}",
        user="local",
        state=("COMPLETED", "FAILED", "CANCELLED")[number % 3],
        reason="" if number % 3 == 0 else "the learner ran out of memory at step 12",
        config={
            "env": {"game": "bandit"},
            "model": {"path": "models/tiny"},
            "training": {"num_steps": steps, "batch_size": 16},
        },
        created=1.7e9 + number,
        started=1.7e9 + number,
        finished=1.7e9 + number + 3600,
        version=steps,
    )


async def write_feed(broker: Broker, scope: JobScope, steps: int) -> None:
    """Store the metrics of a job."""
    limits = LimitsConfig(log_bytes=1 << 30)
    feed = next(one for one in job_streams(scope, limits, 1) if one["name"] == scope.stream_feed)
    await ensure_stream(broker, feed)
    for step in range(1, steps + 1):
        values = {name: math.sin(step / 900 + place) for place, name in enumerate(NAMES)}
        payload = Metric(step=step, values=values, time=float(step)).to_bytes()
        if step % _AT_ONCE and step != steps:
            await broker.publish(scope.metric, payload)
        else:  # confirmed, so that the server is never far behind
            await broker.append(scope.metric, payload, deadline_s=60, waiting_for="the feed")


async def fill(
    broker: Broker, jobs: int, steps: int, compared: int
) -> tuple[JobRecord, list[JobRecord]]:
    """Store the jobs; return the long one, and those to compare, of `compared` steps each."""
    await create_shared(broker)
    bucket = Bucket(broker, BUCKET_JOBS, JobRecord)
    records = [record(number, 40) for number in range(jobs - 1)]
    for start in range(0, len(records), _AT_ONCE):
        some = records[start : start + _AT_ONCE]
        await asyncio.gather(*(bucket.put(f"local.{one.job}", one) for one in some))
    for one in records[-WITH_FEED:]:
        await write_feed(broker, JobScope("local", one.job), 5)
    long = record(jobs, steps)
    several = [record(jobs + 1 + number, compared) for number in range(COMPARED)]
    for one in (long, *several):
        await write_feed(broker, one.scope, one.version)
        await bucket.put(f"local.{one.job}", one)
    return long, several


async def open_in_browser(browser: Browser, url: str, ready: str) -> float:
    """Return the seconds from the navigation until a page shows what it shall, by its own clock.

    Nothing of it is in the browser's cache.
    """
    context = await browser.new_context()
    await context.add_init_script(_WATCH.replace("READY", ready))
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_function("() => window.readyAt", timeout=120_000)
    milliseconds = await page.evaluate("() => window.readyAt")
    await context.close()
    return float(milliseconds) / 1000


async def fetch(gateway: Gateway, path: str) -> float:
    """Return the seconds that an answer takes."""
    started = time.perf_counter()
    answer = await gateway.get(path)
    assert answer.status == 200, answer.text
    return time.perf_counter() - started


async def measure(
    server: NatsServer, folder: Path, long: JobRecord, several: list[JobRecord]
) -> dict[str, float]:
    """Open the pages with a gateway that has just started; return the seconds of each."""
    times: dict[str, float] = {}
    table = "document.querySelectorAll('table.jobs tbody tr').length >= 50"
    drawn = "document.querySelectorAll('.chart canvas').length >= 3"
    job = f"/jobs/{long.job}"
    compare = "/compare?" + "&".join(f"run={one.job}" for one in several)
    async with run_gateway(server.url, folder) as gateway, open_browser() as browser:
        await open_in_browser(browser, f"{gateway.url}/api", "document.readyState !== 'loading'")
        times["jobs: first"] = await open_in_browser(browser, f"{gateway.url}/jobs", table)
        times["jobs: again"] = await open_in_browser(browser, f"{gateway.url}/jobs", table)
        times["jobs: searched"] = await fetch(gateway, "/jobs?search=failed+run-11")
        times["job: first"] = await open_in_browser(browser, gateway.url + job, drawn)
        started = time.perf_counter()

        async def complete() -> bool:
            return bool((await gateway.get(f"/api/v1{job}/metrics")).json["complete"])

        await eventually(complete, "all metrics to be read", 300)
        times["job: all read after"] = time.perf_counter() - started
        times["job: again"] = await open_in_browser(browser, gateway.url + job, drawn)
        times["job: curves as JSON"] = await fetch(gateway, f"/api/v1{job}/metrics")
        times["ten runs: first"] = await open_in_browser(browser, gateway.url + compare, drawn)
        times["ten runs: again"] = await open_in_browser(browser, gateway.url + compare, drawn)
    return times


async def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Start everything, fill the broker, measure."""
    with tempfile.TemporaryDirectory() as name, NatsServer(Path(name) / "nats") as server:
        async with await connect(server.url, name="bench") as broker:
            filled = await fill(broker, arguments.jobs, arguments.steps, arguments.compared)
        scheduler = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkermq.actors.scheduler", "--nats", server.url),
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            return await measure(server, Path(name), *filled)
        finally:
            scheduler.terminate()
            await scheduler.wait()


def main() -> None:
    """Parse the arguments, measure, report."""
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=2000)
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--compared", type=int, default=10_000, help="steps of each of ten runs")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.steps, arguments.compared = 100, 5000, 500
    report = Report("dashboard", "the dashboard with many jobs", quick=arguments.quick)
    times: dict[str, Any] = uvloop.run(run(arguments))
    rows = [[what, f"{seconds:.3f}"] for what, seconds in times.items()]
    title = f"{arguments.jobs:,} jobs, one of {arguments.steps:,} steps"
    report.table(title, ["opened in chromium, or fetched", "seconds"], rows)
    report.at_most("the table of jobs opens", times["jobs: first"], 1.0, "s")
    report.at_most("the long job opens, never read before", times["job: first"], 1.0, "s")
    report.at_most("the long job opens, read", times["job: again"], 1.0, "s")
    report.at_most("ten runs laid over each other open", times["ten runs: first"], 2.0, "s")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
