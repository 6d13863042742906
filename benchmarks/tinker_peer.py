"""A session of Tinker's SDK here, and on skyrl-tx 0.3.0 with its CPU backend: steps per second.

    python -m benchmarks.tinker_peer [--steps 60] [--rounds 3]

The same program (tinker_peer_session.py) trains an adapter of rank 8 on the same random model of
0.9 million parameters with 16 sequences of 64 tokens a step, on either service in turns, each with
all of the machine's cores. In the last round the process that computes is killed in the middle of
one more session: what did it cost?

The peer wants an environment of its own, and an SDK that still speaks JSON:

    python -m venv .tinker/skyrl && .tinker/skyrl/bin/pip install torch==2.13.0 && \
      .tinker/skyrl/bin/pip install 'skyrl-tx[tinker]==0.3.0' 'jax>=0.8,<0.9' flax optax \
      'transformers<5' tinker==0.9.0

`make tinker TINKER=newest` makes the other one.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.broker.presence import list_presences
from tinkermq.schemas.local.process import die_with

from benchmarks.report import Report, parser
from benchmarks.stack import REPOSITORY, Stack
from tests.support.gateway import run_gateway

BASE = "org/base"
SEQUENCES, TOKENS, RANK = 16, 64, 8
WARM, TARGET = 10, 5.0
_START_S, _SILENT_S = 120.0, 60.0


@dataclass(frozen=True)
class Service:
    """A service that runs: where, under which name it has the model, who computes."""

    url: str
    base: str
    worker: Callable[[], int]


@contextlib.asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[Service]:
    """Run the whole stack with a gateway before it."""
    config = {
        "model": {"path": str(folder / "model")},
        "env": {"game": "", "hosts": 0, "num_val": 0},
        "tinker": {"base": BASE},
        "learner": {"threads": os.cpu_count()},
        "output_dir": str(folder / "runs"),
    }
    async with Stack(folder) as stack, run_gateway(stack.server.url, folder) as gateway:
        job = await stack.pool.submit(config, kind="tinker")
        pids: dict[str, int] = {}

        async def found() -> bool:
            entries = await list_presences(stack.pool.broker, job.scope.key)
            pids.update({one.value.actor: one.value.pid for one in entries})
            return {one.value.state for one in entries} == {"working"} and len(entries) == 2

        deadline = time.monotonic() + _START_S
        while not await found():
            if time.monotonic() > deadline:
                raise TimeoutError("the trainer did not start")
            await asyncio.sleep(0.2)
        yield Service(f"{gateway.url}/tinker", BASE, lambda: pids["trainer"])


@contextlib.asynccontextmanager
async def theirs(folder: Path, peer: Path) -> AsyncIterator[Service]:
    """Run the peer's server; the `uv` by which it starts its engine is its own interpreter."""
    shim = folder / "bin" / "uv"
    shim.parent.mkdir(parents=True)
    shim.write_text(f'#!/bin/sh\nwhile [ "$1" != "-m" ]; do shift; done\nexec {peer} "$@"\n')
    shim.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = {"max_lora_adapters": 4, "max_lora_rank": RANK, "train_micro_batch_size": 8}
    model = str(folder / "model")
    words = [str(peer), "-m", "tx.tinker.api", "--base-model", model, "--backend", "jax"]
    words += ["--backend-config", json.dumps(backend), "--checkpoints-base", str(folder / "kept")]
    words += ["--database-url", f"sqlite:///{folder}/db", "--host", "127.0.0.1"]
    path = f"{shim.parent}:{os.environ['PATH']}"
    with (folder / "peer.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *[*words, "--port", str(port)],
            cwd=folder,
            env={**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await asyncio.to_thread(_until_answers, f"{url}/api/v1/healthz", folder / "peer.log")
        yield Service(url, model, lambda: _engine_of(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _until_answers(url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the peer did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.5)


def _engine_of(leader: int) -> int:
    """Return the newest process of a session that computes for the peer."""
    for place in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: -int(one.name)):
        with contextlib.suppress(OSError):
            if (
                os.getsid(int(place.name)) == leader
                and b"tx.tinker.engine" in (place / "cmdline").read_bytes()
            ):
                return int(place.name)
    raise ProcessLookupError("the peer has no engine")


async def session(
    service: Service,
    sdk: Path,
    steps: int,
    kill_at: int | None = None,
    silent_s: float = _SILENT_S,
) -> list[Any]:
    """Return what the program has told of each step; with fewer than `steps` it has failed.

    So it has if a step takes longer than `silent_s`.
    """
    program = str(REPOSITORY / "benchmarks" / "tinker_peer_session.py")
    numbers = [str(one) for one in (steps, SEQUENCES, TOKENS, RANK)]
    keys = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-anybody"}
    process = await asyncio.create_subprocess_exec(
        *[str(sdk), "-W", "ignore", program, service.base, *numbers],
        env={**os.environ, **keys, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with(os.getpid()),
    )
    told: list[Any] = []
    try:
        async for line in _lines(process, silent_s):
            if line.startswith(b"{"):
                told.append(json.loads(line))
                if told[-1]["step"] == kill_at:
                    os.kill(service.worker(), signal.SIGKILL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return told


async def _lines(process: asyncio.subprocess.Process, silent_s: float) -> AsyncIterator[bytes]:
    """Yield what a program prints until it ends, or has been silent for too long."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        while line := await asyncio.wait_for(process.stdout.readline(), silent_s):
            yield line


def rate(told: list[Any], steps: int, warm: int = WARM) -> float:
    """Return steps per second once all is compiled and warm."""
    if len(told) < steps:
        raise RuntimeError(f"the session ended at step {len(told)} of {steps}")
    return (steps - 1 - warm) / (told[-1]["time"] - told[warm]["time"])


def lost_s(told: list[Any], kill_at: int) -> float:
    """Return by how much the step behind a kill took longer than the others."""
    took = [after["time"] - one["time"] for one, after in pairwise(told)]
    return took[kill_at] - median(took[WARM:kill_at])


def make_model(folder: Path) -> None:
    """Write the model, so that the peer's older transformers reads it, too."""
    save_tiny_model(folder, width=128, layers=4)
    make_readable(folder)


def make_readable(folder: Path) -> None:
    """Write the settings of a model's folder as the peer's older transformers reads them."""
    about = json.loads((folder / "config.json").read_text())
    about |= {"rope_theta": about["rope_parameters"]["rope_theta"], "rope_scaling": None}
    (folder / "config.json").write_text(json.dumps(about | {"torch_dtype": "float32"}))
    words = json.loads((folder / "tokenizer_config.json").read_text())
    words |= {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


async def compare(folder: Path, arguments: Any, report: Report) -> None:
    """Run both in turns, then kill who computes."""
    make_model(folder / "model")
    steps, kill_at = arguments.steps, WARM + 2
    rates: dict[str, list[float]] = {"here": [], "skyrl-tx 0.3.0": []}
    losses: list[float] = []
    ended: dict[str, str] = {}

    async def turn(name: str, service: Service, sdk: Path, *, kill: bool) -> None:
        told = await session(service, sdk, steps)
        rates[name].append(rate(told, steps))
        losses.append(told[-1]["loss"])
        if kill:
            told = await session(service, sdk, steps, kill_at)
            goes_on = len(told) == steps
            ended[name] = (
                f"{lost_s(told, kill_at):.1f} s lost"
                if goes_on
                else f"the session ended ({len(told)} of {steps} steps)"
            )

    for number in range(arguments.rounds):
        last = number == arguments.rounds - 1
        for name, sdk in (("skyrl-tx 0.3.0", arguments.peer), ("here", arguments.sdk)):
            place = folder / f"{number}-{name.split()[0]}"
            shutil.copytree(folder / "model", place / "model")
            opened = ours(place) if name == "here" else theirs(place, sdk)
            async with opened as service:
                await turn(name, service, sdk, kill=last)
    rows = [
        [name, f"{mean(found):.2f}", " ".join(f"{one:.2f}" for one in found), ended[name]]
        for name, found in rates.items()
    ]
    title = f"{SEQUENCES} sequences of {TOKENS} tokens a step, rank {RANK}, {steps} steps"
    report.table(title, ["service", "steps/s", "rounds", "kill -9 of who computes"], rows)
    ratio = mean(rates["here"]) / mean(rates["skyrl-tx 0.3.0"])
    report.at_least("steps per second, against skyrl-tx 0.3.0", ratio, TARGET)
    report.note(f"Sums of the losses at the last step: {min(losses):.1f} to {max(losses):.1f}.")


def main() -> None:
    """Parse the arguments, measure, and report."""
    options = parser(__doc__)
    environments = REPOSITORY / ".tinker"
    python = Path("bin", "python")
    options.add_argument("--peer", type=Path, default=environments / "skyrl" / python)
    options.add_argument("--sdk", type=Path, default=environments / "newest" / python)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.steps, arguments.rounds = WARM + 6, 1
    for interpreter in (arguments.peer, arguments.sdk):
        if not interpreter.is_file():
            options.error(f"there is no {interpreter}; how to make it stands at this script's top")
    warnings.filterwarnings("ignore")
    report = Report(
        "tinker_peer", "A session of Tinker's SDK against skyrl-tx", quick=arguments.quick
    )
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(Path(folder), arguments, report))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
