"""Configuration of the critic."""

from pydantic import Field

from ..section import Section


class CriticConfig(Section):
    """The critic of `algorithm.advantage: gae`. Betas, weight decay, gradient clipping, minibatches
    and memory are the learner's."""

    path: str | None = None
    """Model of its initial weights; default: the policy's initial ones."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate, scheduled as `learner.schedule`."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """λ of the critic's returns; default: `algorithm.gae_lambda`."""
    bootstrap_cut: bool = False
    """Value the end of an episode that a turn or token limit cut by the critic instead of 0; needs
    one more pass over such episodes."""
    clip: float = Field(default=0.5, gt=0)
    """Largest rewarded change of a value per update."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critic is trained."""
