"""Teachers: frozen models that say of each token of the policy's own how likely it was to them.

Their reverse KL is an advantage of each token, log π_teacher − log π_o: no discount, no baseline,
no group. It has the policy's gradient of KL(π‖π_teacher) once the correction has weighed the tokens
(Agarwal et al. 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543). Scored in the learner
from the batch alone, it comes to the same bits when a run is replayed.

Shape letters: N generated tokens, S sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import ModelError
from ...models.model_folder import load_model_config, load_tokenizer, sees_images
from ..algorithms.credit import Credit
from ..algorithms.training_batch import TrainingBatch
from ..training.model import Scorer
from ..training.parallel import Parallel
from ..training.rank_packer import RankPacker

EVERY_SOURCE = ""


class Teachers:
    """The teachers of one policy; none, mostly."""

    def __init__(
        self,
        config: JobConfig,
        load: Callable[[str], Scorer],
        packer: RankPacker,
        parallel: Parallel,
    ) -> None:
        """`load` opens a frozen model by its folder.

        Raises ModelError for a teacher that cannot read what the policy writes.
        """
        self._algorithm = config.algorithm
        self._packer = packer
        self._parallel = parallel
        scorers: dict[str, Scorer] = {}
        for path in dict.fromkeys(config.algorithm.teachers.values()):
            check_same_language(config, path)
            scorers[path] = load(path)
        self._of_source = {
            source: scorers[path] for source, path in config.algorithm.teachers.items()
        }

    def guide(
        self, credit: Credit, batch: TrainingBatch, old_N: Tensor | None
    ) -> tuple[Credit, dict[str, float]]:
        """Return the credit with what the teachers add, and what was measured.

        `old_N` is log π_o, which is there where there is a teacher.
        """
        if not self._of_source or old_N is None:
            return credit, {}
        teacher_N, taught_N = self._score(batch)
        taught_N = taught_N & credit.kept_N
        gap_N = torch.where(taught_N, teacher_N - old_N, 0.0)
        advantages_N = teacher_advantage(
            gap_N, taught_N, normalise=self._algorithm.teacher_normalise
        )
        total_N = self._algorithm.reward_coef * credit.advantages_N
        total_N = total_N + self._algorithm.teacher_coef * advantages_N
        count = max(int(taught_N.sum()), 1)
        numbers = {
            "distillation/reverse_kl": -float(gap_N.sum()) / count,
            "distillation/taught_share": int(taught_N.sum()) / max(int(credit.kept_N.sum()), 1),
        }
        return replace(credit, advantages_N=total_N), numbers

    @torch.no_grad()
    def _score(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the log-prob of each token to the teacher of its row, and whether it has one."""
        logprobs_N = torch.zeros_like(batch.behaviour_N)
        taught_N = torch.zeros_like(batch.seq_N, dtype=torch.bool)
        for source, scorer in self._of_source.items():
            keep_S = self._rows_of(source, batch)
            taught_N |= keep_S[batch.seq_N]
            for micro in self._packer.pack(batch, keep_S):
                scores = scorer.score(replace(micro, experts_BTLK=None))  # it chooses itself
                logprobs_N[micro.index_N] = scores.logprobs_N
        return self._parallel.add_up(logprobs_N), taught_N

    def _rows_of(self, source: str, batch: TrainingBatch) -> Tensor:
        """Mark the sequences that a teacher scores: bool[S]."""
        others = set(self._of_source) - {EVERY_SOURCE}
        rest = source == EVERY_SOURCE
        mine = [one not in others if rest else one == source for one in batch.sources]
        return torch.tensor(mine, dtype=torch.bool, device=batch.seq_N.device)


def teacher_advantage(gap_N: Tensor, taught_N: Tensor, *, normalise: bool) -> Tensor:
    """Return the advantage of each token from log π_teacher − log π_o; 0 where nobody teaches.

    Normalised it is divided by its standard deviation over the tokens taught, and not centred: the
    sign says what the teacher would rather have.
    """
    if not normalise or int(taught_N.sum()) < 2:
        return gap_N
    return gap_N / (gap_N[taught_N].std() + 1e-6)


def check_same_language(config: JobConfig, path: str) -> None:
    """Raise ModelError for a teacher that does not read the policy's tokens, or its images."""
    trusted = config.model.trust_remote_code
    own = config.model.tokenizer or config.model.path
    vocabularies = [
        load_tokenizer(one, trust_remote_code=trusted).get_vocab() for one in (own, path)
    ]
    if vocabularies[0] != vocabularies[1]:
        differ = len(vocabularies[0].items() ^ vocabularies[1].items())
        raise ModelError(
            f"algorithm.teacher={path} has another tokenizer than {own}: {differ} entries differ, "
            f"of {len(vocabularies[0])} and {len(vocabularies[1])}",
            hint="a teacher scores the policy's own token ids: take one of the same family",
        )
    policy, teacher = (
        load_model_config(one, trust_remote_code=trusted) for one in (config.model.path, path)
    )
    if sees_images(policy) and policy.model_type != teacher.model_type:
        raise ModelError(
            f"algorithm.teacher={path} is a {teacher.model_type}, the policy a "
            f"{policy.model_type} that sees images",
            hint="take a teacher of the same kind",
        )
    sizes = [int(cast("Any", one).get_text_config().vocab_size) for one in (policy, teacher)]
    if sizes[1] < sizes[0]:
        raise ModelError(
            f"algorithm.teacher={path} knows {sizes[1]} token ids, the policy {sizes[0]}",
            hint="take a teacher with at least as many",
        )
