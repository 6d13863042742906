"""Grammars, biases and penalties in vLLM's workers, as the transformers engine applies them.

vLLM's own structured outputs are not used: they change the logits before our code gets them, begin
at the first token of a request (an answer continued elsewhere has tokens already), and support one
token that ends an answer. A logits processor gets the model's own logits and each request's tokens,
and both engines use the same grammar library.
"""

# Not installed for development; typings/vllm has the used parts.
# pyright: reportMissingModuleSource=false

from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from ...policy.grammar import GrammarCompiler
from ...policy.model_folder import load_tokenizer
from ..engine import Sampling
from ..sampling import Constraining, RowConstraint, masked_shares

PROCESSOR = "tinkermq.actors.engine.vllm.constraints:ConstrainedLogits"
"""The name by which vLLM loads the processor."""
_KEY = "tinkermq"
_OPTIONS = tuple(field.name for field in fields(Sampling) if field.name != "grammar")
_MAX_ENDED = 4096
"""Number of ended requests whose values are kept until they are requested."""


def constraint_arguments(sampling: Sampling, key: str) -> dict[str, Any] | None:
    """Return the constraints of a request for the worker; None for one without."""
    if not sampling.is_constrained:
        return None
    options = {name: getattr(sampling, name) for name in _OPTIONS}
    grammar = "" if sampling.grammar is None else sampling.grammar.text
    return {_KEY: {"key": key, "grammar": grammar, "options": options}}


@dataclass(slots=True)
class _Row:
    """A constrained request in the batch."""

    key: str
    constraint: RowConstraint
    output: list[int]
    """Its tokens; vLLM appends to this list."""
    num_taken: int = 0

    def catch_up(self) -> None:
        """Add new tokens to the constraint."""
        for token in self.output[self.num_taken :]:
            assert token >= 0, "vLLM has not told a token before the next one is drawn"
            self.constraint.accept_token(token)
            self.num_taken += 1


@dataclass(slots=True)
class _Figures:
    """Recorded values of a request."""

    masked: dict[int, float]
    """Share of the probability that a grammar excluded, by token number."""
    error: str = ""


class ConstrainedLogits(LogitsProcessor):
    """Changes the logits of constrained requests only."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Nothing is read before the first grammar."""
        del device, is_pin_memory
        model = vllm_config.model_config
        self._load = partial(
            load_tokenizer,
            model.tokenizer or model.model,
            trust_remote_code=model.trust_remote_code,
        )
        self._compiler: GrammarCompiler | None = None
        self._rows: dict[int, _Row] = {}
        self._constraining = Constraining()
        self._figures: OrderedDict[str, _Figures] = OrderedDict()
        self._raw_BV: torch.Tensor | None = None
        self._shaped_BV: torch.Tensor | None = None
        self._batch: Any = None

    def follow(self, batch: Any) -> None:
        """Make vLLM's batch report tokens only while constrained requests run.

        To report tokens, vLLM waits for the end of each step before it prepares the next one, which
        delays all requests.
        """
        self._batch = batch
        batch.logitsprocs_need_output_token_ids = bool(self._rows)

    def is_argmax_invariant(self) -> bool:
        """Return False, since greedy requests are also constrained."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows to vLLM's batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            if (row := self._row(params, prompt or [], output)) is not None:
                self._rows[index] = row
        for source, target, direction in batch_update.moved:
            first, second = self._rows.pop(source, None), self._rows.pop(target, None)
            if first is not None:
                self._rows[target] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = second
        if self._batch is not None:  # the batch rebuilds its metadata right afterwards
            self.follow(self._batch)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits for drawing; the model's own logits are kept for `recorded`."""
        self._raw_BV = self._shaped_BV = None
        if not self._rows:
            return logits
        constraints: list[RowConstraint | None] = [None] * logits.shape[0]
        for index, row in self._rows.items():
            if index < len(constraints):
                row.catch_up()
                constraints[index] = row.constraint
        shaped = self._constraining.shaped(logits, constraints)
        if shaped is None:
            return logits
        for row in self._rows.values():
            if row.constraint.error:
                self._of(row.key).error = row.constraint.error
        self._raw_BV, self._shaped_BV = logits.clone(), shaped
        return shaped.clone()  # the sampler may change it in place

    def recorded(self, temperature_B: torch.Tensor | None) -> torch.Tensor | None:
        """Return float32[B, V] log-probs of the model's own logits; None: logits are unchanged."""
        if self._raw_BV is None or self._shaped_BV is None:
            return None
        logits_BV = self._raw_BV.float()
        if temperature_B is not None:
            scale_B = torch.where(temperature_B < 1e-5, 1.0, temperature_B)
            logits_BV = logits_BV / scale_B[:, None]
        logprobs_BV = logits_BV.log_softmax(-1)
        at = [index for index in self._rows if index < len(logprobs_BV)]
        shares_B = masked_shares(logprobs_BV[at].exp(), self._shaped_BV[at])
        for index, share in zip(at, shares_B.cpu().numpy().tolist(), strict=True):
            row = self._rows[index]
            # vLLM draws after each part of a prompt, at the same position: the last draw counts.
            self._of(row.key).masked[row.num_taken] = share
        self._raw_BV = self._shaped_BV = None
        return logprobs_BV

    def take_figures(self, key: str, num: int) -> tuple[bytes, str]:
        """Return, once, float32[num] of a request's tokens, and why it could not continue."""
        figures = self._figures.pop(key, None) or _Figures({})
        masked = np.array([figures.masked.get(n, 0.0) for n in range(num)], np.float32)
        return masked.tobytes(), figures.error

    def _row(self, params: SamplingParams, prompt: list[int], output: list[int]) -> _Row | None:
        sent: Any = (params.extra_args or {}).get(_KEY)
        if sent is None:
            return None
        grammar = None
        if sent["grammar"]:
            self._compiler = self._compiler or GrammarCompiler(self._load())
            grammar = self._compiler.compile_here(sent["grammar"])
        sampling = Sampling(**sent["options"], grammar=grammar)
        constraint = RowConstraint(sampling, np.array(prompt, np.int32))
        return _Row(sent["key"], constraint, output)

    def _of(self, key: str) -> _Figures:
        figures = self._figures.setdefault(key, _Figures({}))
        while len(self._figures) > _MAX_ENDED:
            self._figures.popitem(last=False)
        return figures
