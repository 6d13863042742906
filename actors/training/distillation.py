"""Teachers: frozen models that score the policy's tokens by their log-probs.

The reverse KL is an advantage of each token, log π_teacher − log π_o, without discount, baseline or
group. With the correction's token weights, it has the policy's gradient of KL(π‖π_teacher) (Agarwal
et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543). The forward KL is a loss over the
teacher's likeliest tokens.

A step is a function of the batch: a teacher loaded by the learner scores it here; a teacher queried
by generators scored it before the group entered the log, which also holds the teacher's own prompt.
So a run replays to the same bits.

Shape letters: N generated tokens, S sequences, K tokens scored at the position of each.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schemas.config.algorithm import SELF, is_asked
from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group, Teaching
from ...schemas.wire.errors import DataError, ModelError
from ..policy.model_folder import load_model_config, load_tokenizer, sees_images
from .batch import TrainingBatch
from .credit import Credit
from .micro_batch import TokenSequence
from .model import ScoreOptions, Scorer
from .parallel import Parallel
from .rank_batches import RankPacker
from .sequences import lengths_by_sequence

# -- the arithmetic --------------------------------------------------------------------------------

_LEAST_REST = 1e-6
"""If the probability of all other tokens is below this, they are left out."""


@dataclass(frozen=True)
class TeacherScores:
    """Teachers' scores of the tokens of a batch."""

    logprobs_N: Tensor
    """float32: log-prob of each token; 0 without a teacher."""
    taught_N: Tensor
    """bool: tokens scored by a teacher."""
    top_ids_NK: Tensor | None = None
    """int64: the teacher's likeliest tokens at the position of each token."""
    top_logprobs_NK: Tensor | None = None
    """float32: log-probs of those tokens."""


@dataclass(frozen=True)
class TeacherTargets:
    """Inputs of a forward KL, over the whole batch."""

    ids_NK: Tensor
    """int64: the teacher's likeliest tokens."""
    logprobs_NK: Tensor
    """float32: their log-probs under the teacher."""
    taught_N: Tensor
    """bool: tokens with a teacher."""


def teacher_advantage(gap_N: Tensor, taught_N: Tensor, *, normalise: bool) -> Tensor:
    """Return the advantage of each token from log π_teacher − log π_o; 0 without a teacher.

    Normalising divides it by its standard deviation over the tokens with a teacher, without
    centring, since the sign is the teacher's preference.
    """
    if not normalise or int(taught_N.sum()) < 2:
        return gap_N
    return gap_N / (gap_N[taught_N].std() + 1e-6)


def forward_kl(policy_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """Return KL(π_teacher‖π) over the teacher's likeliest tokens, all others as one event.

    Both are log-probs of the same tokens; float32[N], with gradient in `policy_NK`. It is at most
    the full KL, and 0 if both agree on these tokens.
    """
    teacher_p_NK = teacher_NK.exp()
    kl_N = (teacher_p_NK * (teacher_NK - policy_NK)).sum(-1)
    rest_N = (1 - teacher_p_NK.sum(-1)).clamp(min=0)
    own_rest_N = (1 - policy_NK.exp().sum(-1)).clamp(min=_LEAST_REST)
    gap_N = rest_N.clamp(min=_LEAST_REST).log() - own_rest_N.log()
    return kl_N + torch.where(rest_N > _LEAST_REST, rest_N * gap_N, 0.0)


# -- requirements for teachers ---------------------------------------------------------------------


def check_same_language(config: JobConfig, path: str, key: str = "algorithm.teacher") -> None:
    """Raise ModelError if a model does not read the policy's tokens, or its images."""
    trusted = config.model.trust_remote_code
    own = config.model.tokenizer or config.model.path
    vocabularies = [
        load_tokenizer(folder, trust_remote_code=trusted).get_vocab() for folder in (own, path)
    ]
    if vocabularies[0] != vocabularies[1]:
        differ = len(vocabularies[0].items() ^ vocabularies[1].items())
        raise ModelError(
            f"{key}={path} has another tokenizer than {own}: {differ} entries differ, "
            f"of {len(vocabularies[0])} and {len(vocabularies[1])}",
            hint="it scores the policy's own token ids: take a model of the same family",
        )
    policy, other = (
        load_model_config(folder, trust_remote_code=trusted) for folder in (config.model.path, path)
    )
    if sees_images(policy) and policy.model_type != other.model_type:
        raise ModelError(
            f"{key}={path} is a {other.model_type}, the policy a {policy.model_type} that sees "
            "images",
            hint="take one of the same kind",
        )
    sizes = [int(cast("Any", folder).get_text_config().vocab_size) for folder in (policy, other)]
    if sizes[1] < sizes[0]:
        raise ModelError(
            f"{key}={path} knows {sizes[1]} token ids, the policy {sizes[0]}",
            hint="take a model with at least as many",
        )


EVERY_SOURCE = ""


class Teachers:
    """The teachers of one policy; most policies have none."""

    def __init__(
        self,
        config: JobConfig,
        scorer: Scorer,
        load: Callable[[str], Scorer],
        packer: RankPacker,
        parallel: Parallel,
    ) -> None:
        """Set up teachers; `scorer` scores with the policy, `load` opens a frozen model by its
        folder.

        Raises ModelError for a teacher that cannot read the policy's tokens.
        """
        self._algorithm = config.algorithm
        self._packer = packer
        self._parallel = parallel
        self._top_k = (
            config.algorithm.teacher_top_k if config.algorithm.teacher_loss == "forward_kl" else 0
        )
        scorers: dict[str, Scorer | None] = {SELF: scorer}
        for name in dict.fromkeys(config.algorithm.teachers.values()):
            if is_asked(name):
                scorers[name] = None
            elif name != SELF:
                check_same_language(config, name)
                scorers[name] = load(name)
        if self._top_k > scorer.vocab_size:
            known = f"the model knows {scorer.vocab_size} tokens"
            raise ModelError(f"algorithm.teacher_top_k={self._top_k}: {known}", hint="lower it")
        self._of_source = {
            source: scorers[name] for source, name in config.algorithm.teachers.items()
        }

    def check(self, group: Group) -> None:
        """Raise DataError for a group without the prompt or the scores of its teacher."""
        needs_prompt = self._algorithm.teacher_context is not None
        for item in group.sampled if self._of_source else ():
            source = item.data_source
            if source not in self._of_source and EVERY_SOURCE not in self._of_source:
                continue
            scorer = self._of_source.get(source, self._of_source.get(EVERY_SOURCE))
            teaching = item.teaching or Teaching()
            if needs_prompt and teaching.prompt is None:
                raise DataError(
                    "a trajectory has no prompt for its teacher (algorithm.teacher_context)",
                    hint="its publisher must set `teaching`, as the pool's generators do",
                )
            width = 0 if teaching.top_ids is None else teaching.top_ids.shape[1]
            if scorer is None and (teaching.logprobs is None or width < self._top_k):
                raise DataError(
                    "a trajectory has no log-probs of its teacher, which generators ask",
                    hint="its publisher must set `teaching`, as the pool's generators do",
                )

    def guide(
        self, credit: Credit, batch: TrainingBatch, old_N: Tensor | None
    ) -> tuple[Credit, TeacherTargets | None, dict[str, float]]:
        """Return the credit with teachers' advantages, the targets of a forward KL, and metrics.

        `old_N` is log π_o, which a teacher's advantage requires.
        """
        if not self._of_source:
            return credit, None, {}
        scores = self._score(batch)
        taught_N = scores.taught_N & credit.kept_N
        count = int(taught_N.sum())
        numbers = {"distillation/taught_share": count / max(int(credit.kept_N.sum()), 1)}
        advantages_N = self._algorithm.reward_coef * credit.advantages_N
        targets = None
        if scores.top_ids_NK is not None and scores.top_logprobs_NK is not None:
            targets = TeacherTargets(scores.top_ids_NK, scores.top_logprobs_NK, taught_N)
        elif old_N is not None:
            gap_N = torch.where(taught_N, scores.logprobs_N - old_N, 0.0)
            normalise = self._algorithm.teacher_normalise
            taught = teacher_advantage(gap_N, taught_N, normalise=normalise)
            advantages_N = advantages_N + self._algorithm.teacher_coef * taught
            numbers["distillation/reverse_kl"] = -float(gap_N.sum()) / max(count, 1)
        return replace(credit, advantages_N=advantages_N), targets, numbers

    @torch.no_grad()
    def _score(self, batch: TrainingBatch) -> TeacherScores:
        """Return the teachers' scores of the tokens."""
        scores = _empty(batch, self._top_k)
        for source, scorer in self._of_source.items():
            keep_S = self._rows_of(source, batch)
            scores.taught_N[keep_S[batch.seq_N]] = True
            if scorer is None:
                self._read_logged(scores, batch, keep_S)
            else:
                self._score_here(scorer, scores, batch, keep_S)
        return scores

    def _score_here(
        self, scorer: Scorer, total: TeacherScores, batch: TrainingBatch, keep_S: Tensor
    ) -> None:
        """Score this rank's share of some sequences with a model in this process."""
        mine = _empty(batch, self._top_k)
        for micro in self._packer.pack(_as_taught(batch), keep_S):
            request = ScoreOptions(top_k=self._top_k)
            scores = scorer.score(replace(micro, experts_BTLK=None), request)  # it chooses itself
            mine.logprobs_N[micro.index_N] = scores.logprobs_N
            if self._top_k and scores.others_NK is not None and scores.top_ids_NK is not None:
                _put(mine, micro.index_N, scores.top_ids_NK, scores.others_NK)
        total.logprobs_N.add_(self._parallel.add_up(mine.logprobs_N))
        for whole, part in (
            (total.top_ids_NK, mine.top_ids_NK),
            (total.top_logprobs_NK, mine.top_logprobs_NK),
        ):
            if whole is not None and part is not None:
                whole.add_(self._parallel.add_up(part))

    def _read_logged(self, scores: TeacherScores, batch: TrainingBatch, keep_S: Tensor) -> None:
        """Return the scores in the log for some sequences; `check` ensured that they exist."""
        lengths_S = lengths_by_sequence(batch.seq_N, batch.num_seqs)
        ends = cast("list[int]", lengths_S.cumsum(0).tolist())
        for place in cast("list[int]", keep_S.nonzero().flatten().tolist()):
            teaching, end = batch.teaching[place], ends[place]
            if teaching is None or teaching.logprobs is None:
                raise DataError(f"sequence {place} of the batch was not scored by its teacher")
            tokens = slice(end - len(teaching.logprobs), end)
            # Copies, since torch does not accept read-only arrays such as those of the log.
            scores.logprobs_N[tokens] = torch.tensor(teaching.logprobs).to(scores.logprobs_N)
            if self._top_k and teaching.top_ids is not None and teaching.top_logprobs is not None:
                top = (teaching.top_ids, teaching.top_logprobs)
                _put(scores, tokens, *(torch.tensor(array[:, : self._top_k]) for array in top))

    def _rows_of(self, source: str, batch: TrainingBatch) -> Tensor:
        """Mark the sequences that a teacher scores: bool[S]."""
        others = set(self._of_source) - {EVERY_SOURCE}
        rest = source == EVERY_SOURCE
        mine = [name not in others if rest else name == source for name in batch.sources]
        return torch.tensor(mine, dtype=torch.bool, device=batch.seq_N.device)


def _empty(batch: TrainingBatch, top_k: int) -> TeacherScores:
    scores = TeacherScores(
        torch.zeros_like(batch.behaviour_N), torch.zeros_like(batch.seq_N, dtype=torch.bool)
    )
    if not top_k:
        return scores
    shape = (batch.num_tokens, top_k)
    return replace(
        scores,
        top_ids_NK=batch.seq_N.new_zeros(shape),
        top_logprobs_NK=batch.behaviour_N.new_zeros(shape),
    )


def _put(
    scores: TeacherScores, places: Tensor | slice, ids_NK: Tensor, logprobs_NK: Tensor
) -> None:
    assert scores.top_ids_NK is not None
    assert scores.top_logprobs_NK is not None
    scores.top_ids_NK[places] = ids_NK.to(scores.top_ids_NK)
    scores.top_logprobs_NK[places] = logprobs_NK.to(scores.top_logprobs_NK)


def _as_taught(batch: TrainingBatch) -> TrainingBatch:
    """Return the batch with the teachers' prompts in place of the policy's prompts."""
    prompts = [None if teaching is None else teaching.prompt for teaching in batch.teaching]
    if all(prompt is None for prompt in prompts):
        return batch
    sequences = [
        sequence if prompt is None else _behind(prompt, sequence)
        for sequence, prompt in zip(batch.sequences, prompts, strict=True)
    ]
    return replace(batch, sequences=sequences)


def _behind(prompt: NDArray[Any], sequence: TokenSequence) -> TokenSequence:
    """Return a sequence with its first prompt replaced; the generated tokens stay."""
    first = int(np.argmax(sequence.mask))
    ids = np.concatenate([prompt.astype(sequence.token_ids.dtype), sequence.token_ids[first:]])
    mask = np.concatenate([np.zeros(len(prompt), sequence.mask.dtype), sequence.mask[first:]])
    return TokenSequence(ids, mask, sequence.images, branches=sequence.branches)
