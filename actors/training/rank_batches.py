"""The micro-batches of one rank: its share of the sequences, packed.

All ranks run the same number of micro-batches and the same layers in each, since they gather
weights together: a rank with fewer gets empty micro-batches, and a rank without images processes a
dummy image if another rank has images.

Sequences are divided over ranks by longest processing time first, on cost cL + L². The linear
layers of a decoder cost 24 D² for each of L columns, attention 4 D L (D: hidden size): in units of
4 D that is cL + L² with c = 6 D. Sequences with a common prefix share columns on the same rank, so
families are kept together if that costs the slowest rank less than spreading them.

Shape letters: S sequences.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeVar, cast

import structlog
import torch
from torch import Tensor, nn

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import LearnerConfig
from ...schemas.plan.memory import Term, learner_load, learner_terms
from ...schemas.plan.model_shape import shape_of
from ...schemas.wire.errors import ConfigError, ModelError, OutOfMemoryError
from ..policy.vision import ImageReader, SeenImages, probe_image, unseen
from .batch import TrainingBatch, select
from .micro_batch import MicroBatch, TokenSequence, columns_of
from .model import Scorer
from .packing import DepthFirst, pack
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
        """`image_reader` reads images for a vision model."""
        self._model = model
        self._scorer = scorer
        self._max_row_tokens, self._share_prompts = learner.max_row_tokens, learner.share_prompts
        self._one_per_row, self._flat_rows = False, True
        self.microbatch_tokens = learner.pass_tokens
        """Tokens per forward and backward pass."""
        self._parallel = parallel
        self._image_reader = image_reader
        self.serve(scorer)

    def serve(self, scorer: Scorer) -> None:
        """Make rows that another model can read, too: a critic, a reference or a teacher.

        Raises ConfigError for rows that cannot be divided over ranks.
        """
        most = scorer.most_columns
        is_long = most is not None and self._max_row_tokens >= most
        if is_long and self._parallel.sequence is not None:
            raise ConfigError(
                f"learner.context_parallel cannot divide rows of {self._max_row_tokens} tokens of "
                f"a model that takes columns for positions from {most} on",
                hint=f"set learner.max_row_tokens below {most}, or learner.context_parallel=1",
            )
        self._one_per_row |= scorer.one_per_row or is_long
        self._flat_rows &= scorer.flat_rows
        self._share_prompts &= scorer.shares_columns

    def pack(self, batch: TrainingBatch, keep_S: Tensor) -> list[MicroBatch]:
        """Pack this rank's share of the kept sequences, for a pass forwards."""
        self._parallel.phases.enter("forward")
        packed = self._pack_share(batch, self._share(batch, keep_S))
        seeing = self._parallel.gather([micro.images is not None for micro in packed])
        together = [any(ranks) for ranks in zip_longest(*seeing, fillvalue=False)]
        packed += [MicroBatch.empty(self._scorer.device)] * (len(together) - len(packed))
        return [
            self._with_probe_image(micro) if sees and micro.images is None else micro
            for micro, sees in zip(packed, together, strict=True)
        ]

    def _laid_out(self, micro: MicroBatch) -> MicroBatch:
        """Return the rows as the attention reads them, reduced to the columns computed here."""
        sequence, flat_rows = self._parallel.sequence, self._flat_rows
        micro = flatten(micro) if flat_rows else micro
        if sequence is not None:
            micro = columns_of(micro, sequence.place, sequence.size)
        return with_runs(micro) if flat_rows else micro

    def _with_probe_image(self, micro: MicroBatch) -> MicroBatch:
        assert self._image_reader is not None
        seen = unseen(self._image_reader.read([probe_image()]), micro.position_ids_BT)
        return replace(micro, images=seen)

    def _share(self, batch: TrainingBatch, keep_S: Tensor) -> Tensor:
        """Mark the sequences that this rank computes: bool[S]."""
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
            one_per_row=self._one_per_row,
            # Without a mask, the length of a row costs nothing.
            hidden_size=None if self._flat_rows else self._scorer.hidden_size,
            see=self._read_images,
        )
        moved = (self._laid_out(micro).to(self._scorer.device) for micro in packed)
        return [replace(micro, index_N=index_N[micro.index_N]) for micro in moved]

    def _read_images(self, sequence: TokenSequence) -> SeenImages | None:
        if self._image_reader is None or not sequence.images:
            return None
        return self._image_reader.read_images(self._model, sequence.token_ids, sequence.images)


# -- division over ranks ---------------------------------------------------------------------------


def cost(num_columns: int, hidden_size: int) -> int:
    """Return the cost of a piece of a row, in units of 4 · hidden_size operations per layer."""
    return 6 * hidden_size * num_columns + num_columns**2


def longest_first(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items, the most costly first, to the rank with the least load so far.

    Returns the items of each rank, ascending. The largest load is at most 4/3 − 1/(3 · ranks) of
    the least possible (Graham 1969). Deterministic: equal items keep their order, and of equal
    ranks the first takes the item.
    """
    loads, items = [0] * ranks, [list[int]() for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        rank = loads.index(min(loads))
        loads[rank] += costs[item]
        items[rank].append(item)
    return [sorted(numbers) for numbers in items]


def share_out(
    prompts: Sequence[int],
    lengths: Sequence[int],
    families: Sequence[int],
    *,
    ranks: int,
    hidden_size: int,
) -> list[list[int]]:
    """Return the sequences of each rank, ascending.

    `prompts` and `lengths` are columns of each sequence, prompt included in the length; sequences
    of one family share the prompt's columns. Every sequence is on one rank. Deterministic.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for sequence, family in enumerate(families):
        members[family].append(sequence)

    def load(sequences: Sequence[int]) -> int:
        columns: dict[int, int] = {}
        for sequence in sequences:
            before = columns.get(families[sequence], prompts[sequence])
            columns[families[sequence]] = before + lengths[sequence] - prompts[sequence]
        return sum(cost(number, hidden_size) for number in columns.values())

    whole = list(members.values())
    together = [
        sorted(sequence for family in rank for sequence in whole[family])
        for rank in longest_first([load(family) for family in whole], ranks)
    ]
    apart = longest_first([cost(length, hidden_size) for length in lengths], ranks)
    return min(together, apart, key=lambda shares: max(map(load, shares)))


def share_sequences(
    sequences: Sequence[TokenSequence], *, ranks: int, hidden_size: int, share_prompts: bool
) -> list[list[int]]:
    """Return the sequences of each rank, ascending; see `share_out`."""
    lengths = [len(sequence.mask) for sequence in sequences]
    if share_prompts and any(sequence.branches for sequence in sequences):
        shared, trees = _in_trees(sequences, lengths)
        return share_out(shared, lengths, trees, ranks=ranks, hidden_size=hidden_size)
    prompts = [int(sequence.mask.argmax()) for sequence in sequences]
    known: dict[bytes, int] = {}
    families = [
        known.setdefault(sequence.token_ids[:length].tobytes(), at) if share_prompts else at
        for at, (sequence, length) in enumerate(zip(sequences, prompts, strict=True))
    ]
    return share_out(prompts, lengths, families, ranks=ranks, hidden_size=hidden_size)


def _in_trees(
    sequences: Sequence[TokenSequence], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the columns that each sequence shares with its family, and its family.

    A new family begins if a sequence shares less than half with the previous one: under one system
    prompt all tasks are one tree, and different episodes share little else.
    """
    walk = DepthFirst.of(sequences, lengths, lambda _: None)
    shared, families = [0] * len(sequences), [0] * len(sequences)
    begins: list[int] = []
    for seq, common in zip(walk.order, walk.shared, strict=True):
        if 2 * common < lengths[seq]:
            begins.append(seq)
        shared[seq], families[seq] = common, len(begins) - 1
    # Its first sequence is counted in full, in place of the one with which the family begins.
    for family, first in enumerate(begins):
        shared[first] = shared[families.index(family)]
    return shared, families


# -- a step that does not fit the GPU is computed again in smaller micro-batches, once -------------
# A repetition starts over: gradients are zeroed, sums restored, the optimiser is unchanged. So
# nothing is trained twice, and the gradient is the same up to rounding. Ranks that share a model
# cannot start over one by one, since each is in a collective with the others. There the rank out of
# memory ends; all ranks then start again from the checkpoint and train the recorded step in smaller
# micro-batches (`learner/memory.py`).

_log = structlog.get_logger()
T = TypeVar("T")


def smaller_pass(config: JobConfig, microbatch_tokens: int) -> int | None:
    """Return half the tokens of a pass, at least the longest sequence; None if not fewer."""
    longest = config.rollout.max_tokens
    if config.algorithm.teacher_context:
        longest += config.algorithm.teacher_context_tokens
    smaller = max(microbatch_tokens // 2, longest)
    return smaller if smaller < microbatch_tokens else None


def _largest_term(config: JobConfig, model: nn.Module, microbatch_tokens: int) -> Term | None:
    """Return the largest estimated use of the GPU's memory; None for an unknown model."""
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
    """Return the error of a step that does not fit, with the largest memory term and its keys."""
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
    """Repeats computations that are out of memory in smaller micro-batches, once in a step."""

    def __init__(
        self, config: JobConfig, model: nn.Module, packer: RankPacker, *, alone: bool
    ) -> None:
        """`packer` has the tokens of a pass; `alone`: no other rank waits in a collective."""
        self._config = config
        self._model = model
        self._packer = packer
        self._alone = alone
        self._repeated = False

    def begin_step(self) -> None:
        """Allow one repetition for a new step."""
        self._repeated = False

    def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which iterates over micro-batches and can be repeated.

        Raises OutOfMemoryError if the repetition does not fit, or micro-batches cannot be smaller.
        """
        draws = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        try:
            return work()
        except torch.OutOfMemoryError as error:
            failure = self._failed(str(error))
        # Outside of the handler, whose exception holds the frames with the activations.
        if failure is not None:
            raise failure
        gc.collect()
        torch.set_rng_state(draws)
        if on_gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state(on_gpu)
        return self.last(work)

    def last(self, work: Callable[[], T]) -> T:
        """Run `work` without repetition.

        Raises OutOfMemoryError if it does not fit.
        """
        try:
            return work()
        except torch.OutOfMemoryError as error:
            tokens = self._packer.microbatch_tokens
            raise out_of_memory(self._config, self._model, tokens) from error

    def _failed(self, reason: str) -> OutOfMemoryError | None:
        """Lower the tokens of a pass; return an error if it cannot be repeated."""
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
