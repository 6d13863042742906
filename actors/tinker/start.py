"""Start the trainer of a Tinker service: load its base model, then serve."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...schemas.config.job import JobConfig, ModelConfig
from ...schemas.tinker.operation import ModelInfo
from ..models.devices import own_device
from ..models.model_folder import load_causal_lm, load_tokenizer
from ..runtime import JobContext, settle_memory
from .applying import Applying
from .checkpoints.kept import KeptByTrainer
from .service import TrainerService
from .states import STATES, States
from .training.trainer import AdapterTrainer

_NO_CONTEXT = 4096


async def run_trainer(context: JobContext) -> None:
    """Serve until told to stop."""
    await context.serve_control()
    config = context.config
    folder = config.model.path
    about = await asyncio.to_thread(_about, config.model)
    adapters = await asyncio.to_thread(_open, context)
    name = config.tinker.base
    base = ModelInfo(model="-", base=name, folder=folder, arch=str(about.model_type), rank=1)
    folder_of_states = context.run_dir / STATES
    states = States(folder_of_states)
    kept = KeptByTrainer(folder_of_states, max_bytes=config.tinker.checkpoint_mb << 20)
    applying = Applying(adapters, states, kept, base)
    settle_memory()
    await context.event("trainer_ready", f"{name} can be trained", base=name)
    await TrainerService(context, adapters, applying, states, kept).run()


@dataclass(frozen=True)
class SharedModel:
    """A base model in memory, and what is to be known of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocab: int
    max_context: int


def open_base(config: JobConfig) -> SharedModel:
    """Load the base model for engines that share it; raises ModelError."""
    path, about = config.model.path, _about(config.model)
    model = load_causal_lm(
        path,
        dtype=getattr(torch, config.generator.dtype),
        attn_implementation="eager",
        trust_remote_code=config.model.trust_remote_code,
    ).requires_grad_(False)
    torch.nn.Module.to(model, own_device())
    tokenizer = load_tokenizer(
        config.model.tokenizer or path, trust_remote_code=config.model.trust_remote_code
    )
    return SharedModel(model, tokenizer, int(about.vocab_size), _context(config, about))


def _context(config: JobConfig, about: Any) -> int:
    """Return the longest sequence, in tokens."""
    longest = int(getattr(about, "max_position_embeddings", _NO_CONTEXT))
    return min(config.generator.max_context or longest, longest)


def _about(model: ModelConfig) -> Any:
    """Return the configuration of a model's text part."""
    read = cast(Any, AutoConfig).from_pretrained
    return read(model.path, trust_remote_code=model.trust_remote_code).get_text_config()


def _open(context: JobContext) -> AdapterTrainer:
    """Load the base model; raises ModelError."""
    config = context.config
    return AdapterTrainer.open(
        config.model.path,
        base_model=config.tinker.base,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        device=own_device(),
        microbatch_tokens=config.tinker.micro_batch_tokens,
        max_rank=config.tinker.max_rank,
    )
