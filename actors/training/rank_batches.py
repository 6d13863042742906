"""The micro-batches of one rank: its share of the sequences, packed.

All ranks go through the same number of micro-batches, and in each through the same layers, since
they gather weights together: a rank with fewer gets empty ones, and one without images where
another has some looks at an image that stands nowhere.

Shape letters: S sequences.
"""

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import structlog
import torch
from torch import Tensor, nn

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LearnerConfig
from ...schemas.plan.memory import Term, learner_load, learner_terms
from ...schemas.plan.model_shape import shape_of
from ...schemas.wire.errors import ModelError, OutOfMemoryError
from ..policy.vision import ImageReader, SeenImages, probe_image, unseen
from .batch import TrainingBatch, select
from .micro_batch import MicroBatch, TokenSequence, columns_of, share_sequences
from .model import Scorer
from .packing import pack
from .parallel import Parallel
from .varlen import flatten, with_runs


class RankPacker:
    """Divides sequences over the ranks, and packs those of this one."""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        learner: LearnerConfig,
        parallel: Parallel,
        image_reader: ImageReader | None,
    ) -> None:
        """`image_reader` reads images for a model that sees them."""
        self._model = model
        self._scorer = scorer
        self._max_row_tokens, self._share_prompts = learner.max_row_tokens, learner.share_prompts
        self.microbatch_tokens = learner.pass_tokens
        """Tokens per forward and backward pass."""
        self._parallel = parallel
        self._image_reader = image_reader

    def pack(self, batch: TrainingBatch, keep_S: Tensor) -> list[MicroBatch]:
        """Pack this rank's share of the sequences that are kept."""
        packed = self._pack_share(batch, self._share(batch, keep_S))
        missing = self._parallel.largest(len(packed)) - len(packed)
        packed += [MicroBatch.empty(self._scorer.device)] * missing
        if self._parallel.size == 1 or self._image_reader is None:
            return packed
        seeing = self._parallel.gather([micro.images is not None for micro in packed])
        together = [any(ranks) for ranks in zip(*seeing, strict=True)]
        return [
            self._with_probe_image(micro) if sees and micro.images is None else micro
            for micro, sees in zip(packed, together, strict=True)
        ]

    def _laid_out(self, micro: MicroBatch) -> MicroBatch:
        """Return rows as the attention reads them: what is computed here of those of all ranks."""
        sequence, flat_rows = self._parallel.sequence, self._scorer.flat_rows
        micro = flatten(micro) if flat_rows else micro
        if sequence is not None:
            micro = columns_of(micro, sequence.place, sequence.size)
        return with_runs(micro) if flat_rows else micro

    def _with_probe_image(self, micro: MicroBatch) -> MicroBatch:
        assert self._image_reader is not None
        seen = unseen(self._image_reader.read([probe_image()]), micro.position_ids_BT)
        return replace(micro, images=seen)

    def _share(self, batch: TrainingBatch, keep_S: Tensor) -> Tensor:
        """Mark those of the sequences that this rank computes: bool[S]."""
        if self._parallel.num_shares == 1:
            return keep_S
        chosen_s = torch.nonzero(keep_S).flatten()
        shares = share_sequences(
            select(batch, keep_S)[0],
            ranks=self._parallel.num_shares,
            hidden_size=self._scorer.hidden_size,
            share_prompts=self._share_prompts,
        )
        mine = torch.tensor(shares[self._parallel.share], dtype=torch.int64, device=keep_S.device)
        return torch.zeros_like(keep_S).index_fill(0, chosen_s[mine], True)

    def _pack_share(self, batch: TrainingBatch, keep_S: Tensor) -> list[MicroBatch]:
        sequences, index_N = select(batch, keep_S)
        if not sequences:
            return []
        packed = pack(
            sequences,
            max_row_tokens=min(self._max_row_tokens, self.microbatch_tokens),
            microbatch_tokens=self.microbatch_tokens,
            share_prompts=self._share_prompts,
            # The length of a row costs nothing where it has no mask.
            hidden_size=None if self._scorer.flat_rows else self._scorer.hidden_size,
            see=self._read_images,
        )
        moved = (self._laid_out(micro).to(self._scorer.device) for micro in packed)
        return [replace(micro, index_N=index_N[micro.index_N]) for micro in moved]

    def _read_images(self, sequence: TokenSequence) -> SeenImages | None:
        if self._image_reader is None or not sequence.images:
            return None
        return self._image_reader.read_images(self._model, sequence.token_ids, sequence.images)


# -- sums over a step ------------------------------------------------------------------------------

OF_THE_UPDATES = ("pg_loss", "kl_loss", "teacher_loss")
"""What only an update has."""


@dataclass
class StepSums:
    """What adds up over the micro-batches and updates of a step."""

    totals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Metric name to the sum over the tokens."""
    tokens: int = 0
    """Generated tokens that were seen."""
    norms: list[float] = field(default_factory=list[float])
    """Gradient norm of each update; not finite: the update was left out."""
    old: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Places of all generated tokens, and their log-probs before the update."""

    def include(self, totals: dict[str, Tensor]) -> None:
        """Add sums of further tokens."""
        for name, value in totals.items():
            before = self.totals.get(name)
            self.totals[name] = value if before is None else before + value

    def copy(self) -> "StepSums":
        """Return the same sums, to go back to: tensors are replaced, not changed."""
        return StepSums(dict(self.totals), self.tokens, [*self.norms], [*self.old])

    def become(self, other: "StepSums") -> None:
        """Go back to earlier sums."""
        self.totals, self.tokens = dict(other.totals), other.tokens
        self.norms, self.old = [*other.norms], [*other.old]

    def add(self, values: dict[str, Tensor], index_N: Tensor, old_N: Tensor) -> None:
        """Add the sums of a micro-batch whose N tokens stand at `index_N` of the batch."""
        self.include(values)
        self.tokens += len(index_N)
        self.old.append((index_N, old_N))

    def of_all(self, parallel: Parallel) -> "StepSums":
        """Put together what all ranks have; norms are those of all shares already."""
        if parallel.size == 1:
            return self
        totals = {name: value.cpu() for name, value in self.totals.items()}
        old = [(index_N.cpu(), old_N.cpu()) for index_N, old_N in self.old]
        together = StepSums(norms=self.norms)
        for other in parallel.gather(replace(self, totals=totals, old=old)):
            together.include(other.totals)
            together.tokens += other.tokens
            together.old += other.old
        return together

    def numbers(self) -> dict[str, float]:
        """Name the sums as metrics; what no token measured is left out.

        Losses are of the updates, all else is a mean over all generated tokens of the batch.
        """
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        averages = {"actor/skipped_updates": float(len(self.norms) - len(finite))}
        if finite:
            averages["actor/grad_norm"] = sum(finite) / len(finite)
        for name, total in self.totals.items():
            count = len(self.norms) if name in OF_THE_UPDATES else self.tokens
            if count:
                averages[f"actor/{name}"] = float(total) / count
        return averages


# -- a step that does not fit the GPU is computed again in smaller micro-batches, once -------------
# What is computed again begins anew: gradients are zeroed, sums are those from before, and the
# optimiser has not moved. So nothing is trained twice, and the gradient is the same up to rounding.
# Ranks that share a model cannot begin anew one by one, since each is in the middle of a collective
# that the others wait in. There the rank that is out of memory ends; all learn of it, start again
# from the checkpoint, and train the recorded step in smaller micro-batches (`learner/memory.py`).

_log = structlog.get_logger()
T = TypeVar("T")


def smaller_pass(config: JobConfig, microbatch_tokens: int) -> int | None:
    """Return half the tokens of a pass, at least one longest sequence; None if that is no fewer."""
    longest = config.rollout.max_tokens
    if config.algorithm.teacher_context:
        longest += config.algorithm.teacher_context_tokens
    smaller = max(microbatch_tokens // 2, longest)
    return smaller if smaller < microbatch_tokens else None


def _largest_term(config: JobConfig, model: nn.Module, microbatch_tokens: int) -> Term | None:
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
    term = _largest_term(config, model, microbatch_tokens)
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
