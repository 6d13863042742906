"""A step whose micro-batches do not fit the GPU is computed again in smaller ones, once.

What is computed again begins anew: gradients are zeroed, sums are those from before, and the
optimiser has not moved. So nothing is trained twice, and the gradient is the same up to rounding.

Ranks that share a model cannot begin anew one by one, since each is in the middle of a collective
that the others wait in. There the rank that is out of memory ends; all learn of it, start again
from the checkpoint, and train the recorded step in smaller micro-batches (`learner/memory.py`).
"""

import gc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import structlog
import torch
from torch import nn

from ...schemas.config.job import JobConfig
from ...schemas.plan.memory import Term, learner_load, learner_terms
from ...schemas.plan.model_shape import shape_of
from ...schemas.wire.errors import ModelError, OutOfMemoryError
from .rank_batches import RankPacker

_log = structlog.get_logger()
T = TypeVar("T")


def smaller_pass(config: JobConfig, microbatch_tokens: int) -> int | None:
    """Return half the tokens of a pass, at least one longest sequence; None if that is no fewer."""
    longest = config.rollout.max_tokens
    if config.algorithm.teacher_context:
        longest += config.algorithm.teacher_context_tokens
    smaller = max(microbatch_tokens // 2, longest)
    return smaller if smaller < microbatch_tokens else None


def largest_term(config: JobConfig, model: nn.Module, microbatch_tokens: int) -> Term | None:
    """Return what is estimated to take most of the GPU; None for a model that is not estimated."""
    settings = cast("Mapping[str, Any]", cast(Any, model).config.to_dict())
    try:
        shape = shape_of(settings)
    except ModelError:
        return None
    load = learner_load(
        config,
        shape,
        microbatch_tokens=microbatch_tokens,
        checkpointing=config.learner.recomputes,
        offload_activations=config.learner.offloads,
        on_gpu=torch.cuda.is_available(),
    )
    terms = [term for term in learner_terms(load) if term.remedy]
    return max(terms, key=lambda term: term.num_bytes)


def out_of_memory(config: JobConfig, model: nn.Module, microbatch_tokens: int) -> OutOfMemoryError:
    """Return the error of a step that does not fit, with the largest term and its keys."""
    term = largest_term(config, model, microbatch_tokens)
    most, remedy = "", "lower learner.microbatch_tokens"
    if term is not None:
        most = f"; {term.name} take most, about {term.num_bytes / 2**30:.2g} GiB"
        remedy = term.remedy
    error = OutOfMemoryError(
        f"the learner's GPU is out of memory in micro-batches of {microbatch_tokens} tokens{most}",
        hint=remedy,
    )
    error.microbatch_tokens = microbatch_tokens
    return error


class MemoryGuard:
    """Repeats what does not fit, in smaller micro-batches, once in a step."""

    def __init__(
        self, config: JobConfig, model: nn.Module, packer: RankPacker, *, alone: bool
    ) -> None:
        """`packer` holds the tokens of a pass; `alone`: no other rank waits in a collective."""
        self._config = config
        self._model = model
        self._packer = packer
        self._alone = alone
        self._repeated = False

    def begin_step(self) -> None:
        """Allow one repetition again."""
        self._repeated = False

    def run(self, work: Callable[[], T]) -> T:
        """Run what packs and goes through micro-batches, and can begin anew.

        Raises OutOfMemoryError where it does not fit a second time, or cannot be made smaller.
        """
        draws = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        try:
            return work()
        except torch.OutOfMemoryError as error:
            failure = self._failed(str(error))
        # Behind the handler, whose exception holds the frames with the activations.
        if failure is not None:
            raise failure
        gc.collect()
        torch.set_rng_state(draws)
        if on_gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state(on_gpu)
        return self.last(work)

    def last(self, work: Callable[[], T]) -> T:
        """Run what is not repeated.

        Raises OutOfMemoryError where it does not fit.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            tokens = self._packer.microbatch_tokens
            raise out_of_memory(self._config, self._model, tokens) from error

    def _failed(self, reason: str) -> OutOfMemoryError | None:
        """Lower the tokens of a pass; return the error where that is not to be tried."""
        tokens = self._packer.microbatch_tokens
        error = out_of_memory(self._config, self._model, tokens)
        smaller = smaller_pass(self._config, tokens)
        if self._repeated or smaller is None or not self._alone:
            return error
        self._repeated = True
        self._packer.microbatch_tokens = smaller
        _log.warning(
            "step_out_of_memory",
            message=error.message,
            hint=error.hint,
            microbatch_tokens=smaller,
            reason=reason.partition("\n")[0],
        )
        return None
