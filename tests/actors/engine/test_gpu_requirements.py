"""What an engine refuses of a GPU and of installed packages, and what it asks vLLM for.

The functions of vLLM that decide are called themselves where it is installed; no GPU is needed.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinkermq.actors.engine.gpu_requirements import (
    GpuState,
    check_instances,
    check_kernels,
    check_versions,
    installed_versions,
    lack_of_memory,
    read_own_gpu,
    start_beside_others,
)
from tinkermq.actors.rollout.players import settled_for_gpu
from tinkermq.schemas.config.job import GeneratorConfig, JobConfig
from tinkermq.schemas.plan.memory import VLLM_SHARE
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.nvml import MigNvml, Nvml

GIB = 1 << 30
H100 = GpuState("NVIDIA H100", "GPU-1", 80 * GIB, 79 * GIB, (9, 0))
A100 = replace(H100, model="NVIDIA A100", capability=(8, 0))
L4 = replace(H100, model="NVIDIA L4", capability=(8, 9))
FP8 = "generator.quantization=fp8 needs a GPU of compute capability 8.9, and "


def vllm(**keys: Any) -> GeneratorConfig:
    """Return the section of a generator with vLLM."""
    return GeneratorConfig(engine="vllm", **keys)


def test_a_process_knows_the_first_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", Nvml().nvmlDeviceGetUUID(3))
    card = read_own_gpu(Nvml)
    assert card is not None
    assert (card.total_bytes, card.free_bytes) == (141 * GIB, 138 * GIB)
    assert (card.capability, card.is_instance) == ((9, 0), False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-102-c2b1")
    instance = read_own_gpu(MigNvml)
    assert instance is not None
    assert (instance.total_bytes, instance.is_instance) == (35 * GIB, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_own_gpu(Nvml) is None


def test_an_engine_starts_with_keys_that_are_chosen_for_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver is asked which GPU it is, without torch, which would take memory of it."""
    tree: dict[str, Any] = {"model": {"path": "Qwen/Qwen2.5-1.5B"}, "env": {"game": "g"}}
    config = JobConfig.model_validate({**tree, "generator": {"engine": "vllm"}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", Nvml().nvmlDeviceGetUUID(1))
    generator = settled_for_gpu(config, load=Nvml).generator
    assert (generator.max_requests, generator.max_batched_tokens) == (256, 16384)
    assert generator.memory_share == VLLM_SHARE
    served = settled_for_gpu(config, serves=True, load=Nvml).generator
    assert served.max_requests == 1024
    keys = {"engine": "vllm", "max_requests": 5, "memory_share": 0.3}
    of_user = JobConfig.model_validate({**tree, "generator": keys})
    generator = settled_for_gpu(of_user, load=Nvml).generator
    assert (generator.max_requests, generator.memory_share) == (5, 0.3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert settled_for_gpu(config, load=Nvml) is config


@pytest.mark.parametrize(
    ("keys", "card", "message"),
    [
        ({"quantization": "fp8"}, A100, FP8 + r"NVIDIA A100 \(GPU-1\) has 8.0"),
        ({"kv_cache_dtype": "fp8"}, A100, "generator.kv_cache_dtype=fp8 needs a GPU"),
        ({"quantization": "fp8"}, None, FP8 + "the CPU has none"),
        (
            {"batch_invariant": True},
            replace(A100, capability=(7, 5)),
            "generator.batch_invariant=true needs a GPU of compute capability 8.0",
        ),
    ],
)
def test_keys_whose_kernels_a_card_lacks_are_refused(
    keys: dict[str, Any], card: GpuState | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_kernels(vllm(**keys), card)


@pytest.mark.parametrize("card", [H100, L4])
def test_newer_cards_have_all_kernels(card: GpuState) -> None:
    check_kernels(vllm(quantization="fp8", kv_cache_dtype="fp8", batch_invariant=True), card)
    check_kernels(vllm(), A100)


def test_an_engine_over_several_instances_of_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel=2, .* is a MIG instance"):
        check_instances(vllm(tensor_parallel=2, slots=2), replace(H100, is_instance=True))
    check_instances(vllm(tensor_parallel=2, slots=2), H100)
    check_instances(vllm(), replace(H100, is_instance=True))


def test_two_jobs_on_one_card_without_shares_are_refused() -> None:
    taken = replace(H100, free_bytes=6 * GIB)  # another engine holds the rest
    error = lack_of_memory(taken, 0.92)
    assert error is not None
    assert str(error).startswith(
        "NVIDIA H100 (GPU-1) has 6.0 of 80.0 GiB free, and the engine needs 73.6 (a share of "
        "0.92): other processes hold the rest"
    )
    assert "set generator.memory_share to 0.07 or less" in error.hint
    assert error.may_pass  # a process that has just ended may hold it still
    assert lack_of_memory(taken, 0.07) is None


def test_versions_that_do_not_belong_together_are_refused() -> None:
    check_versions({})
    check_versions({"torch": "2.11.0"})
    check_versions({"vllm": "0.32.0", "torch": "2.13.0+cpu", "wanted": "2.13.0"})
    with pytest.raises(
        ConfigError,
        match=r"vLLM 0.32.0 is built for torch 2.13.0, and torch 2.12.1.cu128 is installed",
    ):
        check_versions({"vllm": "0.32.0", "torch": "2.12.1+cu128", "wanted": "2.13.0"})
    with pytest.raises(ConfigError, match=r"vLLM 0.31.1 is installed here, and .* 0.32.x"):
        check_versions({"vllm": "0.31.1", "torch": "2.13.0", "wanted": "2.13.0"})


# -- what vLLM itself says -------------------------------------------------------------------------


@pytest.mark.vllm
def test_the_installed_vllm_and_torch_belong_together() -> None:
    installed = installed_versions()
    assert installed["wanted"] == "2.13.0"
    check_versions(installed)


@pytest.mark.vllm
def test_all_that_vllm_is_given_has_a_place_there(tmp_path: Path) -> None:
    from tinkermq.actors.engine.engine import Sampling
    from tinkermq.actors.engine.vllm.model import engine_arguments
    from tinkermq.actors.engine.vllm.request import parameters_of

    known = inspect.signature(vllm_part("AsyncEngineArgs")).parameters
    config = vllm(quantization="fp8", kv_cache_dtype="fp8", sleep="always")
    for sees, ranks in ((False, []), (True, [8])):
        given = engine_arguments(str(tmp_path), config, 64, False, ranks, sees)
        assert set(given) <= set(known)
    sampling = Sampling(9, stream_every=4)
    kind = vllm_part("sampling_params:RequestOutputKind").DELTA
    parameters: Any = parameters_of(sampling, 3, kind, "key")
    assert (parameters.stream_interval, parameters.seed) == (4, 3)
    for method, names in {
        "sleep": {"level", "mode"},
        "wake_up": {"tags"},
        "pause_generation": {"mode", "clear_cache"},
        "from_engine_args": {"engine_args", "usage_context", "stat_loggers"},
    }.items():
        function = getattr(vllm_part("v1.engine.async_llm:AsyncLLM"), method)
        assert names <= set(inspect.signature(function).parameters)


@pytest.mark.vllm
def test_what_sleeps_in_vllm_is_what_is_woken() -> None:
    from tinkermq.actors.engine.vllm import model

    assert set(model._MEMORY) == set(vllm_part("v1.executor.abstract:SLEEP_TAGS"))


@pytest.mark.vllm
def test_batches_are_as_large_as_vllm_chooses_for_the_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinkermq.actors.engine.vllm.model import engine_arguments

    given = engine_arguments(str(tmp_path), vllm(), 64, False, [], False)
    assert given["max_num_seqs"] is None
    assert given["max_num_batched_tokens"] is None
    platform = type(vllm_part("platforms:current_platform"))
    monkeypatch.setattr(platform, "get_device_name", lambda *_: "NVIDIA H100")
    monkeypatch.setattr(platform, "get_device_total_memory", lambda *_: 80 * GIB)
    monkeypatch.setattr(platform, "is_cpu", lambda *_: False)
    tokens, sequences = vllm_part("AsyncEngineArgs").get_batch_defaults(1)
    offline = vllm_part("usage.usage_lib:UsageContext").LLM_CLASS
    assert (tokens[offline], sequences[offline]) == (16384, 1024)


@pytest.mark.vllm
def test_several_engines_of_a_generator_start_on_one_gpu(tmp_path: Path) -> None:
    from tinkermq.actors.engine.vllm.model import engine_arguments

    total, taken = 80 * GIB, GIB // 2
    for number in (1, 2, 4):
        given = engine_arguments(
            str(tmp_path), vllm(kv_cache_mb=2048), 64, False, [], False, num_engines=number
        )
        free = total - taken
        for _ in range(number):  # each finds what those before it have left
            requested = ask(total, free, given["gpu_memory_utilization"])
            free -= requested
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        ask(total, total // 4, 0.92)
    assert lack_of_memory(replace(H100, free_bytes=total // 4), 0.92) is not None


@pytest.mark.vllm
def test_an_engine_beside_a_learner_asks_for_its_share_alone(tmp_path: Path) -> None:
    from tinkermq.actors.engine.vllm.model import engine_arguments

    given = engine_arguments(str(tmp_path), vllm(memory_share=0.4), 64, False, [], False)
    requested = ask(80 * GIB, 40 * GIB, given["gpu_memory_utilization"])
    assert requested == pytest.approx(32 * GIB, rel=1e-6)


def vllm_part(place: str) -> Any:
    """Return something of vLLM, `module:name`; not all of it is described to the type checker."""
    module, _, name = place.rpartition(":")
    return getattr(import_module(f"vllm.{module}" if module else "vllm"), name)


def ask(total: int, free: int, share: float) -> int:
    """Return what vLLM asks for on a GPU with so much free."""
    request_memory = vllm_part("v1.worker.utils:request_memory")
    snapshot = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    return int(request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=share)))


def starts(*outcomes: str | Exception) -> Callable[[], str]:
    """Return what starts an engine with one outcome after the other."""
    left = list(outcomes)

    def start() -> str:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return start


def free(*gib: int) -> Callable[[], GpuState]:
    """Return what reads a GPU that has these amounts free, one after the other."""
    left = list(gib)
    return lambda: replace(H100, free_bytes=left.pop(0) * GIB)


async def test_an_engine_starts_again_if_others_gave_memory_back_meanwhile() -> None:
    failed = RuntimeError("Engine core initialization failed")
    assert await start_beside_others(starts(failed, "up"), free(60, 64, 64)) == "up"
    with pytest.raises(RuntimeError, match="initialization failed"):
        await start_beside_others(starts(failed, "never"), free(60, 60))
    with pytest.raises(RuntimeError, match="initialization failed"):
        await start_beside_others(starts(failed, failed, failed), free(60, 61, 61, 62, 62, 63))
    with pytest.raises(ValueError, match="no such key"):
        await start_beside_others(starts(ValueError("no such key")), free(60, 64))
