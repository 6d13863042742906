"""Tiny real models for tests, and the plain forward pass that engines are compared with."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_policy
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, TinyKind, save_tiny_model
from tinkermq.actors.weights.tensors import TensorBytes, TensorSource
from tinkermq.schemas.config.sections import LoraConfig
from torch import nn
from transformers import PreTrainedModel

from tests.support.waiting import PATIENCE_S

HERMES = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' + (message['content'] or '')"
    ' }}{%- for call in message.tool_calls or [] -%}{{- \'<tool_call>\\n{"name": "\' +'
    ' call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) +'
    " '}\\n</tool_call>' }}{%- endfor -%}{{ '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""A chat template of the tiny models that writes calls as Hermes models do."""


FORGETS_REASONING = CHAT_TEMPLATE.replace(
    "{{ '<|assistant|>' }}", "{{ '<|assistant|><think>' }}"
).replace("message['content']", "message['content'].split('</think>')[-1]")
"""It opens the reasoning in the prompt, and leaves it out of the history."""


def make_tiny_model(
    folder: str | Path,
    kind: TinyKind = "qwen3",
    vocab: Literal["chars"] = "chars",
    *,
    heads: int = 4,
    kv_heads: int | None = None,
) -> Path:
    """Write a model of 2 layers and width 64 with grouped key-value heads; return its folder."""
    assert vocab == "chars"
    return save_tiny_model(
        folder,
        kind=kind,
        width=64,
        layers=2,
        heads=heads,
        kv_heads=kv_heads or heads // 2,
        seed=1,
    )


def random_prompt(rng: np.random.Generator, longest: int = 40) -> np.ndarray:
    """Return a prompt of 1 to `longest` - 1 characters."""
    return rng.integers(8, 264, int(rng.integers(1, longest))).astype(np.int32)


def plain_logprobs(
    model: PreTrainedModel, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return the log-prob of each token after the prompt, by one forward pass over all."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = (model(ids).logits[0] / temperature).log_softmax(-1)
    picked = logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
    return picked[:, 0].numpy()


def adapted(folder: Path, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """Return the model with an adapter that changes what it says."""
    model = load_policy(str(folder), lora, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy_tensors(model).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def changed(model: PreTrainedModel, seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """Return the model's weights with noise, each tied tensor once."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + scale * torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }


def loaded(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return another model of the same shape with these weights."""
    other = type(model)(model.config).eval()
    other.load_state_dict(weights, strict=False)
    return other


async def until(condition: Callable[[], bool], deadline_s: float = PATIENCE_S) -> None:
    """Wait for something another thread does."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # the other thread has no event to wait for
            await asyncio.sleep(0.001)


def gradients_of(model: nn.Module) -> torch.Tensor:
    """Return the gradients of all weights, one behind the other."""
    found: list[torch.Tensor] = []
    for weight in model.parameters():
        assert weight.grad is not None
        found.append(weight.grad.flatten())
    return torch.cat(found)


def bytes_of(tensor: TensorSource) -> bytes:
    """Return the bytes of a tensor that is in this machine's memory."""
    assert isinstance(tensor, TensorBytes)
    return bytes(tensor.data)
