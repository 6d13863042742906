"""Which experts read the tokens in vLLM's cache: one record for each slot, beside its keys.

What a request did not compute, for it was in the cache, stands there as well. vLLM 0.32 records
experts by itself with its newer model runner only, whose sampler is not the one that `worker`
knows; what it captures them with is used here.
"""

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

_KEPT = 4096
"""Requests that have ended and were not asked about; the oldest give way."""


class SlotExperts:
    """Follows the steps of a worker's model runner."""

    def __init__(self, runner: Any) -> None:
        """Follow it from now on; its layers must not have been compiled or recorded as graphs."""
        config, model = runner.vllm_config, runner.get_model()
        self._runner = runner
        self._block_size = int(config.cache_config.block_size)
        most = int(config.scheduler_config.max_num_batched_tokens)
        self._capturer = RoutedExpertsCapturer(most, config)
        bind_routed_experts_capturer(model, self._capturer)
        found = sorted(int(one.layer_id) for one in model.modules() if isinstance(one, MoERunner))
        device = self._capturer.device_buffer.device
        self._layers = torch.tensor(found, device=device)
        slots = int(config.cache_config.num_gpu_blocks) * self._block_size
        shape = (slots, len(found), self._capturer.shape_per_token[1])
        self._slots_SLK = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._ended: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._execute = runner.execute_model
        runner.execute_model = self._step

    @property
    def shape(self) -> list[int]:
        """Layers with experts, and how many of one read a token."""
        return list(self._slots_SLK.shape[1:])

    def take(self, key: str, num: int) -> bytes:
        """Return the experts of the first tokens of a request that has ended; empty: not known."""
        for request in [one for one in self._runner.requests if _key(one) == key]:
            return self._read(request)[:num].cpu().numpy().tobytes()
        mine = [self._ended.pop(one) for one in list(self._ended) if _key(one) == key]
        return mine[-1][:num].cpu().numpy().tobytes() if mine else b""

    def _step(self, scheduled: Any, *more: Any) -> Any:
        for request in self._leaving(scheduled):  # others may get their slots in this step
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
        return (one for one in scheduled.finished_req_ids if one in self._runner.requests)

    def _read(self, request: str) -> torch.Tensor:
        blocks = torch.tensor(self._runner.requests[request].block_ids[0], dtype=torch.int64)
        within = torch.arange(self._block_size)
        slots_N = (blocks[:, None] * self._block_size + within).flatten()
        return self._slots_SLK[slots_N.to(self._slots_SLK.device)]


def _key(request: str) -> str:
    """Return what a request was called, before vLLM added to it."""
    return request.rpartition("-")[0]
