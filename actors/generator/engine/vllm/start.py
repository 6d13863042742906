"""How vLLM is started: its arguments, its environment, and who takes its figures."""

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from .....schemas.bounds.defaults import MAX_TOP_K
from .....schemas.config.job import GeneratorConfig
from ..concurrency import RequestLimit
from ..meter import Meter
from .constraints import PROCESSOR

_CPU_CACHE_MB = 1024
_CPU_BLOCK_TOKENS = 32
_IMAGES_GB = 1.0
"""Memory for images that were sent to vLLM's processes and may be asked about again."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next larger one."""


def engine_arguments(
    path: str,
    config: GeneratorConfig,
    max_context: int,
    trust_remote_code: bool,
    ranks: Sequence[int],
    sees: bool,
    tokenizer: str = "",
) -> dict[str, Any]:
    """Return vLLM's arguments for a model, and for adapters of these ranks beside it.

    `sees` tells a model that is shown images; `tokenizer` is where grammars find its tokens.
    """
    on_cpu = current_platform.is_cpu()
    cache_mb = config.kv_cache_mb or (_CPU_CACHE_MB if on_cpu else None)
    arguments: dict[str, Any] = {
        "model": path,
        "tokenizer": tokenizer or path,
        "skip_tokenizer_init": not sees,  # by it, vLLM finds out how large images can get
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
        "dtype": config.dtype,
        "max_model_len": max_context,
        "max_logprobs": MAX_TOP_K,
        "max_num_seqs": config.max_requests,
        "tensor_parallel_size": config.tensor_parallel,
        "enforce_eager": not config.compile,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": cache_mb << 20 if cache_mb else None,
        "block_size": _CPU_BLOCK_TOKENS if on_cpu else None,
        "seed": secrets.randbits(31),  # or all generators of a job would draw the same tokens
        "logits_processors": [PROCESSOR],
        "worker_extension_cls": "tinkermq.actors.generator.engine.vllm.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # its own; `Recorder` is given beside
    }
    if on_cpu and config.tensor_parallel == 1:
        # Or vLLM would compute in one more process, which takes as long to start as the first.
        arguments["distributed_executor_backend"] = UniProcExecutor
    if sees:
        arguments |= {
            "limit_mm_per_prompt": {"video": 0},
            "mm_device_do_normalize": False,  # the learner's reader has done so
            "skip_mm_profiling": on_cpu,
            "mm_processor_cache_gb": _IMAGES_GB,
        }
    if ranks:
        arguments |= {
            "enable_lora": True,
            # On a CPU, vLLM 0.32 decodes requests without an adapter with that of the last place:
            # one that stays empty adds nothing.
            "max_loras": len(ranks) + int(on_cpu),
            "max_lora_rank": next((size for size in _RANKS if size >= max(ranks)), max(ranks)),
        }
    return arguments


def settle_environment(config: GeneratorConfig) -> None:
    """Set what vLLM's processes read from the environment."""
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads and connections
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several engines share a machine
        VLLM_USE_V2_MODEL_RUNNER="0",  # `vllm_worker` knows the sampler of the other one
        TORCHDYNAMO_DISABLE="0" if config.compile else "1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns at each swap


class Recorder(StatLoggerBase):
    """Takes vLLM's figures after each of its steps."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.limit: RequestLimit | None = None
        self._then = time.perf_counter()
        self._worked = False

    def made(self, config: object, engine_index: int = 0) -> "Recorder":
        """Be what vLLM makes of a logger's class."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step, and adapt the number of requests that vLLM is given."""
        now = time.perf_counter()
        if self._worked:
            self.meter.busy_s += now - self._then
        self._then = now
        preempted = 0
        if iteration_stats is not None:
            self.meter.generated += iteration_stats.num_generation_tokens
            preempted = iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self._worked = scheduler_stats.num_running_reqs > 0
            self._adapt(scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage, preempted)
        self.meter.mark()

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def _adapt(self, running: int, cache_share: float, preempted: int) -> None:
        if self.limit is not None:
            wanted = self.limit.waiting > 0
            self.limit.concurrency.step(
                running, wanted=wanted, cache_share=cache_share, preempted=preempted
            )
            self.limit.admit()
