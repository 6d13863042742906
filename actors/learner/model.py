"""The model that learns: loading it, and the log-probs of generated tokens.

Shape letters: B rows, T columns of a row, N generated tokens, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...schemas.config import LearnerConfig, ModelConfig
from ...schemas.errors import ModelError
from ..model_folder import load_causal_lm
from .kl import entropy_from_logits
from .packing import Packed, block_causal_mask

_LOGITS_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TokenScores:
    """Scores of the generated tokens of a micro-batch."""

    logprobs_N: Tensor
    """log π of each token at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution that each token was drawn from."""


def load_model(
    config: ModelConfig, learner: LearnerConfig, folder: str | Path | None = None
) -> PreTrainedModel:
    """Load a causal language model with float32 master weights.

    Raises ModelError with the path and the reason when it cannot be loaded.
    """
    path = str(folder or config.path)
    model = load_causal_lm(
        path,
        dtype=torch.float32,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    # It stays in evaluation mode: dropout would make log-probs differ from the generators'.
    if learner.gradient_checkpointing:
        cast(Any, model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        model.train()
        _refuse_dropout(model, path)
    return model


def _refuse_dropout(model: nn.Module, path: str) -> None:
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    if any(rate > 0 for rate in rates):
        raise ModelError(
            f"the model {path!r} has dropout {sorted(rates)}, which gradient checkpointing would "
            "turn on",
            hint="set the dropout rates in its config.json to 0",
        )


class Scorer:
    """Computes the log-probs of generated tokens under a model, in packed rows.

    Only the hidden states that predict a generated token go through the output layer. A model
    whose logits are more than that layer (soft caps, scales) is found out at construction; its
    own full forward pass is used then.
    """

    def __init__(self, model: nn.Module, *, temperature: float, dtype: str) -> None:
        self._model = model
        self._decoder = cast(Any, model).get_decoder()
        self._head: nn.Module = cast(Any, model).get_output_embeddings()
        self._temperature = temperature
        self._autocast = dtype == "bfloat16"
        self.full_logits = not self._head_is_all()

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device

    def score(self, packed: Packed, *, entropy: bool = True) -> TokenScores:
        """Return log-probs (with gradient, where enabled) and entropies of the N tokens."""
        packed = packed.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            states = self._states_ND(packed)
        targets_N = packed.target_N
        logprobs, entropies = [], []
        chunk = max(1, _LOGITS_CHUNK_BYTES // (4 * self._vocab()))
        for start in range(0, len(targets_N), chunk):
            logits_NV = self._logits(states[start : start + chunk]).float()
            if self._temperature != 1.0:
                logits_NV = logits_NV / self._temperature
            log_softmax_NV = logits_NV.log_softmax(-1)
            ids_N1 = targets_N[start : start + chunk].unsqueeze(1)
            logprobs.append(log_softmax_NV.gather(1, ids_N1).squeeze(1))
            if entropy:
                entropies.append(entropy_from_logits(logits_NV))
        logprobs_N = torch.cat(logprobs)
        return TokenScores(
            logprobs_N, torch.cat(entropies) if entropy else torch.zeros_like(logprobs_N)
        )

    def _states_ND(self, packed: Packed) -> Tensor:
        """Hidden states (or, with `full_logits`, logits) at the columns that predict."""
        model = self._model if self.full_logits else self._decoder
        output = model(
            input_ids=packed.input_ids_BT,
            attention_mask=block_causal_mask(packed.segment_ids_BT, packed.parent_ids_BT),
            position_ids=packed.position_ids_BT,
            use_cache=False,
        )
        states_BTD = output.logits if self.full_logits else output.last_hidden_state
        return states_BTD[packed.row_N, packed.source_col_N]

    def _logits(self, states_ND: Tensor) -> Tensor:
        if self.full_logits:
            return states_ND
        with torch.autocast(states_ND.device.type, torch.bfloat16, enabled=self._autocast):
            return self._head(states_ND)

    def _vocab(self) -> int:
        return int(cast(Tensor, self._head.weight).shape[0])

    @torch.no_grad()
    def _head_is_all(self) -> bool:
        ids = torch.arange(8, device=self.device).unsqueeze(0) % self._vocab()
        whole = self._model(input_ids=ids, use_cache=False).logits
        parts = self._head(self._decoder(input_ids=ids, use_cache=False)[0])
        return bool(torch.allclose(whole.float(), parts.float(), atol=1e-5))
