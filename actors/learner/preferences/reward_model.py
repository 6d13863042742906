"""The reward model: a decoder with one output, whose score stands at the last token of an answer.

It is transformers' class for sequence classification with one label, so that a checkpoint is what
`AutoModelForSequenceClassification` opens. Of a language model the decoder is taken; the output
begins at 0, and with it every score.

That class looks for the last token that is no padding: the padding token must be none that answers
end with, as it is where a tokenizer pads with its end-of-text token. Another one takes its place
then, in the model's configuration and in the tokenizer beside it.

Shape letters: N last tokens of answers, U columns that they stand at, D hidden size.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....schemas.config.job import ModelConfig
from ....schemas.config.learner import LearnerConfig
from ....schemas.wire.errors import ModelError
from ...models.lora import is_adapter
from ...models.model_folder import (
    build_hollow,
    check_model_folder,
    load_model_config,
    load_tokenizer,
    load_weights,
    sees_images,
)
from ..packing.micro_batch import MicroBatch
from ..training.model import Scorer, prepared
from ..training.parallel import Inside

_HEAD = "score.weight"


def load_reward_model(
    config: ModelConfig,
    learner: LearnerConfig,
    folder: str | Path | None = None,
    *,
    hollow: bool = False,
) -> PreTrainedModel:
    """Load a reward model, or make a new one of a language model, with float32 master weights.

    Raises ModelError for a model of which none can be made.
    """
    from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

    path = str(folder or config.path)
    check_model_folder(path, hollow=hollow)
    trust = config.trust_remote_code
    described = load_model_config(path, trust_remote_code=trust, hollow=hollow)
    if is_adapter(path) or sees_images(described):
        raise ModelError(
            f"no reward model is made of {path}: it is an adapter, or sees images",
            hint="name a whole language model; transformers' merge_and_unload writes that of an "
            "adapter",
        )
    described.num_labels = 1
    padding = padding_of(
        load_tokenizer(str(folder or config.tokenizer or path), trust_remote_code=trust)
    )
    cast(Any, described).get_text_config().pad_token_id = padding
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": trust,
    }
    auto: Any = AutoModelForSequenceClassification
    if hollow:
        model = build_hollow(auto, described, options)
    else:
        model = load_weights(auto, path, {**options, "config": described}, new=[_HEAD])
    return prepared(model, learner, path)


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token to pad with that ends no answer: the tokenizer's own, or another special."""
    of_it = cast(Any, tokenizer)
    special = [of_it.pad_token_id, of_it.unk_token_id, of_it.bos_token_id, *of_it.all_special_ids]
    return next((int(i) for i in special if i is not None and i != of_it.eos_token_id), 0)


def pad_alike(tokenizer: Any, model: nn.Module) -> Any:
    """Return the tokenizer, padding with the token that the model takes for padding."""
    padding = cast(Any, model).config.get_text_config().pad_token_id
    if tokenizer.pad_token_id != padding:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    return tokenizer


class RewardScorer(Scorer):
    """Says what answers are worth, in packed rows."""

    def __init__(self, model: nn.Module, *, dtype: str, inside: Inside | None = None) -> None:
        """`inside`: where the model has been put, by default it is as it was loaded.

        Raises ModelError for a model that cannot read packed rows.
        """
        self._output: nn.Module = cast(Any, model).score
        super().__init__(model, temperature=1.0, dtype=dtype, inside=inside)

    def rewards(self, packed: MicroBatch) -> Tensor:
        """Return the score before each of the N tokens, with gradient where enabled."""
        return self.inside.run(lambda: self._rewards(packed))

    def _rewards(self, packed: MicroBatch) -> Tensor:
        states_UD, place_N = self.states_UD(packed.to(self.device))
        return self._output(states_UD.float())[place_N, 0]

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it reads."""
        return int(cast(Any, self._model).config.get_text_config().vocab_size)

    def _head_is_all(self) -> bool:
        return True

    def _seen(self, packed: MicroBatch) -> Tensor:
        """Return hidden states of length 1: a new output layer would show nothing."""
        states_UD, place_N = self.inside.run(lambda: self.states_UD(packed.to(self.device)))
        return normalize(states_UD.float(), dim=1)[place_N]
