"""Log-probs of prompts, with any adapter: one pass of the trainer's own, without gradients."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....schemas.tinker.datum import Datum, LoraSpec
from ..training.trainer import AdapterTrainer

_KEPT = 8
_BASE = "base"


class PromptScores:
    """Scores prompts; not for several threads at once."""

    def __init__(self, trainer: AdapterTrainer) -> None:
        """Compute with `trainer`, which holds the newest adapters that were scored with."""
        self._trainer = trainer
        self._loaded: OrderedDict[str, None] = OrderedDict()

    def score(self, prompt_N: NDArray[np.int32], folder: Path | None) -> NDArray[np.float32]:
        """Return float32[N]: the log-prob of each token behind those before it; NaN for the first.

        `folder` is that of an adapter, None for the base alone.
        """
        first = np.full(1, np.nan, np.float32)
        if len(prompt_N) == 1:
            return first
        inputs: dict[str, NDArray[Any]] = {
            "target_tokens": prompt_N[1:].astype(np.int64),
            "weights": np.ones(len(prompt_N) - 1, np.float32),
        }
        datum = Datum(tokens=prompt_N[:-1], inputs=inputs)
        model = self._ready(folder)
        result = self._trainer.forward_backward(model, [datum], "cross_entropy", backward=False)
        return np.concatenate([first, result.logprobs[0]])

    def _ready(self, folder: Path | None) -> str:
        """Return the model that has an adapter, loaded if need be."""
        model = _BASE if folder is None else str(folder)
        if model not in self._loaded:
            if folder is None:  # a fresh adapter changes nothing
                self._trainer.create(model, LoraSpec(rank=1, train_mlp=False, train_unembed=False))
            else:
                self._trainer.load(model, folder, with_optimizer=False)
            self._loaded[model] = None
            if len(self._loaded) > _KEPT:
                oldest, _ = self._loaded.popitem(last=False)
                self._trainer.evict(oldest)
        self._loaded.move_to_end(model)
        return model
