"""What is called of the real vLLM has the names and arguments that it is called with."""

import dataclasses
import importlib
import inspect
import os
import shutil
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
from tinkermq.schemas.plan.settings import with_engine_settings
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


def test_each_step_is_scheduled_with_the_tokens_of_the_last_on_gpus_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinkermq.actors.engine.vllm import model

    monkeypatch.setattr(model, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    generator = JobConfig.model_validate(
        {"model": {"path": "m"}, "env": {"game": "g"}, "generator": {"engine": "vllm"}}
    ).generator
    arguments = model.engine_arguments("m", generator, 64, False, [], sees=False)
    fields = {field.name for field in dataclasses.fields(of_vllm("engine.arg_utils").EngineArgs)}
    assert arguments.keys() <= fields | {"use_tqdm_on_load"}
    assert arguments["async_scheduling"] is False


def test_settings_that_vllm_pins_for_its_own_groups_do_not_meet_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A learner without them would wait for ever."""
    from tinkermq.actors.engine.vllm import transfer
    from tinkermq.actors.weights.broadcast_group import ProcessGroupFailed

    nccl, met = of_vllm("utils.nccl"), list[str | None]()
    monkeypatch.setenv("NCCL_NO_CACHE", "")
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setattr(
        transfer.broadcast_group,
        "meet_group",
        lambda *_: met.append(os.environ["NCCL_PROTO"]),
    )
    engine: Any = object.__new__(transfer.MemoryTransferEngine)
    engine._group, engine._store, engine.device = None, "store", torch.device("cpu")
    engine.parallel_config = SimpleNamespace(rank=0)
    place = transfer.JoinGroup("127.0.0.1", 1, "one", 1, 2, "cuda")
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})
    engine._meet(place)
    assert met == ["LL"]
    assert os.environ["NCCL_PROTO"] == "Simple"
    monkeypatch.setattr(nccl, "_unpinned_env", {})  # an older NCCL
    with pytest.raises(ProcessGroupFailed, match="too old"):
        engine._meet(place)


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


# -- what vLLM's second level of sleep discards ----------------------------------------------------


class _Allocator:
    """Notes what of a GPU's memory is copied before it is given back."""

    def __init__(self) -> None:
        self.offloaded: tuple[str, ...] = ()

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        self.offloaded = offload_tags


def test_the_first_level_of_sleep_copies_the_weights_and_the_second_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    assert {"level", "mode"} <= parameters(AsyncLLM.sleep)
    allocator, backend = _Allocator(), of_vllm("device_allocator.sleep_mode_backend").CuMemBackend()
    monkeypatch.setattr(
        of_vllm("device_allocator"), "get_mem_allocator_instance", lambda: allocator
    )
    backend.suspend(1)
    assert "weights" in allocator.offloaded
    backend.suspend(2)
    assert "weights" not in allocator.offloaded
    assert {"runtime", "cudagraph"} <= set(allocator.offloaded)  # graphs stay
    load = inspect.getsource(of_vllm("v1.worker.gpu_worker").Worker.load_model)
    assert '_maybe_get_memory_pool_context(tag="weights")' in load


def test_at_the_second_level_workers_bring_buffers_back_and_parameters_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_of = of_vllm("v1.worker.gpu_worker").Worker
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 1))
    model = torch.nn.Linear(2, 2)
    model.register_buffer("scales", torch.ones(3), persistent=False)

    def discard(level: int) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(float("nan"))

    worker = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        sleep_mode_backend=SimpleNamespace(suspend=discard, resume=lambda tags: None),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        model_config=SimpleNamespace(sleep_preserve_parameter_names=None),
        get_draft_model=lambda: None,
        synchronize_device=lambda: None,
        _sleep_saved_draft_buffers={},
    )
    for name in ("_save_sleep_parameters", "_restore_sleep_parameters", "_get_sleep_parameters"):
        setattr(worker, name, partial(getattr(worker_of, name), worker))
    worker_of.sleep(worker, 2)
    worker_of.wake_up(worker, ["weights"])
    assert torch.equal(cast("Any", model).scales, torch.ones(3))
    assert all(weight.isnan().all() for weight in model.parameters())


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "moe_intermediate_size": 64,
}


OF_LAYERS = ("vllm.model_executor", "vllm.v1.attention")
"""Where classes are defined whose objects a model is made of."""


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or type(value).__module__.startswith(OF_LAYERS)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model: parameters, buffers, and those that are neither."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def look(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, list | tuple):
            for number, item in enumerate(cast("list[Any]", value)):
                look(f"{name}.{number}", item)
        elif isinstance(value, dict):
            for key, item in cast("dict[Any, Any]", value).items():
                look(f"{name}.{key}", item)
        elif _is_part(value) and id(value) not in seen:
            seen.add(id(value))
            for key, item in getattr(value, "__dict__", {}).items():
                look(f"{name}.{key}", item)

    look("", model)
    return {name: tensor for name, tensor in found.items() if tensor.numel()}


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-8B", "Llama-3.1-8B", "Qwen3-30B-A3B"])
def test_a_new_version_brings_back_all_that_the_second_level_discards(
    name: str, one_worker: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of these models is neither a parameter that is loaded nor a buffer."""
    from tinkermq.actors.engine.vllm.transfer import MemoryTransferEngine
    from tinkermq.actors.engine.vllm.vllm_engine import update_of_file
    from tinkermq.actors.engine.vllm.weight_files import WeightFiles

    vllm_of, loading = of_vllm("config"), of_vllm("model_executor.model_loader")
    fields = {**CONFIGS[name], **SMALL}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    published = policy_tensors(AutoModelForCausalLM.from_pretrained(tmp_path))
    once = {key: value.detach() for key, value in published.items() if key != "lm_head.weight"}
    if not config.tie_word_embeddings:
        once["lm_head.weight"] = published["lm_head.weight"].detach()
    files = WeightFiles()
    written, entries = files.write_model(0, {key: value.float() for key, value in once.items()})
    update = update_of_file(Path(shutil.copy(written, tmp_path / "payload")), entries)
    files.close()
    model_config = vllm_of.ModelConfig(
        model=str(tmp_path), skip_tokenizer_init=True, dtype="float32"
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none
    layers = of_vllm("model_executor.layers.utils")  # as on a GPU: weights are not packed
    monkeypatch.setattr(layers, "check_cpu_sgl_kernel", lambda *_: False)
    monkeypatch.setattr(layers.ops, "_supports_onednn", False)
    vllm_config = vllm_of.VllmConfig(model_config=model_config)
    with vllm_of.set_current_vllm_config(vllm_config):
        model = loading.get_model(vllm_config=vllm_config)
        engine = MemoryTransferEngine(
            vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), model
        )
        engine.start_weight_update()
        engine.update_weights(update)
        engine.finish_weight_update()
        assert engine.outcome == ("done", "")
        assert engine.replaces_all
        before = {key: value.clone() for key, value in tensors_of(model).items()}
        buffers = {value.data_ptr() for value in model.buffers()}
        discarded = 0
        for value in tensors_of(model).values():
            if value.is_floating_point() and value.data_ptr() not in buffers:
                value.data.fill_(float("nan"))
                discarded += value.numel()
        assert discarded >= sum(value.numel() for value in once.values() if value.ndim < 3)
        engine.start_weight_update()
        engine.update_weights(update)
        engine.finish_weight_update()
    after = tensors_of(model)
    assert after.keys() == before.keys()
    different = [key for key in after if not torch.equal(after[key], before[key])]
    assert different == []


def test_a_version_without_a_parameter_of_the_model_does_not_replace_all(
    one_worker: None,
) -> None:
    from tinkermq.actors.engine.vllm.transfer import MemoryTransferEngine

    class Partly(torch.nn.Linear):
        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, _ in weights if name == "weight"}

    engine = MemoryTransferEngine.__new__(MemoryTransferEngine)
    vars(engine).update(
        model=Partly(2, 2), model_config=None, device=torch.device("meta"), outcome=("done", "")
    )
    engine.start_weight_update()
    assembler = SimpleNamespace(add=lambda part: [("weight", part)])
    engine._load(cast("Any", assembler), torch.ones(2, 2))
    engine.finish_weight_update()
    assert not engine.replaces_all
