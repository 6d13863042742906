"""What the tests of GPUs compute with: a small random model, its learner, random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tinkermq.actors.policy.devices import own_device
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.actors.training.micro_batch import MicroBatch, TokenSequence
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.cards import card_like
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.learner_step import matrix_rate, timed

MAX_TOKENS = 1024
"""Of one sequence."""
Attention = Literal["sdpa", "varlen", "flash_attention_2"]


@dataclass(frozen=True)
class RandomPolicy:
    """A model with random weights, in a folder."""

    folder: Path
    dtype: str
    """bfloat16 on a GPU, else float32."""
    vocab_size: int = 264

    @classmethod
    def make(cls, folder: Path, *, on_gpu: bool) -> "RandomPolicy":
        """Write the model."""
        width, layers, heads = (256, 4, 4) if on_gpu else (64, 2, 2)
        save_tiny_model(folder, width=width, layers=layers, heads=heads, kv_heads=heads // 2)
        return cls(folder, "bfloat16" if on_gpu else "float32")

    def config(self, **sections: Mapping[str, Any]) -> JobConfig:
        """Return a job with this model; `sections` replace those of the job."""
        half = MAX_TOKENS // 2
        return JobConfig.model_validate(
            {
                "model": {"path": str(self.folder)},
                "env": {"game": "bandit"},
                "rollout": {
                    "max_prompt_tokens": 64,
                    "max_turn_tokens": half,
                    "max_response_tokens": half,
                },
                **sections,
            }
        )

    def learner(self, attention: Attention = "sdpa", lora_rank: int = 0) -> "ScoringLearner":
        """Load it as a learner does, on this process's device."""
        model = {"path": str(self.folder), "attn_implementation": attention}
        lora = {"rank": lora_rank}
        config = self.config(model=model, learner={"dtype": self.dtype}, lora=lora)
        loaded = load_model(config.model, config.learner, lora=config.lora)
        inside = Parallel.alone().place(loaded, config.learner, attention)
        scorer = Scorer(loaded, temperature=1.0, inside=inside)
        return ScoringLearner(loaded, scorer)


class ScoringLearner:
    """A learner's model that only computes log-probs."""

    def __init__(self, model: PreTrainedModel, scorer: Scorer) -> None:
        self.model = model
        self._scorer = scorer

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[TokenSequence], *, share_prompts: bool = False
    ) -> Tensor:
        """Return float32[N] on the CPU: of all generated tokens, in the order of the batch."""
        logprobs_N = torch.zeros(sum(int(one.mask.sum()) for one in sequences))
        for packed in _packed(sequences, share_prompts=share_prompts):
            score_N = self._scorer.score(packed).logprobs_N.float().cpu()
            logprobs_N = logprobs_N.index_copy(0, packed.index_N.cpu(), score_N)
        return logprobs_N

    def gradients(self, sequences: Sequence[TokenSequence]) -> dict[str, Tensor]:
        """Return the gradient of the sum of all log-probs, by weight."""
        for packed in _packed(sequences):
            self._scorer.score(packed).logprobs_N.sum().backward()
        return {
            name: weight.grad.float().cpu()
            for name, weight in self.model.named_parameters()
            if weight.grad is not None
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights, by their names of `weights`."""
        with torch.no_grad():
            for name, value in policy_tensors(self.model).items():
                if name in weights:
                    value.copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of its published weights on the CPU, each tied tensor once."""
        return {
            name: value.detach().cpu().clone()
            for name, value in policy_tensors(self.model).items()
            if name != "lm_head.weight"
        }


def _packed(sequences: Sequence[TokenSequence], *, share_prompts: bool = False) -> list[MicroBatch]:
    return pack(
        sequences,
        max_row_tokens=MAX_TOKENS,
        microbatch_tokens=4 * MAX_TOKENS,
        share_prompts=share_prompts,
    )


def with_noise(weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return weights with some noise added."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.05 * torch.randn(value.shape, generator=generator)
        for name, value in weights.items()
    }


def token_sequences(vocab_size: int, lengths: Sequence[int]) -> list[TokenSequence]:
    """Draw sequences of random tokens; an eighth of each is its prompt."""
    rng = np.random.default_rng(0)
    return [
        TokenSequence(
            rng.integers(8, vocab_size, length).astype(np.int64),
            (np.arange(length) >= max(1, length // 8)).astype(np.uint8),
        )
        for length in lengths
    ]


@dataclass(frozen=True)
class Peak:
    """What a device can do at most."""

    flops: float
    """Operations per second of matrices in the learner's dtype."""
    bandwidth: float
    """Bytes per second of its memory."""
    source: str

    @classmethod
    def of_device(cls, dtype: str, matrix_flops: float = 0.0) -> "Peak":
        """Return the data sheet's numbers; of a CPU or an unknown card, measured ones.

        `matrix_flops` is what a matrix product reaches, if that is measured already.
        """
        if torch.cuda.is_available():
            of_first = torch.cuda.get_device_properties(0)
            card = card_like(of_first.name, of_first.total_memory)
            flops = card.bfloat16_flops if dtype == "bfloat16" else card.tf32_flops
            if flops:
                return cls(flops, card.bandwidth, f"the data sheet of {card.name}")
        size = 8192 if torch.cuda.is_available() else 256
        return cls(matrix_flops or matrix_rate(dtype, size), copied_bytes_per_s(), "measured")


def copied_bytes_per_s() -> float:
    """Return the bytes per second that a copy of a large tensor reads and writes."""
    device = own_device()
    num_bytes = 1 << (30 if device.type == "cuda" else 26)
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in "ab")

    def copy(_: int) -> None:
        target.copy_(source)

    return 2 * num_bytes / timed(copy, 3, device).seconds
