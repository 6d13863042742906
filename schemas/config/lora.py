"""Configuration of low-rank adapters."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from .section import Section, when

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file that marks the folder of an adapter."""


class LoraConfig(Section):
    """Low-rank adapters: with a rank, only they are trained, sent and saved."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank; 0: all weights are trained."""
    alpha: int = Field(default=16, ge=1, json_schema_extra=when("rank"))
    """Adapters are scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", json_schema_extra=when("rank")
    )
    """Names of the adapted linear layers (`[q_proj, v_proj]`); all-linear: all but the output
    layer."""
    exclude: list[str] = Field(default_factory=list[str], json_schema_extra=when("rank"))
    """Names of layers without an adapter."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=dict[str, Annotated[int, Field(ge=1, le=1024)]],
        json_schema_extra=when("rank"),
    )
    """Other ranks by the end of a layer's name, or a regular expression, as in PEFT:
    `{layers.0.self_attn.q_proj: 4}`."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict[str, Annotated[float, Field(gt=0)]], json_schema_extra=when("rank")
    )
    """Other alphas, named as in `rank_pattern`."""
    rslora: bool = Field(default=False, json_schema_extra=when("rank"))
    """Scale by alpha / √rank (rank-stabilised, arXiv 2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=when("rank"))
    """Dropout of the adapters' inputs in updates; log-probs are computed without."""

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same rank and the scale alpha / rank."""
        return not (self.rank_pattern or self.alpha_pattern or self.rslora)

    @property
    def max_rank(self) -> int:
        """The largest rank that a layer may have."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer by its name."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, layer), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of a layer's adapter."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, layer), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _pattern(patterns: Iterable[str], layer: str) -> str:
    """Return the first pattern that matches a layer's name, as PEFT does; "" for none."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", layer)), "")
