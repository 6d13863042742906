"""Configuration of the learner."""

from typing import Literal

from pydantic import Field

from .section import Section, when


class LearnerConfig(Section):
    """The optimiser and its memory."""

    slots: int = Field(default=1, ge=1, le=64)
    """Slots of the learner with all ranks: linked GPUs of one node, or CPU shares."""
    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that share model and batch (FSDP2), with equal parts of the slots."""
    machines: int = Field(default=1, ge=1, le=64)
    """Nodes over which the ranks may be spread equally, as few as needed."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Copies of the model among the ranks (HSDP), each sharded over ranks / replicas of them; only
    gradients travel between copies."""
    context_parallel: int = Field(default=1, ge=1, le=64)
    """Neighbouring ranks that share the columns of each row (Ulysses), so that each holds
    activations of a part. Must divide the ranks and the model's heads."""
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """adamw; muon: the momentum of the hidden layers' matrices, an adapter's too, made orthogonal,
    with AdamW for embeddings, output layer, norms and biases; adamw_8bit: AdamW that keeps its two
    moments of matrices in 8 bits each, a quarter of the memory."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate; muon's updates are as large as AdamW's at the same rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, json_schema_extra=when("schedule", "linear", "cosine")
    )
    """Final learning rate, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay, times the learning rate."""
    muon_momentum: float = Field(
        default=0.95, ge=0, lt=1, json_schema_extra=when("optimizer", "muon")
    )
    """Momentum (Nesterov)."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates per batch and version, each on a part of it."""
    batch_epochs: int = Field(default=1, ge=1, le=64)
    """Times that a batch is gone through, with `num_minibatches` updates each; ratios and clips are
    those to the policy before the first."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute dtype; master weights and optimiser state are float32. In float16 the loss is scaled,
    and an update whose gradient is not finite is left out and halves the scale."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights that generators get."""
    row_tokens: int = Field(default=4096, ge=16)
    """Sequences are packed into rows of up to this many tokens."""
    microbatch_tokens: int = Field(default=16384, ge=16)
    """Tokens per forward and backward pass; gradients are accumulated."""
    share_prompts: bool = True
    """Compute a group's prompt, and common beginnings of an agent episode's rows, once, if they fit
    into a row of `row_tokens`, some multiple of the longest episode (same result; sdpa only)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Use torch.compile for the model's layers: a minute or more at first use, equal results up to
    rounding. Needs a C++ compiler."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimiser state in CPU memory: slower; needs a GPU."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads for torch, of each rank."""

    @property
    def num_updates(self) -> int:
        """Optimiser updates per batch."""
        return self.num_minibatches * self.batch_epochs

    @property
    def spread(self) -> list[int]:
        """Numbers of nodes over which the ranks may be divided equally, best first."""
        whole = self.ranks // self.replicas
        parts = [n for n in range(1, self.machines + 1) if self.ranks % n == 0]
        return sorted(parts, key=lambda n: (n > 1 and (self.ranks // n) % whole > 0, n))

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded by FSDP2."""
        return self.ranks > 1 or self.cpu_offload
