"""Runs the tests of a machine with GPUs within a budget of time, most worth first.

    python3 -m tests.gpu [--budget 540] [--device cpu] [--folder outputs/gpu] [MODULE ...]

Any Python from 3.11 on runs it that has torch and transformers, from a bare source tree. Where
tinkermq is not installed, a folder of links stands in for it, with the metadata of pyproject.toml.
What else is missing is taken from `outputs/gpu_packages.tgz`, which `make gpu-packages` makes where
there is an index, and which may be carried to a machine without one.

On a GPU each module of tests is a process of its own, so that an error of CUDA fails that module
and no other. The one that runs at the end of the budget is ended; what it has measured counts.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "outputs" / "gpu_packages.tgz"
FIRST = (
    "weights",
    "step_speed",
    "copies",
    "loop_speed",
    "step_kinds",
    "engines",
    "memory",
    "asynchronous_run",
    "devices",
    "sharding",
)
"""Modules of tests, most worth first."""
TESTED_BY = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
LEAST_S = 15.0
"""Time that a module of tests needs at least, most of it for imports."""
REPORT_S = 10.0
ENDING_S = 5.0


def main(words: Sequence[str] | None = None) -> int:
    """Run the tests; return 0 if those that ran passed, and the report is complete."""
    arguments = _parsed(words)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.jsonl"
    figures.unlink(missing_ok=True)
    environment = _environment(arguments.device, folder) | {"FIGURES": str(figures)}
    if missing := list(_missing()):
        print(
            f"{sys.executable} lacks {', '.join(missing)}: run `make gpu-packages` where there is "
            f"a package index, and bring {PACKAGES.relative_to(ROOT)} here",
            file=sys.stderr,
        )
        return 2
    deadline = time.monotonic() + arguments.budget - REPORT_S
    names = arguments.modules or list(FIRST)
    failed = False
    for group in [names] if arguments.device == "cpu" else [[name] for name in names]:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            _note(figures, group, f"the budget of {arguments.budget:g} s was spent")
            continue
        code = _run(group, environment, left_s)
        if code is None:
            _note(figures, group, f"was ended with the budget of {arguments.budget:g} s")
        failed |= code not in (0, None)
    command = [sys.executable, "-m", "tests.gpu.report", str(folder)]
    reported = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    return 1 if failed else reported.returncode


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, help="seconds (540; 1800 without a GPU)")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "gpu")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(FIRST)}")
    arguments = parser.parse_args(words)
    if arguments.budget is None:
        arguments.budget = 540.0 if arguments.device == "gpu" else 1800.0
    return arguments


def _environment(device: str, folder: Path) -> dict[str, str]:
    """Return the variables of the tests; modules that are not installed are found by them."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    environment = os.environ | {"DEVICE": device}
    places: list[str] = []
    if any(_missing()) and PACKAGES.is_file():
        unpacked = folder / "packages"
        shutil.unpack_archive(PACKAGES, unpacked, filter="data")
        environment["PATH"] += f"{os.pathsep}{unpacked / 'bin'}"
        places.append(str(unpacked))
    sys.path[:0] = places
    try:
        distribution("tinkermq")
    except PackageNotFoundError:
        places.append(str(linked(folder / "tree", project)))
    sys.path[:0] = places[-1:]
    given = os.environ.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*places, given]))
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return environment


def linked(folder: Path, project: dict[str, Any]) -> Path:
    """Make a folder with tinkermq as links to the source, and its metadata; return it."""
    package, about = folder / "tinkermq", project["project"]
    metadata = folder / f"tinkermq-{about['version']}.dist-info"
    for each in (package, metadata):
        each.mkdir(parents=True, exist_ok=True)
    for name, place in project["tool"]["setuptools"]["package-dir"].items():
        if name.count(".") <= 1:  # the package has files of its own, its rooms are folders
            inside = name.removeprefix("tinkermq").removeprefix(".") or "__init__.py"
            link = package / inside
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / place / (inside if name == "tinkermq" else ""))
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tinkermq\nVersion: {about['version']}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in about["entry-points"].items()
        )
    )
    return folder


def _missing() -> Iterator[str]:
    """Yield the packages that the tests need and this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    worker = project["optional-dependencies"]["worker"]
    for requirement in (*project["dependencies"], *worker, *TESTED_BY):
        name = re.split(r"[^\w.-]", requirement)[0]
        if name == "tinkermq":  # an extra of its own: what environments need is not tested here
            continue
        try:
            distribution(name)
        except PackageNotFoundError:
            yield name


def _run(names: Sequence[str], environment: dict[str, str], left_s: float) -> int | None:
    """Run modules of tests; return the exit code, None if the time was over."""
    modules = [f"tests/gpu/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command.append("--continue-on-collection-errors")
    process = subprocess.Popen(
        [*command, "-m", "gpu_machine", *modules], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        return process.wait(left_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # those that it has started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _note(figures: Path, names: Sequence[str], reason: str) -> None:
    """Note why modules were left out; the report module imports torch, which takes seconds."""
    with figures.open("a", encoding="utf-8") as file:
        for name in names:
            line = {"test": f"test_{name}.py", "outcome": "left out", "reason": reason}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
