"""What is called of the real vLLM has the names and arguments that it is called with."""

import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.cards import find_card, known_cards
from tinkermq.schemas.plan.plan import with_engine_settings
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.gateway import free_port

# Not installed for development; typings/vllm has what is used of it.
# pyright: reportMissingModuleSource=false

pytestmark = pytest.mark.vllm
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}


def of_vllm(module: str) -> Any:
    """Return a module of vLLM, of which more is looked at here than is used elsewhere."""
    return importlib.import_module(f"vllm.{module}")


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_the_calls_of_a_weight_update_are_those_of_vllm(folder: Path) -> None:
    from vllm import AsyncEngineArgs
    from vllm.distributed.weight_transfer.base import (
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )
    from vllm.v1.engine.async_llm import AsyncLLM

    assert parameters(AsyncLLM.init_weight_transfer_engine) == {"self", "request"}
    assert parameters(AsyncLLM.update_weights) == {"self", "request"}
    assert parameters(AsyncLLM.start_weight_update) == {"self"}
    assert parameters(AsyncLLM.finish_weight_update) == {"self", "weight_version"}
    assert {"mode", "clear_cache"} <= parameters(AsyncLLM.pause_generation)
    assert "weight_transfer_config" in parameters(AsyncEngineArgs)
    assert parameters(WeightTransferInitRequest) == {"init_info"}
    assert parameters(WeightTransferUpdateRequest) == {"update_info"}
    made = AsyncEngineArgs(model=str(folder), weight_transfer_config={"backend": "tinkermq"})
    assert cast("Any", made).weight_transfer_config.backend == "tinkermq"


@pytest.mark.parametrize("name", [name for name in known_cards() if name != "T4"])
def test_a_plan_chooses_batches_as_large_as_vllm_does_by_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, arguments = find_card(name), of_vllm("engine.arg_utils")
    device = {"total_memory": card.memory_bytes, "name": f"NVIDIA {name}"}
    platform = SimpleNamespace(
        **{
            f"get_device_{key}": partial(lambda value: value, value)
            for key, value in device.items()
        },
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arguments, "current_platform", platform)
    tokens, requests = arguments.EngineArgs.get_batch_defaults(1)
    context = of_vllm("usage.usage_lib").UsageContext.LLM_CLASS
    tree = {
        "model": {"path": "Qwen2.5-0.5B"},
        "env": {"game": "g"},
        "rollout": {"max_prompt_tokens": 64, "max_turn_tokens": 192, "max_response_tokens": 192},
        "generator": {"engine": "vllm", "max_episodes": 4096},
    }
    job = JobConfig.model_validate(tree)
    settled = with_engine_settings(job, card).generator
    assert (settled.max_batched_tokens, settled.max_requests) == (
        tokens[context],
        requests[context],
    )


def test_the_transfer_engine_is_one_of_vllms_and_its_factory_makes_it() -> None:
    from tinkermq.actors.engine.vllm import worker
    from tinkermq.actors.engine.vllm.transfer import (
        BACKEND,
        JoinGroup,
        MemoryTransferEngine,
        TakeVersion,
    )
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    factory = of_vllm("distributed.weight_transfer.factory").WeightTransferEngineFactory
    assert not inspect.isabstract(MemoryTransferEngine)
    for name, method in inspect.getmembers(WeightTransferEngine, inspect.isfunction):
        own = getattr(MemoryTransferEngine, name)
        assert list(inspect.signature(own).parameters) == list(
            inspect.signature(method).parameters
        ), name
    assert factory._registry[BACKEND]() is MemoryTransferEngine
    ours = {name for name in dir(worker.WorkerExtension) if not name.startswith("__")}
    assert not ours & set(dir(of_vllm("v1.worker.gpu_worker").Worker))
    for made in (JoinGroup(address="a", port=1), TakeVersion([], [], [], [], 0)):
        assert made


def test_workers_say_which_gpu_they_have_as_the_learner_does() -> None:
    """vLLM's own `ipc` engine compares the same UUIDs."""
    packed = of_vllm("distributed.weight_transfer.packed_tensor")
    for module in (of_vllm("distributed.weight_transfer.ipc_engine"), packed):
        assert "get_device_properties(device_index)" in inspect.getsource(module)
    assert "uuid" in inspect.getsource(packed.packed_ipc_consumer)


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    """What vLLM's layers need of their process."""
    distributed, config = of_vllm("distributed"), of_vllm("config")
    with config.set_current_vllm_config(config.VllmConfig()):
        address = f"tcp://127.0.0.1:{free_port()}"
        distributed.init_distributed_environment(1, 0, address, 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
    yield
    distributed.cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_names_that_a_learner_publishes_are_those_that_vllm_loads(
    name: str, one_worker: None, tmp_path: Any
) -> None:
    """Models of real widths without memory: each of vLLM's parameters is loaded, in its shape."""
    vllm_of, loading = of_vllm("config"), of_vllm("model_executor.model_loader.utils")
    fields = dict(CONFIGS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        published = policy_tensors(AutoModelForCausalLM.from_config(config))
    model_config = vllm_of.ModelConfig(
        model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16"
    )
    vllm_config = vllm_of.VllmConfig(model_config=model_config)
    with vllm_of.set_current_vllm_config(vllm_config), torch.device("meta"):
        model: Any = loading.initialize_model(vllm_config)
        once = {id(tensor): (key, tensor) for key, tensor in reversed(list(published.items()))}
        loaded = model.load_weights(
            (key, tensor.detach().bfloat16()) for key, tensor in once.values()
        )
    missing = set(dict(model.named_parameters())) - loaded
    assert missing == set()
