"""The learner's state besides weights and optimiser: part of each checkpoint."""

from pydantic import BaseModel, Field

from ...schemas.rollout import Group, episodes_of, num_too_old
from ...schemas.task import Dropped, Task


class Waste(BaseModel):
    """Counts of generated and of trained tokens since the start of the run; part of checkpoints."""

    tokens_generated: int = 0
    """All generated tokens, including tokens of failed tries."""
    tokens_finished: int = 0
    """Tokens of finished episodes."""
    tokens_trained: int = 0
    episodes_finished: int = 0
    episodes_trained: int = 0

    def add(self, group: Group, *, trained: bool, oldest: int = 0) -> None:
        """Count a decided group; tokens of versions before `oldest` count as not trained."""
        tokens = sum(item.num_generated for item in group.trajectories)
        self.add_failed(tokens + group.tokens_wasted + sum(group.tokens_cut))
        self.tokens_finished += tokens
        episodes = len(episodes_of(group.trajectories))
        self.episodes_finished += episodes
        if trained:
            self.tokens_trained += tokens - num_too_old(group.sampled, oldest)
            self.episodes_trained += episodes

    def add_failed(self, tokens: int) -> None:
        """Count the tokens of tries that failed."""
        self.tokens_generated += tokens

    def numbers(self) -> dict[str, float]:
        """Return the share of generated tokens that were not trained, and the ratio of lengths."""
        if not self.tokens_finished or not self.episodes_trained:
            return {}
        trained_mean = self.tokens_trained / self.episodes_trained
        finished_mean = self.tokens_finished / self.episodes_finished
        return {
            "rollout/wasted_share": 1 - self.tokens_trained / self.tokens_generated,
            "rollout/trained_over_generated_length": trained_mean / finished_mean,
        }


SUMS = 4
"""Order of additions in our own computations; incremented when a change of ours changes bits.

0: until the output layer and the softmax became one operation. 1: until answers that begin alike
shared columns, and gradients of embeddings named rows. 2: until large layers computed by oneDNN.
3: until rewards added up in float64.
"""


class Numerics(BaseModel):
    """How a learner computed: other kernels or numbers of ranks add in another order."""

    device: str
    """The name of its GPUs, or cpu."""
    dtype: str
    """Dtype of computation."""
    attention: str
    """sdpa, or the varlen kernel."""
    deterministic: bool
    """Whether CUDA kernels were deterministic (`learner.deterministic`)."""
    torch: str
    """Version of torch."""
    ranks: int = 1
    sums: int = 0
    """Order of additions in our own computations; see `SUMS`."""

    @property
    def repeats(self) -> bool:
        """Whether repeating a step with these numerics gives the same bits."""
        return self.device == "cpu" or self.deterministic

    def __str__(self) -> str:
        """Format for messages."""
        kernels = "deterministic kernels" if self.repeats else "kernels that add in any order"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return (
            f"{self.device}, {self.dtype}, attention {self.attention}, {kernels}, torch "
            f"{self.torch}, {ranks}, sums in order {self.sums}"
        )


class LearnerState(BaseModel):
    """The learner's state besides weights and optimiser."""

    has_digests: bool = False
    """Whether the checkpoint was written with the digests of its files."""
    step: int = 0
    """Optimiser steps done; also the policy's version."""
    total_steps: int = 0
    """Number of steps of the whole job."""
    numerics: list[Numerics] = Field(default_factory=list[Numerics])
    """How the steps were computed: one entry, plus one for each change."""
    batch_seq: int = 0
    """Sequence of the last batch record that is in the weights: the frontier."""
    log_seq: int = 1
    """Every earlier entry of the rollout log is decided."""
    decided_seqs: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Later entries that are also decided, as half-open ranges."""
    newest_decided: tuple[int, str] = (0, "")
    """Sequence and SHA-256 of the newest decided entry, to recognise the log; 0: none."""
    next_task: int = 0
    """Number of the next task."""
    next_index: int = 0
    """Position in the data order of the next task."""
    trained: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Numbers of trained tasks, as half-open ranges."""
    dropped: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Numbers of dropped tasks; each has returned its admission credit."""
    indices: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Decided positions of the data order, as half-open ranges."""
    owed: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """(number, data position) of dropped tasks to issue again."""
    owed_tries: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """(number, failed tries) of dropped tasks to issue again, for tasks with failed tries."""
    owed_tasks: list[Task] = Field(default_factory=list[Task])
    """Clients' dropped tasks to issue again."""
    repeated: list[tuple[int, int]] = Field(default_factory=list[tuple[int, int]])
    """Numbers of dropped tasks that clients' tasks have replaced, as half-open ranges."""
    unrecorded: list[Dropped] = Field(default_factory=list[Dropped])
    """Entries dropped since the last batch record; the next record lists them."""
    judged_seq: int = 0
    """Last log entry when the run was given up because no group could be trained."""
    dropped_by_reason: dict[str, int] = Field(default_factory=dict[str, int])
    """Number of dropped groups, by reason."""
    microbatch_tokens: int = 0
    """Tokens per forward and backward pass, if chosen or lowered; 0: not yet chosen."""
    bound: int = 0
    """The current staleness bound, if chosen automatically; 0: not yet chosen."""
    success: list[tuple[int, float, float]] = Field(default_factory=list[tuple[int, float, float]])
    """(task, episodes, solved episodes) of the curriculum; newer episodes count more."""
    kept_choices: list[tuple[int, int, int]] = Field(default_factory=list[tuple[int, int, int]])
    """(data position, task, version) of choices to issue again."""
    waste: Waste = Field(default_factory=Waste)
    """Counts of generated and of trained tokens."""

    def note_numerics(self, numerics: Numerics) -> None:
        """Note how the following steps are computed."""
        if self.step and not self.numerics:  # missing in checkpoints of earlier steps
            self.numerics.append(numerics.model_copy(update={"sums": 0}))
        if self.numerics[-1:] != [numerics]:
            self.numerics.append(numerics)
