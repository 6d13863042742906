"""The critic of a job, where its advantage needs one."""

from pydantic import Field

from ..section import Section


class CriticConfig(Section):
    """The critic, which `algorithm.advantage: gae` trains; betas, weight decay, clipping of
    gradients, minibatches and memory are those of the learner."""

    path: str | None = None
    """Model whose weights it starts from; default: the policy's initial ones."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; it rises and falls as `learner.schedule` says."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """λ of the returns that it is trained towards; default: `algorithm.gae_lambda`."""
    bootstrap_cut: bool = False
    """An episode that a limit of turns or tokens ended is worth at its end what the critic expects
    there, in place of 0: its game would have gone on. One more pass over such episodes."""
    clip: float = Field(default=0.5, gt=0)
    """An update is not rewarded for moving a value further than this from where it was."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critic is trained and the policy stays as it is."""
