"""Start the trainer of a Tinker service: load its base model, then serve."""

import asyncio
from functools import partial
from typing import Any, cast

from transformers import AutoConfig

from ...schemas.config.job import JobConfig, ModelConfig
from ...schemas.tinker.operation import ModelInfo
from ..learner.training.parallel import once_in_torch
from ..models.devices import own_device
from ..runtime import JobContext, settle_memory
from .applying import Applying
from .checkpoints.kept import KeptByTrainer
from .service import TrainerService
from .states import STATES, States
from .training.trainer import AdapterTrainer


async def run_trainer(context: JobContext) -> None:
    """Serve until told to stop."""
    await context.serve_control()
    config = context.config
    base = await asyncio.to_thread(base_info, config)
    adapters = await once_in_torch(config.learner.threads, partial(open_trainer, config))
    name = base.base
    folder_of_states = context.run_dir / STATES
    states = States(folder_of_states)
    kept = KeptByTrainer(folder_of_states, max_bytes=config.tinker.checkpoint_mb << 20)
    applying = Applying(adapters, states, kept, base)
    settle_memory()
    await context.event("trainer_ready", f"{name} can be trained", base=name)
    await TrainerService(context, adapters, applying, states, kept).run()


def _about(model: ModelConfig) -> Any:
    """Return the configuration of a model's text part."""
    read = cast(Any, AutoConfig).from_pretrained
    return read(model.path, trust_remote_code=model.trust_remote_code).get_text_config()


def base_info(config: JobConfig) -> ModelInfo:
    """Return what is told of each model of a service, as of its base."""
    arch, folder = str(_about(config.model).model_type), config.model.path
    return ModelInfo(model="-", base=config.tinker.base, folder=folder, arch=arch, rank=1)


def open_trainer(config: JobConfig) -> AdapterTrainer:
    """Load the base model of a service; raises ModelError."""
    return AdapterTrainer.open(
        config.model.path,
        base_model=config.tinker.base,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        device=own_device(),
        microbatch_tokens=config.tinker.micro_batch_tokens,
        max_rank=config.tinker.max_rank,
        mixed=config.tinker.mixed_micro_batches,
    )
