"""Log-probs of prompts: one pass over their tokens, of which nothing is kept.

Shape letters: B prompts of a pass, N tokens, D hidden size, C columns whose logits are held at
once, V vocabulary, K likeliest tokens.

Prompts that are shorter than others of their pass are padded behind their end, where nothing looks
at: a token sees those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ..engine import IntVector, PromptScores
from .decoder import SlotDecoder
from .row_adapters import EngineAdapter

_PASS_TOKENS = 4096
_LOGITS_BYTES = 64 * 2**20
_PROBE = (1, 2, 3, 5, 1, 2)
_TOLERANCE = 1e-5


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """A prompt that is to be scored."""

    request_id: str
    prompt: IntVector
    top_k: int
    adapter: EngineAdapter | None


class PromptScorer:
    """Scores prompts with a decoder's model; in the engine's thread."""

    def __init__(self, decoder: SlotDecoder) -> None:
        """Compute nothing yet."""
        self._decoder = decoder
        self._head_is_all: bool | None = None

    def take(self, waiting: Sequence[ScoreRequest]) -> list[ScoreRequest]:
        """Return those of the waiting ones that share the next pass: the first, and its like."""
        first = waiting[0]
        longest, batch = len(first.prompt), [first]
        for request in waiting[1:]:
            width = max(longest, len(request.prompt))
            shortest = min(len(one.prompt) for one in (*batch, request))
            if width * (len(batch) + 1) <= _PASS_TOKENS and width <= 2 * shortest + 16:
                longest = width
                batch.append(request)
        return batch

    @torch.inference_mode()
    def score(self, batch: Sequence[ScoreRequest]) -> list[PromptScores]:
        """Return the scores of some prompts."""
        if self._head_is_all is None:
            self._head_is_all = self._is_head_all()
        longest = max(len(one.prompt) for one in batch)
        ids_BN = np.zeros((len(batch), longest), np.int64)
        for row, one in enumerate(batch):
            ids_BN[row, : len(one.prompt)] = one.prompt
        with self._decoder.adapters.using([one.adapter for one in batch]):
            states_BND = self._pass(ids_BN, logits=not self._head_is_all)
        return [self._read(states_BND[row], one) for row, one in enumerate(batch)]

    def _pass(self, ids_BN: np.ndarray[Any, Any], *, logits: bool) -> torch.Tensor:
        """Return hidden states, or the model's logits."""
        decoder, model = self._decoder, cast(Any, self._decoder.model)
        decoder.cache.begin_scoring()
        ids = torch.as_tensor(ids_BN, device=decoder.device)
        output = (model if logits else model.get_decoder())(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=decoder.device).expand_as(ids),
            attention_mask=None,
            past_key_values=decoder.cache,
            use_cache=True,
        )
        return cast("torch.Tensor", output.logits if logits else output.last_hidden_state)

    def _read(self, states_ND: torch.Tensor, one: ScoreRequest) -> PromptScores:
        num, k = len(one.prompt), one.top_k
        scores = PromptScores(
            np.full(num, np.nan, np.float32),
            np.zeros((num, k), np.int32),
            np.full((num, k), np.nan, np.float32),
        )
        targets = torch.as_tensor(one.prompt[1:].astype(np.int64), device=states_ND.device)
        chunk = max(1, _LOGITS_BYTES // (4 * self._decoder.vocab_size))
        for start in range(0, num - 1, chunk):
            end = min(start + chunk, num - 1)
            logprobs_CV = self._logits(states_ND[start:end], one).float().log_softmax(-1)
            picked = logprobs_CV.gather(1, targets[start:end, None])[:, 0]
            scores.logprobs[start + 1 : end + 1] = picked.cpu().numpy()
            if k:
                top = logprobs_CV.topk(k, -1)
                scores.top_logprobs[start + 1 : end + 1] = top.values.cpu().numpy()
                scores.top_ids[start + 1 : end + 1] = top.indices.cpu().numpy()
        return scores

    def _logits(self, states_CD: torch.Tensor, one: ScoreRequest) -> torch.Tensor:
        if not self._head_is_all:
            return states_CD
        head = cast(Any, self._decoder.model).get_output_embeddings()
        with self._decoder.adapters.using([one.adapter]):
            return cast("torch.Tensor", head(states_CD))

    def _is_head_all(self) -> bool:
        """Whether logits are the output layer's alone: some models cap or scale them."""
        ids = np.array([_PROBE], np.int64)
        whole = self._pass(ids, logits=True)[0].float()
        head = cast(Any, self._decoder.model).get_output_embeddings()
        parts = head(self._pass(ids, logits=False)[0]).float()
        return bool((whole - parts).abs().max() <= _TOLERANCE * (1 + whole.abs().max()))
