"""The configuration of self-play against earlier versions."""

from typing import Self

from pydantic import Field, model_validator

from .section import Section


class SelfPlayConfig(Section):
    """Earlier versions of the run as opponents, in games with roles."""

    past_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the tasks in which one role learns and an earlier version plays the others; in the
    rest all roles are played by the present version, and learn."""
    pool_every: int = Field(default=10, ge=1)
    """Versions of every so many steps are kept as opponents, the first one included."""
    pool_size: int = Field(default=4, ge=1)
    """The newest so many of them are played against."""
    redraw_every: int = Field(default=1, ge=1)
    """Versions after which a generator draws another opponent from the pool."""

    @model_validator(mode="after")
    def _keys_have_effect(self) -> Self:
        idle = sorted(self.model_fields_set - {"past_share"})
        if self.past_share == 0 and idle:
            raise ValueError(f"{', '.join(idle)}: no effect while past_share is 0")
        return self
