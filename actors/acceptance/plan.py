"""The checks, in the order in which they run, each with its deadline and its remedy.

Nothing here imports what a check needs: each runs in a process of its own, so that one that
crashes, hangs, or leaves a GPU in an error costs its own line and no other.
"""

from dataclasses import dataclass

TOTAL_S = 600.0
"""All checks together; those that have not run by then are skipped."""
DEVICE = "device"
"""The check without which no other runs."""
_CHECKS = "tinkermq.actors.acceptance.checks"
_PYTORCH = "see docs/gpu.md: install the torch that fits the driver"
_ENGINE = "docs/engines.md says what each engine needs"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    place: str
    """`module:function`; it takes a `Setting` and returns `Found`."""
    deadline_s: float
    remedy: str
    """What to do where it does not hold, if the error itself does not say it."""


CHECKS = (
    Check(DEVICE, f"{_CHECKS}.devices:device", 60, _PYTORCH),
    Check("bf16", f"{_CHECKS}.devices:bf16", 60, "use learner.dtype=float32 on this device"),
    Check("gloo", f"{_CHECKS}.collectives:gloo", 60, "let processes connect over loopback"),
    Check(
        "nccl",
        f"{_CHECKS}.collectives:nccl",
        90,
        "run with NCCL_DEBUG=INFO; in containers, give more shared memory (--shm-size=8g)",
    ),
    Check(
        "flash-attention",
        f"{_CHECKS}.attention:flash_attention",
        60,
        "leave model.attn_implementation at sdpa",
    ),
    Check("transformers generates", f"{_CHECKS}.engines:transformers_generates", 60, _ENGINE),
    Check("transformers log-probs", f"{_CHECKS}.engines:transformers_agrees", 60, _ENGINE),
    Check("transformers swaps", f"{_CHECKS}.engines:transformers_swaps", 60, _ENGINE),
    Check("vllm generates", f"{_CHECKS}.engines:vllm_generates", 150, _ENGINE),
    Check("vllm log-probs", f"{_CHECKS}.engines:vllm_agrees", 120, _ENGINE),
    Check("vllm swaps", f"{_CHECKS}.engines:vllm_swaps", 120, _ENGINE),
    Check("fsdp", f"{_CHECKS}.sharding:fsdp", 90, "use learner.ranks=1 on this machine"),
    Check(
        "memory to memory",
        f"{_CHECKS}.weights:memory_to_memory",
        90,
        "set weights.transport=object on this machine",
    ),
    Check(
        "asynchronous run",
        f"{_CHECKS}.stack:asynchronous_run",
        120,
        "`tinkermq up` and `tinkermq train examples/bandit.yaml` show the same with its logs",
    ),
    Check(
        "step of 0.5 B",
        f"{_CHECKS}.speed:half_billion",
        150,
        "docs/training.md#kernels-and-memory says what a step's speed depends on",
    ),
    Check(
        "step of 1.5 B",
        f"{_CHECKS}.speed:one_and_a_half_billion",
        180,
        "docs/training.md#kernels-and-memory says what a step's speed depends on",
    ),
)
