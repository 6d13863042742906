"""Data for trainers of the Tinker API, and the plain step in PyTorch and PEFT beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, Datum
from torch import Tensor
from transformers import AutoModelForCausalLM

VOCAB = 264
BASE = "tiny"
TIED = "ignore:Model has `tie_word_embeddings"
"""PEFT's warning about merging an adapter of a tied output layer, which nobody does here."""
PlainLoss = Callable[[Tensor, dict[str, Tensor]], Tensor]


def open_trainer(folder: Path, **options: Any) -> AdapterTrainer:
    """Open a trainer on a tiny model."""
    return AdapterTrainer.open(str(folder), base_model=BASE, **options)


def random_tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    """Return some tokens of the tiny model."""
    return rng.integers(8, VOCAB, length).astype(np.int32)


def datum(tokens: np.ndarray, targets: np.ndarray, **inputs: np.ndarray) -> Datum:
    """Return a datum with its inputs as they come off the wire."""
    floats = {name: value.astype(np.float32) for name, value in inputs.items()}
    return Datum(tokens, {"target_tokens": targets.astype(np.int64), **floats})


def supervised(rng: np.random.Generator, length: int, most: int = 0) -> Datum:
    """Return a datum for cross_entropy with signed weights, some of them 0; [T, most] if told."""
    shape = (length, most) if most else (length,)
    weights = rng.normal(size=shape) * (rng.random(shape) < 0.7)
    return datum(random_tokens(rng, length), rng.integers(0, VOCAB, shape), weights=weights)


def sampled(rng: np.random.Generator, prompt: np.ndarray, length: int) -> Datum:
    """Return a datum for the losses of RL: no advantages in the prompt, log-probs near the model's.

    The model is a fresh one, whose log-probs are all about log(1 / VOCAB).
    """
    tokens = np.concatenate([prompt, random_tokens(rng, length)])
    places = np.arange(len(tokens) - 1)
    answer = places >= len(prompt) - 1
    near = -np.log(VOCAB) + 0.3 * rng.normal(size=len(places))
    return datum(
        tokens[:-1],
        tokens[1:],
        logprobs=np.where(answer, near, 0.0),
        advantages=np.where(answer, rng.normal(), 0.0),
    )


def group(seed: int, prompts: int = 2, answers: int = 3) -> list[Datum]:
    """Return groups of datums that share their prompts."""
    rng = np.random.default_rng(seed)
    starts = [random_tokens(rng, int(rng.integers(3, 20))) for _ in range(prompts)]
    return [
        sampled(rng, start, int(rng.integers(2, 12))) for start in starts for _ in range(answers)
    ]


class PlainPeft:
    """An adapter that PEFT opened, trained by torch.optim.AdamW, one datum after the other."""

    def __init__(self, base: Path, adapter: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained)

    def forward_backward(self, data: Sequence[Datum], loss: PlainLoss) -> list[np.ndarray]:
        """Add gradients; return the log-probs."""
        found: list[np.ndarray] = []
        for one in data:
            inputs = {name: torch.from_numpy(value) for name, value in one.inputs.items()}
            targets = inputs.pop("target_tokens")
            ids = torch.from_numpy(one.tokens.astype(np.int64))[None]
            logprobs = self.model(input_ids=ids).logits[0].log_softmax(-1)
            picked = logprobs.gather(1, targets.view(len(one.tokens), -1)).view(targets.shape)
            loss(picked, inputs).backward()
            found.append(picked.detach().numpy())
        return found

    def optim_step(self, params: AdamParams) -> float:
        """Make one update; return the norm of the gradient."""
        clip = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.trained, clip)
        self.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapter by the names that it has in its folder."""
        return {
            name.replace(".default.", "."): value.detach()
            for name, value in self.model.named_parameters()
            if ".lora_" in name
        }


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Say whether two adapters are the same."""
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
