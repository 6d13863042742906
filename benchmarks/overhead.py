"""What the system costs beside the model: share of a step, time to the first step, idle memory.

    python -m benchmarks.overhead [--part share|start|idle]

Share: a random Qwen3-like model of 100 M parameters trains some short steps with the default
staleness bound. Counted as outside model computation is the time of a step in which the learner
neither computed nor waited for groups, and, beside it, all time in which neither the learner nor
the engine computed. Start: from `tinkermq train` at the shell to the end of the first optimiser
step, everything warm but the processes. Idle: resident memory of what waits.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

from benchmarks.processes import pss_mb, rss_mb
from benchmarks.report import Report, parser
from benchmarks.stack import Run, Stack
from benchmarks.tasks import Shape, addition_job, coin_job, random_model, warm_model

WARM = 2
LARGE: Shape = {"width": 1024, "layers": 7, "heads": 16, "mlp_width": 3072}
SETTLE_S = 4.0
COMMAND = str(Path(sys.executable).with_name("tinkermq"))
FIRST_STEP_DEADLINE_S = 300.0


# -- share of a step -----------------------------------------------------------------------------


def large_job(*, quick: bool) -> dict[str, Any]:
    """Return the job of the 100 M model, or of a small one."""
    model = random_model("nano", width=64, layers=2) if quick else random_model("large", **LARGE)
    num_steps = WARM + (3 if quick else 6)
    config = coin_job(model, num_steps, tasks=4, group=4, tokens=32)
    config["learner"]["publish_dtype"] = "bfloat16"
    return config


def outside(run: Run) -> tuple[float, float, float, float]:
    """Return the means per step: wall, waiting, training, and what is neither, in seconds."""
    wall_s = run.step_s(after=WARM)
    wait_s = mean(run.values("timing_s/wait", after=WARM))
    model_s = mean(run.values("timing_s/update_actor", after=WARM))
    return wall_s, wait_s, model_s, wall_s - wait_s - model_s


def tell_share(run: Run, report: Report) -> None:
    """Print where the time of a step goes."""
    wall_s, wait_s, model_s, rest_s = outside(run)
    busy = run.busy_share(after=WARM)
    rows = [
        ["learner computes", f"{model_s:.3f} s", f"{model_s / wall_s:.1%}"],
        ["learner waits for groups", f"{wait_s:.3f} s", f"{wait_s / wall_s:.1%}"],
        ["neither", f"{rest_s:.3f} s", f"{rest_s / wall_s:.1%}"],
        ["engine computes (beside the learner)", f"{busy * wall_s:.3f} s", f"{busy:.1%}"],
    ]
    report.table(f"A step of {wall_s:.2f} s", ["what", "per step", "share"], rows)
    costs = run.cpu_ms_per_step(after=WARM)
    lines = [[name, f"{loop:.0f}", f"{other:.0f}"] for name, (loop, other) in sorted(costs.items())]
    report.table("CPU milliseconds per step", ["process", "main thread", "other threads"], lines)
    report.at_most("share of a step outside model computation", 100 * rest_s / wall_s, 5.0, "%")


# -- time to the first step ------------------------------------------------------------------------


def first_step_s(stack: Stack, config: dict[str, Any]) -> float:
    """Return the seconds from `tinkermq train` to the end of the first optimiser step."""
    file = stack.folder / "first.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(stack.folder / "runs"), **config}))
    started, wall = time.perf_counter(), time.time()
    process = stack.start("client", COMMAND, "train", str(file), "--json", stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        metric = json.loads(line).get("metric")
        if metric and metric["step"] == 1 and "training_step_reward" in metric["values"]:
            break
        if time.perf_counter() - started > FIRST_STEP_DEADLINE_S:
            raise RuntimeError("the first step did not come")
    else:
        raise RuntimeError(f"train ended without a step, see {stack.folder}/client.log")
    return metric["time"] - wall


async def start_times(stack: Stack, *, quick: bool, report: Report) -> None:
    """Print the time from `train` to the first step."""
    times = list[float]()
    for _ in range(1 if quick else 2):
        config = addition_job(warm_model("addition", quick=quick), 2)
        times.append(await asyncio.to_thread(first_step_s, stack, config))
        await asyncio.to_thread(stack.processes["client"].wait, 60)
    report.at_most("from `train` to the first optimiser step, median", median(times), 20.0, "s")


# -- idle memory ---------------------------------------------------------------------------------


async def idle_memory(stack: Stack, report: Report) -> None:
    """Print what idle processes hold: a job whose generators were taken away waits."""
    config = addition_job(warm_model("addition", quick=True), 2)
    config["generator"]["count"] = 0
    config["output_dir"] = str(stack.folder / "runs")
    file = stack.folder / "idle.yaml"
    file.write_text(yaml.safe_dump(config))
    stack.start("client", COMMAND, "train", str(file))
    record = await _waiting_job(stack)
    await asyncio.sleep(SETTLE_S)
    pids = {name: stack.processes[name].pid for name in ("scheduler", "node", "client")}
    presences = await stack.presences(record)
    hosts = [item.pid for item in presences.values() if item.role == "environment"]
    pids |= {"environment host": hosts[0]} | ({"nats-server": stack.server.pid or 0})
    found = {name: (rss_mb(pid) or 0.0, pss_mb(pid) or 0.0) for name, pid in pids.items()}
    rows = [[name, f"{rss:.1f}", f"{pss:.1f}"] for name, (rss, pss) in found.items()]
    report.table(
        "Idle processes, megabytes", ["process", "RSS", "PSS (shared pages divided)"], rows
    )
    ours = {name: rss for name, (rss, _) in found.items() if name != "nats-server"}
    worst = max(ours, key=lambda name: ours[name])
    report.at_most(f"idle {worst}, the largest of {len(ours)}", ours[worst], 100.0, "MB")
    await stack.pool.stop(record.job, now=True)
    await asyncio.to_thread(stack.processes["client"].wait, 60)


async def _waiting_job(stack: Stack) -> Any:
    """Wait until the learner of the only job that runs waits for generators."""
    deadline = time.monotonic() + FIRST_STEP_DEADLINE_S
    while time.monotonic() < deadline:
        for record in await stack.pool.list_jobs():
            presences = await stack.presences(record)
            if any(item.waits_for.startswith("the generators") for item in presences.values()):
                return record
        await asyncio.sleep(0.2)
    raise RuntimeError(f"no learner waits, see {stack.folder}")


# -- all -----------------------------------------------------------------------------------------


async def measure(parts: list[str], report: Report, *, quick: bool) -> None:
    """Measure the parts, in one stack."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stack(Path(folder)) as stack:
            if "idle" in parts:
                await idle_memory(stack, report)
            if "start" in parts:
                await start_times(stack, quick=quick, report=report)
            if "share" in parts:
                tell_share(await stack.run(large_job(quick=quick)), report)


def main() -> None:
    """Parse the arguments, run, print and write."""
    options = parser(__doc__)
    options.add_argument("--part", choices=["idle", "start", "share"], help="only this one")
    arguments = options.parse_args()
    report = Report("overhead", "What the system costs beside the model", quick=arguments.quick)
    parts = [arguments.part] if arguments.part else ["idle", "start", "share"]
    asyncio.run(measure(parts, report, quick=arguments.quick))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
