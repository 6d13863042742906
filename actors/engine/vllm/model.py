"""One model in vLLM with its adapters: its processes, requests, and new weights.

vLLM computes in separate processes (a scheduler, and one worker per GPU), which receive requests
and new weights from here. It labels each step's tokens with the weights that generated them; the
label has the versions of the model and its adapters, as JSON. Each request's prompt is cached with
a salt of its adapter and version, so that no prefix is shared across versions.

This module imports vllm: `rollout/players.py` imports it only where it is needed. Written for vLLM
0.32.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false

import asyncio
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.inputs import MultiModalInput, TokensInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from ....schemas.config.job import GeneratorConfig, SpeculationConfig
from ....schemas.config.sections import resolve_dtype
from ....schemas.plan.memory import VLLM_SHARE
from ....schemas.plan.model_refusals import BY_DRAFT, refuse_part
from ....schemas.wire.array import IntVector
from ....schemas.wire.bounds import MAX_TOP_K
from ....schemas.wire.errors import EngineError, ModelError
from ...policy.devices import own_device
from .. import gpu_requirements
from ..engine import (
    ROOM,
    Concurrency,
    Drawn,
    Generation,
    KvOnSwap,
    Meter,
    OnToken,
    PromptScores,
    RequestLimit,
    Sampling,
    nothing,
)
from .constraints import PROCESSOR
from .request import (
    ShownImages,
    Turns,
    VllmRequest,
    drawn_of,
    generation_of,
    parameters_of,
    prompt_with_images,
    scores_of,
    scoring_parameters,
)
from .transfer import BACKEND

# -- arguments and environment of vLLM -------------------------------------------------------------

_CPU_CACHE_MB = 1024
_CPU_BLOCK_TOKENS = 32
_IMAGES_GB = 1.0
"""Memory for images that vLLM's processes have received and that may be requested again."""
_SHORTEST_MATCH = 2
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks supported by vLLM; an adapter uses the next larger one."""


def engine_arguments(
    path: str,
    config: GeneratorConfig,
    max_context: int,
    trust_remote_code: bool,
    ranks: Sequence[int],
    sees: bool,
    tokenizer: str = "",
    num_engines: int = 1,
) -> dict[str, Any]:
    """Return vLLM's arguments for a model, and for adapters of these ranks.

    `sees`: the model gets images; `tokenizer` has the tokens for grammars; `num_engines` share a
    generator's memory.
    """
    on_cpu = current_platform.is_cpu()
    cache_mb = config.kv_cache_mb or (_CPU_CACHE_MB if on_cpu else None)
    arguments: dict[str, Any] = {
        "model": path,
        "tokenizer": tokenizer or path,
        "skip_tokenizer_init": not sees,  # needed to determine the largest images
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
        "dtype": resolve_dtype(config.dtype, on_gpu=not on_cpu),
        "max_model_len": max_context,
        "max_logprobs": MAX_TOP_K,
        "max_num_seqs": config.max_requests,
        "max_num_batched_tokens": config.max_batched_tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "enforce_eager": not config.compile,
        # By its default vLLM schedules a step before it knows the last one's tokens. Labels of
        # versions, grammars and records of experts follow the tokens of each step.
        "async_scheduling": False,
        "enable_prefix_caching": config.prefix_caching,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "gpu_memory_utilization": engine_share(config, num_engines),
        "enable_sleep_mode": config.sleep == "always" and not on_cpu,
        "kv_cache_memory_bytes": cache_mb << 20 if cache_mb else None,
        "block_size": _CPU_BLOCK_TOKENS if on_cpu else None,
        "seed": secrets.randbits(31),  # else all generators of a job draw the same tokens
        "logits_processors": None if config.speculation.num_tokens else [PROCESSOR],
        "speculative_config": speculation_arguments(config.speculation),
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "tinkermq.actors.engine.vllm.worker.WorkerExtension",
        "use_tqdm_on_load": False,
        "disable_log_stats": True,  # vLLM's own; `Recorder` is passed separately
    }
    if on_cpu and config.tensor_parallel == 1:
        # Otherwise vLLM computes in a further process, which takes as long to start as the first.
        arguments["distributed_executor_backend"] = UniProcExecutor
    if sees:
        arguments |= {
            "limit_mm_per_prompt": {"video": 0},
            "mm_device_do_normalize": False,  # already done by the learner's reader
            "skip_mm_profiling": on_cpu,
            "mm_processor_cache_gb": _IMAGES_GB,
        }
    if ranks:
        arguments |= {
            "enable_lora": True,
            # On a CPU, vLLM 0.32 decodes requests without an adapter with the last adapter slot: a
            # slot that stays empty adds nothing.
            "max_loras": len(ranks) + int(on_cpu),
            "max_lora_rank": next((size for size in _RANKS if size >= max(ranks)), max(ranks)),
        }
    return arguments


def speculation_arguments(config: SpeculationConfig) -> dict[str, Any] | None:
    """Return vLLM's arguments of speculative decoding; None: it is off."""
    if not config.num_tokens:
        return None
    arguments: dict[str, Any] = {"num_speculative_tokens": config.num_tokens}
    if config.draft is not None:
        return arguments | {"method": BY_DRAFT, "model": config.draft}
    return arguments | {
        "method": "ngram",
        "prompt_lookup_max": config.longest_match,
        "prompt_lookup_min": _SHORTEST_MATCH,
    }


def engine_share(config: GeneratorConfig, num_engines: int) -> float:
    """Return the share of a GPU's memory for each of several engines of a generator.

    vLLM requires the share to be free at its start, even if the cache size is set.
    """
    return (config.memory_share or VLLM_SHARE) / num_engines


def settle_environment(config: GeneratorConfig) -> None:
    """Set the environment variables of vLLM's processes."""
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads and connections
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several engines share a machine
        # The newer runner has another sampler, and does not support custom logits processors
        # everywhere: `worker` and `constraints` extend this one.
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_BATCH_INVARIANT=str(int(config.batch_invariant)),
        TORCHDYNAMO_DISABLE="0" if config.compile else "1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns at each swap
    # FlashInfer's sampler is compiled with nvcc at its first use, and takes no seeds.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


class Recorder(StatLoggerBase):
    """Reads vLLM's statistics after each of its steps."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.limit: RequestLimit | None = None
        self._then = time.perf_counter()
        self._worked = False

    def made(self, config: object, engine_index: int = 0) -> "Recorder":
        """Return this recorder when vLLM would construct a logger."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Count a step, and adapt the number of requests passed to vLLM."""
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
            if (speculated := scheduler_stats.spec_decoding_stats) is not None:
                self.meter.drafted += speculated.num_draft_tokens
                self.meter.accepted += speculated.num_accepted_tokens
        self.meter.mark()

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def _adapt(self, running: int, cache_share: float, preempted: int) -> None:
        self.meter.cache_share = cache_share
        if cache_share > ROOM:  # else a swap of weights preempted them
            self.meter.evicted += preempted
        if self.limit is not None:
            is_demanded = self.limit.waiting > 0
            self.limit.concurrency.step(
                running, is_demanded=is_demanded, cache_share=cache_share, preempted=preempted
            )
            self.limit.admit()


_MEMORY = ("weights", "kv_cache")
"""Memory freed by vLLM in its sleep, in the order of its allocation at waking."""
_OUTCOME_S = 0.02
_WORST_FIRST = ("mismatch", "failed", "damaged", "", "done")
_SHUTDOWN_S = 1.0
"""Time for its processes to end by themselves; they hold nothing that is needed later."""
T = TypeVar("T")


class VllmModel:
    """A model in vLLM; adapters, by name, and the model itself, named "", have versions."""

    def __init__(self, llm: AsyncLLM, recorder: Recorder) -> None:
        """Create it with `start`."""
        self.versions: dict[str, int] = {"": 0}
        self.meter = recorder.meter
        self._llm = llm
        self._sees = bool(llm.model_config.is_multimodal_model)
        drafts = getattr(llm.vllm_config.speculative_config, "method", "") == BY_DRAFT
        self._has_other_weights = llm.vllm_config.lora_config is not None or drafts
        """Whether it holds weights that no version replaces: adapters, or a draft model."""
        cache = llm.vllm_config.cache_config
        self.meter.cache_tokens = int(cache.kv_cache_size_tokens or 0)
        fits = self.meter.cache_tokens // int(llm.model_config.max_model_len)
        self.max_requests = int(llm.vllm_config.scheduler_config.max_num_seqs)
        """Maximum number of concurrent requests in vLLM."""
        self._limit = RequestLimit(Concurrency(fits, self.max_requests))
        recorder.limit = self._limit
        self._requests: dict[str, VllmRequest] = {}
        self.turns = Turns(cache.block_size) if cache.enable_prefix_caching else None
        """The last turns of conversations; None: nothing is kept for the next ones."""
        self._adapters: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(1)
        self._poisoned = ""
        """Label of the weights that produced a NaN result."""
        self._swapping = asyncio.Lock()
        self._asleep: list[str] = []
        """Tags of freed memory."""
        self._slept_at = 0.0
        self.has_weights = True
        """Whether weights are loaded, and were not dropped without new ones."""
        self._half: AsyncExitStack | None = None
        """The pause of an incomplete version; the next complete version ends it."""
        self._open = asyncio.Event()
        """Cleared during a swap of weights, since a request that begins then would be cached
        wrongly."""
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Done when requests are no longer answered."""
        self._owners = 0

    @classmethod
    async def start(
        cls,
        path: str,
        config: GeneratorConfig,
        *,
        max_context: int,
        trust_remote_code: bool = False,
        ranks: Sequence[int] = (),
        sees: bool = False,
        tokenizer: str = "",
        num_engines: int = 1,
    ) -> "VllmModel":
        """Start vLLM's processes with the model in `path`; ModelError if it cannot run.

        `ranks` are the ranks of possible adapters; `sees`: the model gets images.
        """
        own_device()
        await gpu_requirements.check_gpu(config, engine_share(config, num_engines))
        settle_environment(config)
        recorder = Recorder()
        arguments = engine_arguments(
            path, config, max_context, trust_remote_code, ranks, sees, tokenizer, num_engines
        )
        try:
            llm = await gpu_requirements.start_beside_others(
                partial(
                    AsyncLLM.from_engine_args,
                    AsyncEngineArgs(**arguments),
                    # With it vLLM chooses batch sizes for throughput, not for the first token's
                    # latency.
                    usage_context=UsageContext.LLM_CLASS,
                    stat_loggers=[recorder.made],
                )
            )
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            raise ModelError(
                f"vLLM cannot run model {path}: {error}",
                hint="see the log above; generator.engine=transformers runs more kinds of models",
            ) from error
        model = cls(llm, recorder)
        model._check_draft(config.speculation.draft)
        await model._call(llm.get_supported_tasks())  # cached: no request waits for it
        await model.ask_workers("end_with", os.getpid())
        await model.ask_workers("record_logprobs_before_filters")
        await model.ask_workers("clear_caches_at_wake")
        if ranks:
            await model.ask_workers("score_prompts_with_adapters")
        await model.name_version("", 0)
        return model

    def _check_draft(self, draft: str | None) -> None:
        """Raise ModelError for a draft that vLLM completes with weights of the policy."""
        if draft is None:
            return
        try:
            refuse_part(draft, getattr(self._llm.vllm_config.speculative_config, "method", ""))
        except ModelError:
            self._llm.shutdown(_SHUTDOWN_S)
            raise

    @property
    def failure(self) -> EngineError | None:
        """Why requests are no longer answered, or None."""
        if not self.broken.done() and self._llm.errored:
            self.broken.set_result(_dead())
        return self.broken.result() if self.broken.done() else None

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def inside(self) -> int:
        """Number of requests in vLLM."""
        return self._limit.inside

    @property
    def waiting(self) -> int:
        """Number of requests waiting for vLLM."""
        return self._limit.waiting

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache, of one GPU if several hold the model."""
        return int(self._llm.vllm_config.cache_config.kv_cache_memory_bytes or 0)

    # Requests ---------------------------------------------------------------------------------

    async def generate(
        self,
        adapter: str,
        prompt: IntVector,
        sampling: Sampling,
        seed: int | None,
        request_id: str,
        on_token: OnToken | None,
        shown: ShownImages | None = None,
        conversation: str | None = None,
    ) -> Generation:
        """Generate from a prompt, optionally with an adapter and images."""
        key = f"{adapter}/{request_id}"
        version = self.versions[adapter]
        request = self._requests[key] = VllmRequest(
            adapter, key, self._limit.request_place(), version
        )
        request.num_top = sampling.num_top
        request.conversation = conversation
        tokens = prompt.tolist()
        kind = RequestOutputKind.FINAL_ONLY if on_token is None else RequestOutputKind.DELTA
        parameters = parameters_of(sampling, seed, kind, key)
        try:
            await asyncio.wait({request.place})
            while not request.place.cancelled():
                await self._open.wait()
                if request.cancelled:
                    break
                request.again = False
                result = await self._run_request(request, tokens, parameters, on_token, shown)
                if not request.again:
                    return result
        finally:
            self._limit.leave(request.place)
            del self._requests[key]
        return nothing()

    async def score(
        self, adapter: str, prompt: IntVector, top_k: int, request_id: str
    ) -> PromptScores:
        """Return the log-probs of a prompt, all computed with the same weights."""
        place = self._limit.request_place()
        tokens, parameters = prompt.tolist(), scoring_parameters(top_k)
        try:
            await asyncio.wait({place})
            while True:
                await self._open.wait()
                version = self.versions[adapter]
                salt = f"{adapter}:{version}"
                request = VllmRequest(adapter, f"{adapter}/{request_id}", place, version)
                made = tokens_input(tokens, cache_salt=salt)
                last = (await self._outputs(request, made, parameters, None))[-1]
                if self.versions.get(adapter, version) == version:
                    return scores_of(last, len(tokens), top_k)
        finally:
            self._limit.leave(place)

    def cancel(self, adapter: str, request_id: str) -> None:
        """End a request; `generate` returns the tokens so far."""
        request = self._requests.get(f"{adapter}/{request_id}")
        if request is None:
            return
        request.cancelled = True
        if not request.place.done():
            request.place.cancel()
        else:
            task = asyncio.ensure_future(self._llm.abort(request.key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_request(
        self,
        request: VllmRequest,
        tokens: list[int],
        parameters: SamplingParams,
        on_token: OnToken | None,
        shown: ShownImages | None,
    ) -> Generation:
        version = self.versions.get(request.adapter, request.version)
        request.begin(version)
        salt = f"{request.adapter}:{version}"
        if shown is None:
            prompt = tokens_input(tokens, cache_salt=salt)
        else:
            prompt = prompt_with_images(self._llm.input_processor, tokens, shown, salt)
        parts = await self._outputs(request, prompt, parameters, on_token)
        reused = parts[-1].num_cached_tokens or 0
        self.meter.reused += reused
        self.meter.prefilled += len(tokens) - reused
        generation = generation_of(request, parts)
        if self.turns is not None and request.conversation is not None:
            turn = np.concatenate([tokens, generation.token_ids])
            self.meter.evicted += self.turns.note(request.conversation, salt, turn, reused)
        return generation

    async def _outputs(
        self,
        request: VllmRequest,
        prompt: TokensInput | MultiModalInput,
        parameters: SamplingParams,
        on_token: OnToken | None,
    ) -> list[RequestOutput]:
        adapter = self._adapters.get(request.adapter)
        outputs = self._llm.generate(prompt, parameters, request.key, lora_request=adapter)
        parts: list[RequestOutput] = []
        try:
            async for output in outputs:
                parts.append(output)
                if on_token is not None and not request.again:
                    self._stream(request, output, on_token)
        except EngineDeadError as error:
            raise _dead() from error
        except EngineGenerateError as error:
            raise EngineError(
                f"vLLM failed at request {request.key}: {error.__cause__}",
                hint="see the generator's log",
            ) from error
        return parts

    def _stream(self, request: VllmRequest, output: RequestOutput, on_token: OnToken) -> None:
        completion = output.outputs[0]
        for token, logprob, top in drawn_of([completion], request.num_top):
            on_token(Drawn(token, logprob, request.next_version(), top))

    async def ask_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in each worker; return the results."""
        return await self._call(self._llm.collective_rpc(method, args=args))

    # New weights ------------------------------------------------------------------------------

    async def load_file(self, version: int, update: dict[str, Any], kv: KvOnSwap) -> None:
        """Load a version from a file between two steps; see `TakeVersion`."""

        async def take() -> None:
            kind, why = await self.take_weights(update)
            if kind != "done":
                raise EngineError(f"new weights were not loaded: {why}", hint="see the log above")

        await self._swap("", version, kv, take)

    async def receive(
        self,
        version: int,
        receive: Callable[[Callable[[], Awaitable[None]]], Awaitable[object]],
        kv: KvOnSwap,
    ) -> None:
        """Load a version that the workers receive from the learner through `receive`.

        `receive` awaits its argument, which pauses vLLM, before the first byte arrives. If it
        raises after that, vLLM stays paused until the next version is complete.
        """

        async def stand_still() -> None:
            if self._half is None:
                half = AsyncExitStack()
                await half.enter_async_context(self._swapping_of("", kv))
                self._half = half

        await receive(stand_still)
        await self._end_swap("", version)
        half, self._half = self._half, None
        if half is not None:
            await half.aclose()

    async def join_learner(self, joined: dict[str, Any]) -> tuple[str, str]:
        """Connect all workers to the learner, or form a group with it; see `JoinGroup`.

        Returns the outcome. vLLM's steps continue meanwhile.
        """
        request = WeightTransferInitRequest(joined)
        await self._call(self._llm.init_weight_transfer_engine(request))
        while True:
            outcome = await self.transfer_outcome()
            if outcome[0]:
                return outcome
            await asyncio.sleep(_OUTCOME_S)

    async def take_weights(self, update: dict[str, Any]) -> tuple[str, str]:
        """Receive weights in all workers; the caller ensures that no step runs.

        Returns the outcome. EngineError, which ends the engine, for tensors that are not those of
        vLLM's model.
        """
        await self._call(self._llm.start_weight_update())
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update)))
        await self._call(self._llm.finish_weight_update())
        kind, why = await self.transfer_outcome()
        if kind == "mismatch":
            raise self._end_with(
                EngineError(
                    f"the new weights are not those of vLLM's model: {why}",
                    hint="set generator.engine=transformers for this model, and report it",
                )
            )
        return kind, why

    async def transfer_outcome(self) -> tuple[str, str]:
        """Return the worst outcome of a transfer over all workers."""
        outcomes = [tuple(outcome) for outcome in await self.ask_workers("transfer_outcome")]
        return min(outcomes, key=lambda outcome: _WORST_FIRST.index(outcome[0]))

    def new_adapter(self) -> str:
        """Return a name for another adapter."""
        return f"adapter-{next(self._numbers)}"

    async def load_adapter(self, name: str, version: int, folder: str, kv: KvOnSwap) -> None:
        """Replace the named adapter by the adapter in a folder, between two steps."""
        known = self._adapters.get(name)
        number = next(self._numbers) if known is None else known.lora_int_id
        fresh = LoRARequest(name, number, folder, load_inplace=True)
        await self._swap(name, version, kv, lambda: self._llm.add_lora(fresh))
        self._adapters[name] = LoRARequest(name, number, folder)

    async def add_adapter(self, name: str, version: int, folder: str) -> None:
        """Add an adapter without pausing running requests."""
        fresh = LoRARequest(name, next(self._numbers), folder)
        await self._call(self._llm.add_lora(fresh))
        self._adapters[name] = fresh
        self.versions[name] = version

    def has_adapter(self, name: str) -> bool:
        """Return whether an adapter is available."""
        return name in self._adapters

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter; vLLM reuses its slot."""
        self._adapters.pop(name, None)
        self.versions.pop(name, None)

    async def name_version(self, adapter: str, version: int) -> None:
        """Label the tokens of the following steps with a version."""
        self.versions[adapter] = version
        await self._call(self._llm.update_weight_version(self._label))

    async def purge(self) -> None:
        """Clear NaNs from the cache, after a request has read one.

        NaNs would spread from unused cells of the cache's blocks, also with other weights. Running
        requests are recomputed. The cache is cleared once per set of weights; if the weights
        themselves produce NaNs, it is cleared again when they change.
        """
        if self._poisoned != self._label:
            self._poisoned = self._label
            async with self._paused(clear_cache=True):
                if not self._asleep:
                    await self.ask_workers("zero_caches")

    @property
    def _label(self) -> str:
        return json.dumps(self.versions)

    async def _swap(
        self, adapter: str, version: int, kv: KvOnSwap, take: Callable[[], Awaitable[object]]
    ) -> None:
        async with self._swapping_of(adapter, kv):
            await self._call(take())
            await self._end_swap(adapter, version)

    @asynccontextmanager
    async def _swapping_of(self, adapter: str, kv: KvOnSwap) -> AsyncIterator[None]:
        """Pause while weights are replaced, and drop results of the old weights."""
        started = time.perf_counter()
        poisoned = self._poisoned == self._label
        clear = poisoned or kv == "recompute"
        async with self._paused(clear_cache=clear):
            if self._asleep:
                await self._wake_memory("weights")
            elif not clear:
                await self._take_back(adapter)
            yield
            if self._sees:
                await self._call(self._llm.reset_encoder_cache())
            if poisoned and not self._asleep:
                await self.ask_workers("zero_caches")
        if not self._asleep:
            self.meter.paused(time.perf_counter() - started)

    @asynccontextmanager
    async def _paused(self, *, clear_cache: bool) -> AsyncIterator[None]:
        """Pause between two steps; if the cache is cleared, running requests are recomputed."""
        async with self._swapping:
            if self._asleep:
                yield
                return
            self._open.clear()
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=clear_cache))
            yield
            await self._call(self._llm.resume_generation())
            self._open.set()

    async def _end_swap(self, adapter: str, version: int) -> None:
        self.has_weights = True
        await self.name_version(adapter, version)
        self._note_swap(adapter, version)

    def _note_swap(self, adapter: str, version: int) -> None:
        """Record in an adapter's requests which tokens the previous weights drew."""
        for state in self._llm.output_processor.request_states.values():
            request = self._requests.get(state.external_req_id)
            if request is not None and request.adapter == adapter:
                request.note_swap(state.detokenizer.num_output_tokens(), version)

    # Memory -----------------------------------------------------------------------------------

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the memory of weights and cache, between two steps.

        Level 1 of vLLM keeps a copy of the weights in host memory. Level 2 keeps none: complete
        weights must arrive before it wakes. It discards (vLLM 0.32, `CuMemBackend` and
        `Worker.sleep` of `gpu_worker.py`) everything allocated while the model was loaded:

        - Parameters: `load_weights` replaces them in place, so CUDA graphs find them where they
          were. Some models have parameters that no learner publishes, such as the routers' biases
          that transformers has as buffers; so workers note which ones a version has replaced.
        - Buffers (rotary embeddings, scales of the cache): workers copy them to the machine's
          memory, and back when the memory of weights is taken back.
        - Tensors that are neither, which nothing would bring back. The layers of adapters have
          theirs so; a model that has room for adapters sleeps at level 1.
        - A draft model, of which no version arrives: it sleeps at level 1, too.
        """
        async with self._swapping:
            if self._asleep:
                return
            if not keep_weights and not self._has_other_weights:
                self.has_weights = not all(await self.ask_workers("replaces_all_weights"))
            self._slept_at = time.perf_counter()
            self._open.clear()
            level = 1 if self.has_weights else 2
            await self._call(self._llm.sleep(level=level, mode="keep"))
            self._asleep = list(_MEMORY)

    async def wake(self) -> None:
        """Allocate the memory again and continue; running requests are recomputed."""
        async with self._swapping:
            if not self._asleep:
                return
            for tag in _MEMORY:
                await self._wake_memory(tag)
            self.meter.slept(time.perf_counter() - self._slept_at)
            self._open.set()

    async def _wake_memory(self, tag: str) -> None:
        """Allocate freed memory again; with the last of it, vLLM continues by itself."""
        if tag in self._asleep:
            await self._call(self._llm.wake_up(tags=[tag]))
            self._asleep.remove(tag)

    async def _take_back(self, adapter: str) -> None:
        """Restart requests without a token: old weights may have computed their prompts."""
        states = list(self._llm.output_processor.request_states.values())
        for state in states:
            request = self._requests.get(state.external_req_id)
            if state.is_prefilling and request is not None and request.adapter == adapter:
                request.again = True
                await self._llm.abort(request.key)

    async def _call(self, call: Awaitable[T]) -> T:
        """Await work of vLLM's processes; a failure is an EngineError, which ends the engine."""
        task = asyncio.ensure_future(call)
        await asyncio.wait({task})
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, EngineError):
            raise self._end_with(error)
        raise self._end_with(
            EngineError(
                f"vLLM failed: {type(error).__name__}: {error}",
                hint="see the generator's log; its tasks go to another generator",
            )
        ) from error

    def _end_with(self, failure: EngineError) -> EngineError:
        """Answer no request any more, but with this failure; return it."""
        if not self.broken.done():
            self.broken.set_result(failure)
        return failure

    # The end ----------------------------------------------------------------------------------

    def add_owner(self) -> None:
        """Count another owner, which must call `close`."""
        self._owners += 1

    async def close(self) -> None:
        """End vLLM's processes when the last owner calls this."""
        self._owners -= 1
        if self._owners <= 0:
            if self._llm.output_handler is not None:
                self._llm.output_handler.cancel()  # otherwise it reports the end as an error
            await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)


def _dead() -> EngineError:
    return EngineError(
        "vLLM's processes have ended",
        hint="see the generator's log; its tasks go to another generator",
    )
