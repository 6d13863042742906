"""Run the benchmarks one after the other and write docs/benchmarks.md: `python -m benchmarks`.

    python -m benchmarks [NAME …] [--quick] [--page-only]

Nothing else should run on the machine meanwhile. Each script writes its result below
outputs/benchmarks/results/; the page is made from what lies there, so that one script can be run
again without the others. A remark on a result, where there is one, is
benchmarks/remarks/<name>.md. A run with --quick writes no page: its figures mean nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.page import page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "outputs" / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
IN_VLLM = ROOT / ".venv-vllm" / "bin" / "python"
"""Of the environment that `make test-vllm` makes."""
NAMES = (
    "broker",
    "transfer_queue",
    "against_trl",
    "against_trl_environment",
    "against_trl_language_model",
    "against_trl_gpu",
    "asynchrony",
    "environment",
    "agent_proxy",
    "sandbox",
    "adapters",
    "openenv_speed",
    "mcp_speed",
    "engine",
    "vllm",
    "weights",
    "differences",
    "learner",
    "learner_real",
    "real_times",
    "logits",
    "layers",
    "tree_packing",
    "own_functions",
    "agent_memory",
    "retokenised",
    "router_replay",
    "lora",
    "tinker_step",
    "tinker_peer",
    "tinker_real",
    "tinker_tenants",
    "tinker_snapshot",
    "overhead",
    "memory",
    "long_run",
    "dashboard",
    "scheduler",
    "lab_year",
    "scaling",
    "gpu_pool",
    "gomoku",
)


def run(name: str, *, quick: bool) -> bool:
    """Run one script; return whether it ended well."""
    folder = RESULTS / "quick" if quick else RESULTS
    python = str(IN_VLLM) if name == "vllm" else sys.executable
    command = [python, "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json")]
    print(f"\n== {name}", flush=True)
    started = time.perf_counter()
    done = subprocess.run([*command, *(["--quick"] if quick else [])], cwd=ROOT, check=False)
    print(f"== {name}: {time.perf_counter() - started:.0f} s, exit code {done.returncode}")
    return done.returncode == 0


def write_page() -> None:
    """Write docs/benchmarks.md from the results that are there."""
    results = list[dict[str, Any]]()
    for name in NAMES:
        file = RESULTS / f"{name}.json"
        if file.is_file():
            remark = Path(__file__).with_name("remarks") / f"{name}.md"
            text = remark.read_text(encoding="utf-8").strip() if remark.is_file() else ""
            results.append({**json.loads(file.read_text(encoding="utf-8")), "remark": text})
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


def main() -> int:
    """Parse the arguments, run, and write the page; return the exit code."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    options.add_argument("--quick", action="store_true", help="only see that all run; no page")
    options.add_argument("--page-only", action="store_true", help="run nothing, write the page")
    arguments = options.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        options.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    wanted = [] if arguments.page_only else arguments.names or NAMES
    failed = [name for name in wanted if not run(name, quick=arguments.quick)]
    if not arguments.quick:
        write_page()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
