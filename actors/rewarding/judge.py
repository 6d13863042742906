"""A reward model that is asked: conversations in, a score for the last answer of each out.

The tokens are those that training made of a row: an answer is scored at the end of its turn.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ...schemas.config.job import ModelConfig
from ...schemas.config.learner import LearnerConfig
from ...schemas.wire.errors import DataError, ModelError
from ..generator.episodes.chat import open_chat
from ..learner.packing.micro_batch import TokenSequence
from ..learner.packing.packing import pack
from ..learner.preferences.reward_model import RewardScorer, load_reward_model
from ..models.devices import own_device
from ..models.model_folder import is_reward_model, load_model_config

_ROW_TOKENS = 4096
_NO_LIMIT_TOKENS = 1 << 17
"""Of a conversation, for a model whose configuration names no limit."""

Messages = Sequence[Mapping[str, Any]]


class Judge:
    """Scores conversations by a reward model."""

    def __init__(self, folder: str) -> None:
        """Load the model of a checkpoint; ModelError for a folder that holds no reward model."""
        if not is_reward_model(load_model_config(folder)):
            raise ModelError(
                f"{folder} holds no reward model",
                hint="name a checkpoint of a job with sft.objective=reward, such as "
                "outputs/RUN/latest",
            )
        described = ModelConfig(path=folder)
        model = cast(Any, load_reward_model(described, LearnerConfig())).to(own_device())
        self._chat = open_chat(described)
        text_config = model.config.get_text_config()
        self._longest = int(getattr(text_config, "max_position_embeddings", _NO_LIMIT_TOKENS))
        self._scorer = RewardScorer(model, dtype="float32")

    def tokens(self, messages: Messages) -> TokenSequence:
        """Tokenise a conversation, with one more token, before which its score stands.

        Raises DataError or ModelError for one that cannot be scored.
        """
        ids = self._chat.conversation(messages).token_ids
        if len(ids) > self._longest:
            raise DataError(
                f"the conversation has {len(ids)} tokens, the model reads {self._longest}",
                hint="ask of a shorter one: rollout.max_tokens bounds those of a job",
            )
        mask = np.zeros(len(ids) + 1, np.uint8)
        mask[-1] = 1
        return TokenSequence(np.append(ids, ids[-1]), mask)

    @torch.no_grad()
    def scores(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """Score conversations, packed into as few rows as hold them."""
        row_tokens = max(_ROW_TOKENS, *(len(one.mask) for one in sequences))
        scores_S = torch.zeros(len(sequences))
        for micro in pack(sequences, row_tokens=row_tokens, microbatch_tokens=row_tokens):
            scores_S[micro.index_N] = self._scorer.rewards(micro).float().cpu()
        return [float(score) for score in scores_S]
