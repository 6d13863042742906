"""The reference policy, to which a KL is taken, or with which DPO compares."""

from typing import Self

from pydantic import Field, model_validator

from ..section import Section


class ReferenceConfig(Section):
    """The policy to which a KL is taken, where `algorithm.kl_coef` asks for one, and with which DPO
    compares; in no other job."""

    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """Model with the policy's tokenizer, as `model.path`; default: what the run began with."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """After each step the reference becomes this share of itself and the rest of the policy;
    default: it stays."""
    reset_every: int = Field(default=0, ge=0)
    """The reference becomes the policy after every so many steps; 0: never."""

    @model_validator(mode="after")
    def _moves_in_one_way(self) -> Self:
        if self.ema is not None and self.reset_every:
            raise ValueError("ema and reset_every both move the reference: choose one of them")
        return self

    @property
    def moves(self) -> bool:
        """Whether it changes during training."""
        return self.ema is not None or self.reset_every > 0
