import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from vllm import AsyncEngineArgs, SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import MultiModalInput, TokensInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import StatLoggerBase

class CacheConfig:
    block_size: int
    enable_prefix_caching: bool
    kv_cache_size_tokens: int | None
    kv_cache_memory_bytes: int | None

class SchedulerConfig:
    max_num_seqs: int

class VllmConfig:
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    lora_config: object | None

class ModelConfig:
    max_model_len: int
    is_multimodal_model: bool
    def get_vocab_size(self) -> int: ...

class IncrementalDetokenizer:
    def num_output_tokens(self) -> int: ...

class RequestState:
    detokenizer: IncrementalDetokenizer
    external_req_id: str
    is_prefilling: bool

class OutputProcessor:
    request_states: dict[str, RequestState]

class AsyncLLM:
    vllm_config: VllmConfig
    model_config: ModelConfig
    input_processor: InputProcessor
    output_processor: OutputProcessor
    output_handler: asyncio.Task[None] | None
    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        *,
        usage_context: UsageContext = ...,
        stat_loggers: Sequence[Callable[[Any, int], StatLoggerBase]] | None = None,
    ) -> AsyncLLM: ...
    @property
    def errored(self) -> bool: ...
    def generate(
        self,
        prompt: TokensInput | MultiModalInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]: ...
    async def reset_encoder_cache(self) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    async def pause_generation(
        self, *, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> None: ...
    async def sleep(
        self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort"
    ) -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> bool: ...
    async def resume_generation(self) -> None: ...
    async def init_weight_transfer_engine(self, request: WeightTransferInitRequest) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: WeightTransferUpdateRequest) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...
    async def add_lora(self, lora_request: LoRARequest) -> bool: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...
    def shutdown(self, timeout: float | None = None) -> None: ...
