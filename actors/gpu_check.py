"""Quick checks of this machine's GPUs, for `tinkermq doctor --gpu`.

The command starts `python -m tinkermq.actors.gpu_check` (see `schemas/checks.py`). Each check is a
process of its own with a deadline, so that a crash, a hang or an error of CUDA fails only that
check. Longer checks are in `tests/gpu`.
"""

import asyncio
import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..schemas.checks import CheckResult, CheckSkipped, failed_check, write_results
from ..schemas.local.folder import temporary_folder
from ..schemas.local.process import die_with
from ..schemas.wire.errors import DeadlineError, EngineError, TinkermqError

_PACKAGES = ("torch", "transformers", "vllm", "flash-attn")
_LOG_CHARACTERS = 4000
_MIN_CAPABILITY = 8.0
"""The first compute capability with bfloat16."""
_NUM_SUMS = 5
_SUM_DEADLINE_S = 50.0
_NUM_VALUES = 1 << 26


class GpuCheck(NamedTuple):
    """One check, which runs in a process of its own."""

    name: str
    place: str
    """`module:function`; the function returns its measurements as text."""
    deadline_s: float
    hint: str
    """Hint for a failure whose error has no hint."""


_HERE = "tinkermq.actors.gpu_check"
DEVICE = GpuCheck("device", f"{_HERE}:check_device", 60, "install the torch that fits the driver")
"""The check that all others require."""
CHECKS = (
    DEVICE,
    GpuCheck(
        "nccl",
        f"{_HERE}:check_nccl",
        90,
        "run with NCCL_DEBUG=INFO; in containers, give more shared memory (--shm-size=8g)",
    ),
    GpuCheck(
        "flash-attention",
        f"{_HERE}:check_flash_attention",
        60,
        "leave model.attn_implementation at auto",
    ),
    GpuCheck("engine", f"{_HERE}:check_engine", 180, "docs/engines.md says what each engine needs"),
)


def main() -> None:
    """Print the result of each check when it ends."""
    versions = ", ".join(" ".join(item) for item in read_versions().items())
    machine = CheckResult(name="versions", outcome="ok", detail=versions)
    with contextlib.suppress(KeyboardInterrupt):
        write_results(itertools.chain([machine], run_checks(CHECKS)))


def read_versions() -> dict[str, str]:
    """Return the versions of Python, the NVIDIA driver, and the packages that use GPUs."""
    versions = {"python": platform.python_version(), "driver": _read_driver_version()}
    for package in _PACKAGES:
        try:
            versions[package] = package_version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _read_driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.partition("\n")[0].strip() or "none"


# -- one process for each check --------------------------------------------------------------------


def run_checks(checks: Sequence[GpuCheck]) -> Iterator[CheckResult]:
    """Yield the result of each check as it ends; without a working device the rest is skipped."""
    has_device = True
    for check in checks:
        if not has_device:
            missing = CheckSkipped("no GPU to use", hint="fix the device first")
            yield failed_check(check.name, missing)
            continue
        result = run_check(check)
        has_device = check.name != DEVICE.name or result.outcome == "ok"
        yield result


def run_check(check: GpuCheck) -> CheckResult:
    """Run one check to its end or its deadline, and leave none of its processes."""
    started = time.monotonic()
    with temporary_folder("gpu") as folder:
        code = _run_process(check, folder)
        result = _read_result(folder) if code is not None else None
        if result is None:
            detail = _describe_end(code, check.deadline_s)
            result = failed_check(check.name, EngineError(detail, hint=check.hint))
        log = "" if result.ok else (folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]
    return result.model_copy(update={"seconds": time.monotonic() - started, "log": log})


def _run_process(check: GpuCheck, folder: Path) -> int | None:
    """Return the exit code of a check's process; None past its deadline."""
    (folder / "work").mkdir()
    code = f"from {_HERE} import run_child; run_child({tuple(check)!r}, {str(folder / 'result')!r})"
    command = [sys.executable, "-P", "-c", code]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(folder / "work")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            return process.wait(check.deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a check and its children; children with their own session end with their parent."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _read_result(folder: Path) -> CheckResult | None:
    """Return the result that a process wrote; None if it ended before."""
    try:
        return CheckResult.model_validate_json((folder / "result").read_bytes())
    except (OSError, ValueError):
        return None


def _describe_end(code: int | None, deadline_s: float) -> str:
    if code is None:
        return f"it had not ended after {deadline_s:g} s and was killed"
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"


def run_child(check: tuple[str, str, float, str], file: str) -> None:
    """Run a check in this process; write its result into a file."""
    faulthandler.enable()
    Path(file).write_text(_call_check(GpuCheck(*check)).model_dump_json())


def _call_check(check: GpuCheck) -> CheckResult:
    module, _, function = check.place.partition(":")
    try:
        detail = getattr(import_module(module), function)()
    except TinkermqError as error:
        traceback.print_exc()
        result = failed_check(check.name, error)
    except Exception as error:  # noqa: BLE001  the boundary of a check
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        named = EngineError(f"{type(error).__name__}: {first}".rstrip(": "))
        result = failed_check(check.name, named)
    else:
        return CheckResult(name=check.name, outcome="ok", detail=detail)
    return result if result.hint or result.ok else result.model_copy(update={"hint": check.hint})


# -- the checks ------------------------------------------------------------------------------------


def check_device() -> str:
    """Find the GPUs and compute a sum on each; EngineError if one fails or there is none."""
    import torch

    if not torch.cuda.is_available():
        raise _missing_gpu_error(torch.__version__, torch.version.cuda)
    cuda = cast("Any", torch.cuda)
    names: list[str] = []
    for index in range(torch.cuda.device_count()):
        total = float(torch.ones(1000, device=f"cuda:{index}").sum())
        if total != 1000:
            raise EngineError(f"GPU {index} computed a sum of 1000 as {total}")
        major, minor = cuda.get_device_capability(index)
        if major + minor / 10 < _MIN_CAPABILITY:
            raise EngineError(
                f"GPU {index} has compute capability {major}.{minor}; bfloat16 needs "
                f"{_MIN_CAPABILITY}",
                hint="use learner.dtype=float32 and generator.dtype=float32 on this GPU",
            )
        device = cuda.get_device_properties(index)
        names.append(f"{device.name} ({device.total_memory / 2**30:.0f} GiB)")
    nccl = ".".join(map(str, cuda.nccl.version()))
    return f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl}"


def _missing_gpu_error(torch_version: str, cuda_version: str | None) -> EngineError:
    if _read_driver_version() == "none":
        return EngineError(
            "this machine has no GPU: no NVIDIA driver answers",
            hint="run this on a machine with an NVIDIA GPU and its driver (`nvidia-smi`); in a "
            "container give it the GPUs (`--gpus all`)",
        )
    built_for = f"CUDA {cuda_version}" if cuda_version else "the CPU alone"
    return EngineError(
        f"the driver has GPUs, and torch {torch_version} cannot use them: it is built for "
        f"{built_for}",
        hint="install the same torch from PyPI's index, or the index of pytorch.org that fits the "
        "driver, and unset CUDA_VISIBLE_DEVICES",
    )


def check_nccl() -> str:
    """Sum over all GPUs of the machine, with one process for each."""
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise CheckSkipped("NCCL connects GPUs, and there is none")
    seconds = sum_over_ranks(num_gpus, _NUM_VALUES)
    if num_gpus == 1:
        return "sums over one GPU are exact"
    num_bytes = 2 * (num_gpus - 1) / num_gpus * 4 * _NUM_VALUES
    return f"sums over {num_gpus} GPUs are exact, {num_bytes / seconds / 1e9:.3g} GB/s on each link"


def sum_over_ranks(num_ranks: int, num_values: int) -> float:
    """Sum float32[N] over the ranks of a learner; return the seconds of the fastest sum.

    Raises EngineError for a wrong sum, DeadlineError for a rank that does not finish.
    """
    from .training.parallel import Meeting

    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    meeting = Meeting.open()
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, num_ranks, num_values, meeting.to_map(), theirs)
        context.Process(target=_sum_as_rank, args=arguments, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    deadline = time.monotonic() + _SUM_DEADLINE_S
    results = [_receive_sum(pipe, rank, deadline) for rank, pipe in enumerate(pipes)]
    largest_error = max(error for error, _ in results)
    if largest_error:
        raise EngineError(f"a sum over {num_ranks} processes is wrong by {largest_error:g}")
    return max(seconds for _, seconds in results)


def _receive_sum(pipe: Connection, rank: int, deadline: float) -> tuple[float, float]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise DeadlineError(f"process {rank} summed nothing in {_SUM_DEADLINE_S:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise DeadlineError(f"process {rank} ended before it had summed anything") from error


def _sum_as_rank(
    rank: int, num_ranks: int, num_values: int, meeting: Mapping[str, Any], pipe: Connection
) -> None:
    """Sum as one rank; send the largest error and the seconds of the fastest sum."""
    import torch

    from ..schemas.config.sections import LearnerConfig
    from .training.parallel import Meeting, Parallel

    config = LearnerConfig(ranks=num_ranks, slots=num_ranks)
    parallel = Parallel.join(rank, config, Meeting.reach(dict(meeting)))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    seconds: list[float] = []
    error = 0.0
    for _ in range(_NUM_SUMS):
        values: Any = torch.full((num_values,), rank + 1.0, device=device)
        started = time.perf_counter()
        parallel.add_up(values)
        error = max(error, float((values - num_ranks * (num_ranks + 1) / 2).abs().max()))
        seconds.append(time.perf_counter() - started)
    pipe.send((error, min(seconds)))
    parallel.leave()


def check_flash_attention() -> str:
    """Compare flash-attention's packed kernel with torch's SDPA: outputs and gradients."""
    import torch

    if not torch.cuda.is_available():
        raise CheckSkipped("flash-attention's kernels run on GPUs only, and there is none")
    if find_spec("flash_attn") is None:
        raise CheckSkipped(
            "flash-attn is not installed",
            hint="pip install --no-build-isolation 'tinkermq[flash-attn]'",
        )
    output_error, gradient_error = _compare_attention((700, 1, 256, 1091))
    detail = f"outputs differ by {output_error:.2g}, gradients by {gradient_error:.2g}"
    if not (output_error <= 0.02 and gradient_error <= 0.05):
        raise EngineError(f"{detail}; at most 0.02 and 0.05 come from rounding")
    return detail


def _compare_attention(lengths: tuple[int, ...]) -> tuple[float, float]:
    """Return the largest differences of outputs and gradients of q, relative to the largest."""
    import torch

    heads, kv_heads, width = 8, 2, 64
    cast("Any", torch).manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), num, width, device="cuda", dtype=torch.bfloat16)
        for num in (heads, kv_heads, kv_heads)
    )
    results: list[tuple[Any, Any]] = []
    for attend in (_attend_flash, _attend_sdpa):
        leaf = q.clone().requires_grad_()
        output: Any = attend(leaf, k, v, lengths)
        output.float().square().sum().backward()
        results.append((output.detach().float(), cast("Any", leaf.grad).float()))
    (flash, flash_gradient), (sdpa, sdpa_gradient) = results
    return (
        float((flash - sdpa).abs().max() / sdpa.abs().max()),
        float((flash_gradient - sdpa_gradient).abs().max() / sdpa_gradient.abs().max()),
    )


def _attend_flash(q: Any, k: Any, v: Any, lengths: tuple[int, ...]) -> Any:
    import torch

    kernel: Any = import_module("flash_attn").flash_attn_varlen_func
    ends = torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32)
    return kernel(q, k, v, ends, ends, max(lengths), max(lengths), causal=True)


def _attend_sdpa(q: Any, k: Any, v: Any, lengths: tuple[int, ...]) -> Any:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    outputs = [
        scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for parts in zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
    ]
    return torch.cat(outputs)


def check_engine() -> str:
    """Start vLLM, or transformers if vLLM is not installed, and generate some tokens."""
    return asyncio.run(_generate("vllm" if find_spec("vllm") else "transformers"))


async def _generate(engine_name: str) -> str:
    import numpy as np
    import torch

    from ..schemas.config.job import JobConfig
    from .engine.engine import Sampling
    from .policy.tiny_models import save_tiny_model
    from .rollout.players import start_engine

    num_prompts, num_tokens = 16, 32
    with temporary_folder("gpu") as folder:
        save_tiny_model(folder, width=256, layers=4, heads=4, kv_heads=2)
        dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        generator: dict[str, Any] = {"engine": engine_name, "dtype": dtype}
        generator |= {"compile": False, "kv_cache_mb": 256} if engine_name == "vllm" else {}
        rollout = {"max_prompt_tokens": 64, "max_turn_tokens": 64, "max_response_tokens": 64}
        config = JobConfig.model_validate(
            {
                "model": {"path": str(folder)},
                "env": {"game": "bandit"},
                "rollout": rollout,
                "generator": generator,
            }
        )
        started = time.perf_counter()
        engine = await start_engine(config)
        start_s = time.perf_counter() - started
        try:
            prompts = np.random.default_rng(0).integers(8, 264, (num_prompts, 16), np.int32)
            requests = (
                engine.generate(prompt, Sampling(num_tokens), request_id=str(number))
                for number, prompt in enumerate(prompts)
            )
            generations = await asyncio.gather(*requests)
        finally:
            await engine.close()
    complete = sum(len(answer.token_ids) == num_tokens for answer in generations)
    if complete != num_prompts:
        raise EngineError(f"{engine_name} answered {complete} of {num_prompts} requests in full")
    return f"{engine_name} started in {start_s:.1f} s and answered {num_prompts} requests"


if __name__ == "__main__":
    main()
