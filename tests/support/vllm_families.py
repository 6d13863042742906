"""The tiny models of the families in vLLM's CPU build, one after the other in one process.

`python -m tests.support.vllm_families FAMILY...` prints what each one does; in vLLM's environment.
"""

import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.actors.weights.tensors import WeightNames
from transformers import PreTrainedModel

from tests.support.families import FAMILIES, VOCAB, make_model, plain_logprobs
from tests.support.vllm_start import configured

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
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "lru_width": 64,
}
"""Widths that vLLM's kernels for CPUs take: heads of 32 and more."""
MAKERS: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
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


def make(family: str) -> PreTrainedModel:
    """Return a family's tiny model in sizes for vLLM."""
    return make_model(family, SIZES, **MAKERS.get(family, {}))


def published(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what a learner publishes of a model, each tensor once."""
    names = WeightNames(policy_tensors(model))
    return {
        each[0]: tensor.detach() for each, tensor in zip(names.names, names.tensors, strict=True)
    }


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with other weights, as after a step of training."""
    import copy

    other = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.05 * torch.rand(tensor.shape, generator=noise)
    return other


class Served:
    """A model that vLLM computes in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._version = 0
        self._adapter: Any = None
        self.ask("record_logprobs_before_filters")

    def ask(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method of the worker."""
        return self._llm.collective_rpc(method, args=args, kwargs=named)[0]

    @property
    def model(self) -> Any:
        """vLLM's model."""
        core = self._llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.model

    def add_adapter(self, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> None:
        """Add an adapter for the next requests."""
        from tinkermq.actors.engine.vllm.weight_files import WeightFiles
        from vllm.lora.request import LoRARequest

        folder = WeightFiles().write_adapter(1, tensors, config)
        self._adapter = LoRARequest("one", 1, str(folder))
        self._llm.llm_engine.add_lora(self._adapter)

    def draw(self, num: int = 12) -> tuple[np.ndarray, list[float]]:
        """Return a prompt with drawn tokens, and their log-probs."""
        from tinkermq.actors.engine.vllm.request import drawn_of, parameters_of
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked = parameters_of(Sampling(num), 5, RequestOutputKind.FINAL_ONLY, "one")
        prompt = tokens_input(PROMPT.tolist(), cache_salt=str(self._version))
        output = self._llm.generate([prompt], asked, use_tqdm=False, lora_request=self._adapter)[0].outputs
        drawn = list(drawn_of(output, 0))
        ids = np.concatenate([PROMPT, [token for token, _, _ in drawn]])
        return ids, [logprob for _, logprob, _ in drawn]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        """Load new weights as from a learner; return the outcome."""
        from tinkermq.actors.engine.vllm.vllm_engine import update_of_file
        from tinkermq.actors.engine.vllm.weight_files import WeightFiles

        self._version += 1
        files = WeightFiles()
        update = update_of_file(*files.write_model(self._version, tensors))
        self.ask("start_weight_update")
        self.ask("update_weights", update_info=update)
        self.ask("finish_weight_update")
        files.close()
        return self.ask("transfer_outcome")


@contextmanager
def served(folder: Path, ranks: Sequence[int] = ()) -> Iterator[Served]:
    """Give a model that vLLM computes in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from tinkermq.actors.engine.vllm.model import engine_arguments, settle_environment
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    config = configured(folder)
    settle_environment(config.generator)
    arguments = engine_arguments(str(folder), config.generator, 160, False, ranks, False)
    llm: Any = None
    try:
        llm = LLM(**arguments)
        yield Served(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def check_served(model: PreTrainedModel, vllm: Served) -> None:
    """Compare log-probs of vLLM with the model's own pass."""
    ids, logprobs = vllm.draw()
    expected = plain_logprobs(model, ids, len(PROMPT))
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def outcome_of(family: str) -> str:
    """Say what a family's tiny model does in vLLM."""
    said, step = "", "make"
    try:
        model = make(family)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            step = "start"
            with served(Path(folder)) as vllm:
                said = type(vllm.model).__name__
                step = "log-probs"
                check_served(model, vllm)
                step = "load"
                other = moved(model)
                outcome = vllm.load(published(other))
                assert tuple(outcome) == ("done", ""), outcome
                step = "new log-probs"
                check_served(other, vllm)
        return f"runs {said}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split())[:500]
        return f"{said} {step}: {type(error).__name__} {words} ({last.filename}:{last.lineno})"


def lora_of(family):
    try:
        with tempfile.TemporaryDirectory() as folder:
            make(family).save_pretrained(folder)
            config = LoraConfig(rank=4)
            from tests.support.models import adapted
            other = adapted(Path(folder), config, 3)
            with served(Path(folder), [4]) as vllm:
                    vllm.add_adapter({k: v.detach() for k, v in policy_tensors(other).items()}, config)
                    check_served(other, vllm)
        return "lora runs"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split())[:500]
        return f"lora {type(error).__name__} {words} ({last.filename}:{last.lineno})"


def main() -> None:
    """Print what each family does."""
    import vllm
    from vllm import LLM
    from tinkermq.actors.engine.vllm import vllm_engine, worker
    import time, subprocess
    first = sys.argv[1:]
    more = "afmoe glm4_moe glm4_moe_lite longcat_flash mimo_v2_flash minimax_m2 ernie4_5_moe falcon qwen3_next gemma4_text llama4_text nemotron_h gemma2 jamba olmo_hybrid deepseek_v32 falcon_h1 solar_open youtu".split()
    def each(what, family):
        t = time.time()
        pid = os.fork()
        if pid == 0:
            print(f"{family}: {what(family)}", round(time.time()-t,1), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(f"{family}: DIED {status}", flush=True)
    def nexts():
        for path in sorted(Path("/tmp/vx/next").glob("*.sh")):
            done = path.rename(path.with_suffix(".ran"))
            subprocess.run(["bash", str(done)], stdout=open(str(done)+".out","w"), stderr=subprocess.STDOUT)
    for family in first + more:
        nexts()
        each(outcome_of, family)
        if family in first:
            each(lora_of, family)
    for _ in range(20):
        nexts()
        time.sleep(3)


if __name__ == "__main__":
    main()
