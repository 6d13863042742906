"""Low-rank adapters, as a job configures them."""

from typing import Literal

from pydantic import Field

from .section import Section, when

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which PEFT tells the folder of an adapter from that of a model."""


class LoraConfig(Section):
    """Low-rank adapters: with a rank, they are all that is trained, sent and saved."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank of the adapters; 0: all weights are trained."""
    alpha: int = Field(default=16, ge=1, json_schema_extra=when("rank"))
    """What an adapter adds is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", json_schema_extra=when("rank")
    )
    """Names of the linear layers that get an adapter (`[q_proj, v_proj]`); all-linear: every one
    but the output layer."""
    exclude: list[str] = Field(default_factory=list[str], json_schema_extra=when("rank"))
    """Names of layers that get none all the same."""
    dropout: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=when("rank"))
    """Share of an adapter's inputs that is left out at each update; log-probs are taken without."""
