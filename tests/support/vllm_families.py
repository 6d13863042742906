"""Tiny models of the families in vLLM's CPU build, one after the other in one process."""

import copy
import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.weights.tensors import WeightNames
from tinkermq.schemas.config.sections import LoraConfig
from transformers import PreTrainedModel

from tests.support.families import make_model, plain_logprobs
from tests.support.vllm_start import MAX_CONTEXT, configured

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_embd": 64,
    "n_head": 2,
    "ffn_hidden_size": 256,
    "global_head_dim": 64,
    "moe_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 32,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "lru_width": 64,
}
"""Widths that vLLM's kernels for CPUs take: heads of 32 and more."""
MAKERS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "deepseek_v3": {"head_dim": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "lfm2": {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 64},
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "swa_rope_theta": 10000.0,
        "rope_theta": 5000000.0,
        "partial_rotary_factor": 0.334,
        "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window_size": 8,
        "layernorm_epsilon": 1e-5,
    },
    "minimax_m2": {"rotary_dim": 32},
}
"""What config.json of the makers has, vLLM reads, and transformers' own class leaves out."""
PROMPT = np.arange(20, 60)


IN_BFLOAT16 = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
"""Families whose linear attention vLLM's CPU build computes in bfloat16 alone."""


def make(family: str) -> PreTrainedModel:
    """Return a family's tiny model in sizes for vLLM."""
    model: Any = make_model(family, SIZES, **MAKERS.get(family, {}))
    return model.to(torch.bfloat16) if family in IN_BFLOAT16 else model


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a learner publishes of a model, each tensor once."""
    names = WeightNames(policy_tensors(model))
    pairs = zip(names.names, names.tensors, strict=True)
    return {first: tensor.detach() for (first, *_), tensor in pairs}


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with other weights and buffers, as after a step of training."""
    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(1)
    for tensor in published(other).values():
        tensor += 0.05 * torch.rand(tensor.shape, generator=noise)
    return other


class Served:
    """A model that vLLM computes in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._version = 0
        self._adapter: Any = None
        self.ask("record_logprobs_before_filters")

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        return self._llm.collective_rpc(method, args=args)[0]

    def check(self, model: PreTrainedModel) -> None:
        """Draw tokens, and compare their log-probs with the model's own pass: 1e-4 in float32."""
        from tinkermq.actors.engine.vllm.request import drawn_of, parameters_of
        from vllm.sampling_params import RequestOutputKind

        asked = parameters_of(Sampling(12), 5, RequestOutputKind.FINAL_ONLY, "one")
        prompt = {"prompt_token_ids": PROMPT.tolist(), "cache_salt": str(self._version)}
        made = self._llm.generate([prompt], asked, use_tqdm=False, lora_request=self._adapter)
        drawn = list(drawn_of(made[0].outputs, 0))
        ids = np.concatenate([PROMPT, [token for token, _, _ in drawn]])
        module: Any
        for module in model.modules():
            module.do_not_compile = True  # vLLM has changed classes that it runs itself
        expected = plain_logprobs(model, ids, len(PROMPT))
        atol = 1e-4 if model.dtype == torch.float32 else 0.05
        if getattr(model.config, "kv_lora_rank", None):
            atol = 5e-3  # 1.7e-3 measured: the CPU build's latent attention
        np.testing.assert_allclose([logprob for _, logprob, _ in drawn], expected, atol=atol)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        """Load new weights as they come from a learner; return the outcome."""
        from tinkermq.actors.engine.vllm.vllm_engine import update_of_file
        from tinkermq.actors.engine.vllm.weight_files import WeightFiles

        self._version += 1
        files = WeightFiles()
        update = update_of_file(*files.write_model(self._version, tensors))
        self.ask("start_weight_update")
        self.ask("update_weights", update)
        self.ask("finish_weight_update")
        files.close()
        return tuple(self.ask("transfer_outcome"))

    def add_adapter(self, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        """Add an adapter, which computes all later requests."""
        from tinkermq.actors.engine.vllm.weight_files import WeightFiles
        from vllm.lora.request import LoRARequest

        files = WeightFiles()
        folder = files.write_adapter(1, tensors, config)
        self._adapter = LoRARequest("one", 1, str(folder))
        self._llm.llm_engine.add_lora(self._adapter)
        files.close()


@contextmanager
def served(folder: Path, dtype: torch.dtype, *ranks: int) -> Iterator[Served]:
    """Give a model that vLLM computes in this process, with room for adapters."""
    from tinkermq.actors.engine.vllm.model import engine_arguments, settle_environment
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    config = configured(folder, max_requests=2)
    settle_environment(config.generator)
    arguments = engine_arguments(str(folder), config.generator, MAX_CONTEXT, False, ranks, False)
    # with it, the CPU build fails for seeded requests whose prompts it divides for the cache
    arguments |= {"dtype": str(dtype).removeprefix("torch."), "enable_prefix_caching": False}
    llm: Any = None
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        llm = LLM(**arguments)
        yield Served(llm)
    finally:
        del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
