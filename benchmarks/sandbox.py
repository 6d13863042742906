"""Programs in the sandbox: what one costs, and how many run side by side.

Sixteen programs that compute for half a second each should take about half a second times sixteen
over the number of cores; run one after the other they take eight seconds. The machine may be busy,
so the measure beside it is the same programs run by as many plain interpreters, in turns.

    python -m benchmarks.sandbox [--programs 16] [--seconds 0.5] [--rounds 3]
"""

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tinkermq.envs.sandbox.interpreters import LocalCodeSandbox, SandboxSettings

from benchmarks.report import Report, parser

COMPUTE = """
import time
while time.process_time() < {seconds}: sum(range(1000))
print("done")
"""
"""Computes until the process has had so many seconds of a core."""
Run = Callable[[str], str]


def sandboxed(sandbox: LocalCodeSandbox) -> Run:
    """Return a function that runs a program in a sandbox of its own."""

    def run(code: str) -> str:
        with contextlib.closing(sandbox.session()) as session:
            return session.run(code).text

    return run


def plain(code: str) -> str:
    """Run a program in an interpreter without a sandbox."""
    command = [sys.executable, "-S", "-B", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def together(run: Run, code: str, count: int, at_once: int) -> float:
    """Run a program `count` times, `at_once` at a time; return seconds."""
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(run, [code] * count))
    assert answers == ["done\n"] * count, answers
    return time.perf_counter() - started


def main() -> int:
    """Measure in turns and print; return the exit code."""
    options = parser(__doc__)
    options.add_argument("--programs", type=int, default=16)
    options.add_argument("--seconds", type=float, default=0.5)
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    seconds = 0.05 if arguments.quick else arguments.seconds
    cores = len(os.sched_getaffinity(0))
    sandbox = LocalCodeSandbox(SandboxSettings(packages=[]))
    report = Report("sandbox", "Programs of a model in the sandbox", quick=arguments.quick)
    report.note(sandbox.self_test())
    code = COMPUTE.format(seconds=seconds)
    ways: dict[str, Callable[[], float]] = {
        f"sandbox, {cores} at once": lambda: together(
            sandboxed(sandbox), code, arguments.programs, cores
        ),
        f"no sandbox, {cores} at once": lambda: together(plain, code, arguments.programs, cores),
        "sandbox, an empty program": lambda: together(sandboxed(sandbox), "print('done')", 1, 1),
        "no sandbox, an empty program": lambda: together(plain, "print('done')", 1, 1),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            taken[name].append(measure())
    medians = {name: statistics.median(values) for name, values in taken.items()}
    report.table(
        f"{arguments.programs} programs of {seconds:g} s, and one that does nothing",
        ["", "median s", "each round"],
        [
            [name, f"{medians[name]:.3f}", " ".join(f"{value:.3f}" for value in values)]
            for name, values in taken.items()
        ],
    )
    ideal = seconds * arguments.programs / cores
    many, without, empty, bare = medians.values()
    report.at_most(f"{arguments.programs} programs over {ideal:g} s", many / ideal, 1.25)
    report.at_most("the same without a sandbox", without / ideal, None)
    report.at_most("what the sandbox adds to them", many / without, 1.15)
    report.at_most("what the sandbox adds to an empty program", (empty - bare) * 1e3, None, "ms")
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
