"""Additions to vLLM's worker processes: log-probs, new weights, records of experts.

vLLM records log-probs either before the temperature or after top-p and top-k. A learner needs those
after the temperature and before top-p and top-k. vLLM's sampler draws in a separate module, which
is wrapped here; the module gets logits divided by the temperature, and may change them in place.

Experts are recorded for each slot of the cache, like its keys, so that experts of cached tokens are
also available. vLLM 0.32 records experts itself only with its newer model runner, whose sampler is
not the wrapped one; its capturing code is used here.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false

import os
import select
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler

from ...policy.devices import gpu_of
from .constraints import ConstrainedLogits
from .transfer import Outcome

# -- experts of the tokens in the cache ------------------------------------------------------------

_KEPT = 4096
"""Number of ended requests whose experts are kept; the oldest are dropped."""


class SlotExperts:
    """Follows the steps of a worker's model runner."""

    def __init__(self, runner: Any) -> None:
        """Follow it from now on; its layers must not be compiled or captured as graphs yet."""
        config, model = runner.vllm_config, runner.get_model()
        self._runner = runner
        self._block_size = int(config.cache_config.block_size)
        most = int(config.scheduler_config.max_num_batched_tokens)
        self._capturer = RoutedExpertsCapturer(most, config)
        bind_routed_experts_capturer(model, self._capturer)
        layer_ids = sorted(
            int(module.layer_id) for module in model.modules() if isinstance(module, MoERunner)
        )
        device = self._capturer.device_buffer.device
        self._layers = torch.tensor(layer_ids, device=device)
        slots = int(config.cache_config.num_gpu_blocks) * self._block_size
        shape = (slots, len(layer_ids), self._capturer.shape_per_token[1])
        self._slots_SLK = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._ended: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._execute = runner.execute_model
        runner.execute_model = self._step

    @property
    def shape(self) -> list[int]:
        """Number of layers with experts, and of experts per token."""
        return list(self._slots_SLK.shape[1:])

    def read_experts(self, key: str, num: int) -> bytes:
        """Return the experts of the first tokens of an ended request; empty: unknown."""
        for request in [name for name in self._runner.requests if _key(name) == key]:
            return self._read(request)[:num].cpu().numpy().tobytes()
        mine = [self._ended.pop(name) for name in list(self._ended) if _key(name) == key]
        return mine[-1][:num].cpu().numpy().tobytes() if mine else b""

    def _step(self, scheduled: Any, *more: Any) -> Any:
        for request in self._leaving(scheduled):  # others may reuse their slots in this step
            self._ended[request] = self._read(request)
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)
        output = self._execute(scheduled, *more)
        if num := int(scheduled.total_num_scheduled_tokens):
            slots_N = self._runner.input_batch.block_table[0].slot_mapping.gpu[:num]
            chosen = self._capturer.snapshot_routing_data(num)
            self._slots_SLK[slots_N] = chosen[:, self._layers]
        return output

    def _leaving(self, scheduled: Any) -> Iterator[str]:
        return (
            request for request in scheduled.finished_req_ids if request in self._runner.requests
        )

    def _read(self, request: str) -> torch.Tensor:
        blocks = torch.tensor(self._runner.requests[request].block_ids[0], dtype=torch.int64)
        within = torch.arange(self._block_size)
        slots_N = (blocks[:, None] * self._block_size + within).flatten()
        return self._slots_SLK[slots_N.to(self._slots_SLK.device)]


def _key(request: str) -> str:
    """Return the id of a request without vLLM's suffix."""
    return request.rpartition("-")[0]


class Recording(torch.nn.Module):
    """Draws with another module; returns the log-probs of its input."""

    def __init__(self, draw: torch.nn.Module) -> None:
        super().__init__()
        self._draw = draw

    def forward(
        self,
        logits_BV: torch.Tensor,
        generators: dict[int, torch.Generator],
        top_k_B: torch.Tensor | None,
        top_p_B: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int[B] tokens and float32[B, V] log-probs before top-k and top-p."""
        logprobs_BV = logits_BV.log_softmax(-1, dtype=torch.float32)
        tokens_B, _ = self._draw(logits_BV, generators, top_k_B, top_p_B)
        return tokens_B, logprobs_BV


def _expanded(
    values_B: torch.Tensor,
    ends_B: torch.Tensor,
    num: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return [num] with each request's value once for each of its tokens."""
    lengths_B = ends_B.diff(prepend=ends_B.new_zeros(1))
    values_B = torch.where(values_B == replace_from, replace_to, values_B)
    return values_B.repeat_interleave(lengths_B, output_size=num)


def _record_accepted(sampler: Any, device: torch.device) -> None:
    """Let a rejection sampler record log-probs as `Recording` does, of each accepted token.

    All logits of a step are the policy's: after the last token, and after each proposed one.
    """
    if device.type == "cpu":
        # vLLM 0.32 expands into a copy there: temperature, top-p and top-k of proposed tokens would
        # be what was left in the memory.
        rejection_sampler.expand_batch_to_tokens = _expanded
    plain = sampler.forward

    def forward(
        metadata: Any, draft_probs: torch.Tensor | None, logits_NV: torch.Tensor, sampling: Any
    ) -> Any:
        if not len(metadata.draft_token_ids):  # vLLM 0.32 fails on CPUs without a row for top-k
            return sampler.sampler(logits_NV[metadata.bonus_logits_indices], sampling)
        unrecorded = replace(sampling, max_num_logprobs=None)
        output = plain(metadata, draft_probs, logits_NV, unrecorded)
        if sampling.max_num_logprobs is None:
            return output
        logits_NV = logits_NV.float()
        if sampling.temperature is not None:
            ends_B = metadata.cu_num_sampled_tokens
            scale_N = _expanded(sampling.temperature, ends_B, len(logits_NV), 0, 1)
            logits_NV = logits_NV / scale_N[:, None]
        output.logprobs_tensors = sampler._get_logprobs_tensors(
            sampling.max_num_logprobs,
            metadata,
            logits_NV,
            logits_NV[metadata.target_logits_indices],
            logits_NV[metadata.bonus_logits_indices],
            output.sampled_token_ids,
        )
        return output

    sampler.forward = forward


class _PromptLogits:
    """Computes the logits of a prompt's tokens with the adapter of their request.

    vLLM 0.32 applies an adapter's output layer to them as if they were the tokens drawn in this
    step, one per request.
    """

    def __init__(self, runner: Any, hidden_states: torch.Tensor) -> None:
        self._runner = runner
        self._first = int(hidden_states.storage_offset())
        self._compute = runner.model.compute_logits

    def __call__(self, states_ND: torch.Tensor) -> torch.Tensor:
        batch = self._runner.input_batch
        place = int(states_ND.storage_offset()) - self._first
        token = place // int(states_ND.stride()[0])
        starts = self._runner.query_start_loc.np[: batch.num_reqs].tolist()
        adapter = (int(batch.request_lora_mapping[starts.index(token)]),) * len(states_ND)
        present = set(batch.lora_id_to_lora_request.values())
        self._runner._set_active_loras(adapter, adapter, present)
        return self._compute(states_ND)


class WorkerExtension:
    """Methods added to each worker process; the engine's process calls them by name."""

    model_runner: Any
    """The worker's model runner: the worker class inherits from this one."""
    reload_weights: Any
    wake_up: Any
    device: torch.device
    weight_transfer_engine: Any
    _experts: SlotExperts | None = None

    def end_with(self, pid: int) -> None:
        """End this process, and thereby vLLM's other processes, when another process ends."""
        process = os.pidfd_open(pid)

        def watch() -> None:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            poll.poll()
            os._exit(1)

        threading.Thread(target=watch, name="end_with", daemon=True).start()

    def transfer_outcome(self) -> Outcome:
        """Return the outcome of the last weight transfer."""
        return self.weight_transfer_engine.outcome

    def replaces_all_weights(self) -> bool:
        """Return whether the last version of weights replaced every parameter of the model."""
        return self.weight_transfer_engine.replaces_all

    def gpu(self) -> str:
        """Return the UUID of this worker's GPU; empty on a CPU."""
        return gpu_of(self.device)

    def record_experts(self) -> list[int]:
        """Record each token's experts; return the numbers of layers and of experts per token."""
        self._experts = self._experts or SlotExperts(self.model_runner)
        return self._experts.shape

    def take_experts(self, key: str, num: int) -> bytes:
        """Return the experts of the first tokens of an ended request, in uint8."""
        return self._experts.read_experts(key, num) if self._experts else b""

    def zero_caches(self) -> None:
        """Zero all keys and values; the caller ensures that no request uses them."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def clear_caches_at_wake(self) -> None:
        """Zero the caches after each sleep, as their memory may hold NaNs."""
        wake_up = self.wake_up

        def wake_up_clear(tags: list[str] | None = None) -> None:
            wake_up(tags)
            if tags is None or "kv_cache" in tags:
                self.zero_caches()

        self.wake_up = wake_up_clear

    def score_prompts_with_adapters(self) -> None:
        """Compute log-probs of prompts with their adapters; the next step sets its own."""
        runner = self.model_runner
        plain = runner._get_prompt_logprobs_dict

        def scored(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> Any:
            if not runner.num_prompt_logprobs:
                return plain(hidden_states, num_scheduled_tokens)
            compute = runner.model.compute_logits
            runner.model.compute_logits = _PromptLogits(runner, hidden_states)
            try:
                return plain(hidden_states, num_scheduled_tokens)
            finally:
                runner.model.compute_logits = compute

        runner._get_prompt_logprobs_dict = scored

    def record_logprobs_before_filters(self) -> None:
        """Record log-probs after the temperature and before penalties, grammars and filters."""
        sampler: Any = self.model_runner.sampler
        if sampler.__class__ is not Sampler:
            raise TypeError(f"vLLM samples by {sampler}, whose log-probs are not known")
        sampler.logprobs_mode = "processed_logprobs"
        sampler.topk_topp_sampler = Recording(sampler.topk_topp_sampler)
        if self.model_runner.speculative_config is not None:
            _record_accepted(self.model_runner.rejection_sampler, self.device)
            return  # vLLM takes no processor of logits beside speculation
        constrained, plain = self._constrained(), sampler.sample
        constrained.follow(self.model_runner.input_batch)

        def sample(logits: torch.Tensor, sampling_metadata: Any, *more: Any) -> Any:
            sampled, processed = plain(logits, sampling_metadata, *more)
            own = constrained.recorded(sampling_metadata.temperature)
            return sampled, processed if own is None else own

        sampler.sample = sample

    def take_figures(self, key: str, num: int) -> tuple[bytes, str]:
        """Return the share that a grammar excluded at each token of an ended request, in float32,
        and why it could not be followed."""
        return self._constrained().take_figures(key, num)

    def _constrained(self) -> ConstrainedLogits:
        every = self.model_runner.input_batch.logitsprocs.all
        return next(processor for processor in every if isinstance(processor, ConstrainedLogits))
