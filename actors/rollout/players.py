"""The engines of a process and the agent loops that play with them, by policy."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import structlog

from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LoraConfig
from ...schemas.plan.cards import card_like
from ...schemas.plan.settings import with_engine_settings
from ...schemas.profile import TimeUse
from ...schemas.wire.errors import ConfigError
from ..engine.engine import Engine
from ..engine.gpu_requirements import check_versions, installed_versions, read_own_gpu
from ..engine.transformers.decoder import try_before_loading
from ..engine.transformers.transformers_engine import TransformersEngine
from ..gpus import load_nvml
from ..policy.chat import ChatTokenizer
from ..policy.devices import bound_memory, own_device, own_dtype
from ..policy.model_folder import fetch_configs, load_causal_lm, load_model_config
from ..policy.policies import MAIN, policy_config, policy_names
from ..storage.adapters import base_of, is_adapter
from .agent_loop import AgentLoop, EpisodeSampling, PromptForTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..engine.vllm.model import VllmModel

_log = structlog.get_logger()
Base: TypeAlias = "PreTrainedModel | VllmModel"
"""A model in memory that several engines share, each with its own adapter."""


def settled_for_gpu(
    config: JobConfig, *, serves: bool = False, load: Callable[[], Any | None] = load_nvml
) -> JobConfig:
    """Return a configuration with engine keys for this process's GPU, as a plan chooses; blocks.

    Keys that are set are kept. On a CPU and for an unknown model no key is changed, and
    `GeneratorConfig.num_requests` and vLLM choose the values. `serves`: requests come from clients.
    """
    # read from the driver, since torch would take GPU memory in this process, besides vLLM's
    gpu = read_own_gpu(load)
    if gpu is None:
        return config
    fetch_configs(config)
    card = card_like(gpu.model, gpu.total_bytes)
    settled = with_engine_settings(config, card, serves=serves)
    if settled != config:
        keys = ("max_requests", "max_batched_tokens", "memory_share")
        chosen = {key: getattr(settled.generator, key) for key in keys}
        _log.info("engine_settings_chosen", gpu=card.name, **chosen)
    return settled


async def start_engine(config: JobConfig, version: int = 0, base: "Base | None" = None) -> Engine:
    """Start the configured engine with the weights of `version`.

    With a `base` of `load_base`, it shares that model and adds the configured adapter. Raises
    ConfigError if the engine is not installed.
    """
    config = await asyncio.to_thread(settled_for_gpu, config)
    max_waiting = 4 * config.generator.max_episodes
    if config.generator.engine == "vllm":
        _check_vllm()
        from ..engine.vllm.vllm_engine import start_vllm

        in_vllm = cast("VllmModel | None", base)
        return await start_vllm(config, version, in_vllm, max_waiting=max_waiting)
    device = own_device()
    bound_memory(device, config.generator.memory_share)
    return await TransformersEngine.start(
        config.model.path,
        max_slots=config.generator.num_requests,
        max_context=config.generator.max_context or config.rollout.max_tokens,
        dtype=own_dtype(config.generator.dtype),
        device=str(device),
        trust_remote_code=config.model.trust_remote_code,
        lora=config.lora,
        base=cast("PreTrainedModel | None", base),
        version=version,
        max_waiting=max_waiting,
        record_experts=config.algorithm.router_replay,
    )


async def start_engines(config: JobConfig) -> dict[str, Engine]:
    """Start one engine for each policy of a job; see `start_engine`."""
    engines: dict[str, Engine] = {}
    async with contextlib.AsyncExitStack() as undone:
        for name in policy_names(config):
            engines[name] = await start_engine(policy_config(config, name))
            undone.push_async_callback(engines[name].close)
        undone.pop_all()
    return engines


async def load_base(config: JobConfig, adapters: Sequence[LoraConfig]) -> Base:
    """Load the configured model for engines that share it, one for each of `adapters`."""
    config = await asyncio.to_thread(settled_for_gpu, config)
    if config.generator.engine == "vllm":
        _check_vllm()
        from ..engine.vllm.vllm_engine import open_vllm

        return await open_vllm(config, adapters)
    return await asyncio.to_thread(_load_frozen, config)


def _load_frozen(config: JobConfig) -> "PreTrainedModel":
    import torch

    path, trusted = config.model.path, config.model.trust_remote_code
    path = base_of(path) if is_adapter(path) else path
    try_before_loading(path, load_model_config(path, trust_remote_code=trusted))
    model = load_causal_lm(
        path,
        dtype=getattr(torch, own_dtype(config.generator.dtype)),
        attn_implementation="eager",
        trust_remote_code=trusted,
    )
    frozen = model.requires_grad_(False)
    torch.nn.Module.to(frozen, own_device())  # once for all engines that share it
    return frozen


def _check_vllm() -> None:
    check_versions(installed_versions())
    try:
        import vllm.v1.engine.async_llm  # noqa: F401  # pyright: ignore[reportUnusedImport, reportMissingModuleSource]
    except (ImportError, OSError, RuntimeError) as error:  # a library of vLLM does not match torch
        raise ConfigError(
            f"generator.engine is vllm, which cannot be imported on this machine: {error}",
            hint="install it where the pool's generators run (`pip install 'tinkermq[vllm]'`, see "
            "docs/engines.md), or set generator.engine=transformers",
        ) from error


class Players:
    """One engine and one agent loop for each policy of a job."""

    def __init__(self, engines: dict[str, Engine], loops: dict[str, AgentLoop]) -> None:
        self.engines = engines
        self._loops = loops

    @classmethod
    async def start(
        cls,
        config: JobConfig,
        chat: ChatTokenizer,
        environments: Environments,
        sampling: EpisodeSampling,
        time_use: TimeUse | None = None,
        prompt_for_teacher: PromptForTeacher | None = None,
    ) -> "Players":
        """Start the engines; `time_use` records what the episodes wait for, `prompt_for_teacher`
        renders teachers' prompts."""
        return cls.of_engines(
            await start_engines(config),
            config,
            chat,
            environments,
            sampling,
            time_use,
            prompt_for_teacher,
        )

    @classmethod
    def of_engines(
        cls,
        engines: dict[str, Engine],
        config: JobConfig,
        chat: ChatTokenizer,
        environments: Environments,
        sampling: EpisodeSampling,
        time_use: TimeUse | None = None,
        prompt_for_teacher: PromptForTeacher | None = None,
    ) -> "Players":
        """Play with started engines; see `start`."""
        loops = {
            name: AgentLoop(
                engine, chat, environments, config.rollout, sampling, time_use, prompt_for_teacher
            )
            for name, engine in engines.items()
        }
        return cls(engines, loops)

    @property
    def main(self) -> AgentLoop:
        """The loop of the main policy."""
        return self._loops[MAIN]

    def of(self, roles: Iterable[str]) -> dict[str, AgentLoop]:
        """Return the loop of each role: that of its own policy, or the main one."""
        return {role: self._loops.get(role, self.main) for role in roles}

    def check_engines(self) -> None:
        """Raise the failure of an engine, if there is one, since then no episode can succeed."""
        for loop in self._loops.values():
            loop.check_engine()

    async def close(self) -> None:
        """End the engines."""
        for engine in self.engines.values():
            await engine.close()
