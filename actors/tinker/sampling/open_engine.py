"""Start the engine of a sampler: the base model, with room for adapters beside it."""

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from ....schemas.config.job import JobConfig
from ....schemas.config.lora import LoraConfig
from ...generator.engine.engine import AdapterEngine
from ...generator.episodes.players import load_base, start_engine
from ...models.model_folder import load_model_config, load_tokenizer

_NO_CONTEXT = 4096


@dataclass(frozen=True)
class SampledBase:
    """A base model in an engine, and what is to be known of it."""

    engine: AdapterEngine
    tokenizer: PreTrainedTokenizerBase
    vocab: int
    max_context: int


async def open_engine(config: JobConfig) -> SampledBase:
    """Load the base model into the engine that is configured; raises ModelError, ConfigError."""
    model = config.model
    about = await asyncio.to_thread(_about, config)
    longest = int(getattr(about, "max_position_embeddings", _NO_CONTEXT))
    context = min(config.generator.max_context or longest, longest)
    settled = config.generator.model_copy(update={"max_context": context})
    config = config.model_copy(update={"generator": settled})
    base = None
    if settled.engine == "vllm":  # it makes room for adapters when it starts
        room = LoraConfig(rank=config.tinker.max_rank)
        base = await load_base(config, [room] * config.tinker.sampled_at_once)
    engine = cast("AdapterEngine", await start_engine(config, base=base))
    tokenizer = await asyncio.to_thread(
        load_tokenizer, model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
    )
    return SampledBase(engine, tokenizer, int(about.vocab_size), context)


def _about(config: JobConfig) -> Any:
    """Return the configuration of the model's text part."""
    read = load_model_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return cast(Any, read).get_text_config()
