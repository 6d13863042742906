"""What checks compute with: a small random model, its learner, sequences of random tokens."""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...schemas.config.job import JobConfig
from ..learner.packing.micro_batch import TokenSequence
from ..learner.packing.packing import pack
from ..learner.training.model import Scorer, load_model
from ..learner.training.parallel import Parallel
from ..models.tiny_model import save_tiny_model
from .figures import Setting

MAX_TOKENS = 1024
"""Of one sequence."""
Attention = Literal["sdpa", "flash_attention_2"]


@dataclass(frozen=True)
class RandomPolicy:
    """A model that knows nothing, in a folder."""

    folder: Path
    vocab_size: int = 264

    @classmethod
    def make(cls, setting: Setting) -> "RandomPolicy":
        """Write one whose heads any attention kernel of the device takes."""
        width, layers, heads = (256, 4, 4) if setting.on_gpu else (64, 2, 2)
        folder = setting.folder / "model"
        save_tiny_model(folder, width=width, layers=layers, heads=heads, kv_heads=heads // 2)
        return cls(folder)

    def config(self, **sections: Mapping[str, Any]) -> JobConfig:
        """Return a job with this model; sections are laid over."""
        least = MAX_TOKENS // 2
        return JobConfig.model_validate(
            {
                "model": {"path": str(self.folder)},
                "env": {"game": "bandit"},
                "rollout": {
                    "max_prompt_tokens": 64,
                    "max_turn_tokens": least,
                    "max_response_tokens": least,
                },
                **sections,
            }
        )

    def learner(self, dtype: str, attention: Attention = "sdpa") -> "ScoringLearner":
        """Load it as a learner does, on this process's device."""
        model = {"path": str(self.folder), "attn_implementation": attention}
        config = self.config(model=model, learner={"dtype": dtype})
        loaded = load_model(config.model, config.learner)
        inside = Parallel.alone().place(loaded, config.learner)
        return ScoringLearner(loaded, Scorer(loaded, temperature=1.0, dtype=dtype, inside=inside))


class ScoringLearner:
    """A learner's model that only says what it thinks of tokens."""

    def __init__(self, model: PreTrainedModel, scorer: Scorer) -> None:
        self.model = model
        self._scorer = scorer

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Return float32[N] on the CPU: of all generated tokens, in the order of the batch."""
        counts = [int(one.mask.sum()) for one in sequences]
        found_N = torch.zeros(sum(counts))
        for packed in pack(sequences, row_tokens=MAX_TOKENS, microbatch_tokens=4 * MAX_TOKENS):
            score_N = self._scorer.score(packed).logprobs_N.float().cpu()
            found_N = found_N.index_copy(0, packed.index_N.cpu(), score_N)
        return found_N

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights, by their names of `state_dict()`."""
        self.model.load_state_dict(dict(weights), strict=False)

    def changed(self, seed: int) -> dict[str, Tensor]:
        """Return its weights with noise, on the CPU, each tied tensor once."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: value.cpu() + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in self.model.state_dict().items()
            if name != "lm_head.weight"
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
