"""Configuration of self-play against earlier versions."""

from pydantic import Field

from .section import Section, when


class SelfPlayConfig(Section):
    """Earlier versions of the run as opponents, in games with roles."""

    past_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks in which one role learns and an earlier version plays the others; in the rest
    all roles learn."""
    pool_every: int = Field(default=10, ge=1, json_schema_extra=when("past_share"))
    """Keep versions of every N steps as opponents, the first included."""
    pool_size: int = Field(default=4, ge=1, json_schema_extra=when("past_share"))
    """Newest of them to play against."""
    redraw_every: int = Field(default=1, ge=1, json_schema_extra=when("past_share"))
    """Versions after which a generator draws another opponent."""
