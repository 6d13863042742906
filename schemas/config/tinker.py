"""What the configuration of a service for the Tinker API implies: it trains what its users send."""

import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Any, cast

from pydantic import Field, field_validator

from .section import Section

_BASE = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._/-]*")
_IMPLIED: dict[str, Any] = {"game": "", "hosts": 0, "num_val": 0}


class TinkerConfig(Section):
    """A base model that many users train adapters of, through the Tinker API."""

    base: str = Field(default="", max_length=200)
    """Name under which programs ask for the base model (`base_model`), such as
    `Qwen/Qwen3.5-9B-Base`; an absolute path is a name, too. Empty: not such a service."""
    max_rank: int = Field(default=64, ge=1, le=1024)
    """Largest rank of an adapter."""
    adapters_in_memory: int = Field(default=256, ge=1, le=100_000)
    """Adapters, with their optimisers, that the trainer has in memory at the same time; those that
    were not used for the longest time are written down, and come back with their next operation."""
    adapters_mb: int = Field(default=16 << 10, ge=1, le=1 << 30)
    """Megabytes that these may have: weights, gradients and two moments of each."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds after which an adapter that nobody uses is written down in any case."""
    sampled_at_once: int = Field(default=16, ge=1, le=1024)
    """Adapters that one sampler holds, and decodes with in one batch; further ones wait until
    one is idle."""
    checkpoint_mb: int = Field(default=64 << 10, ge=1, le=1 << 30)
    """Megabytes of checkpoints that one user may have; saving fails beyond."""
    history_mb: int = Field(default=64 << 10, ge=0, le=1 << 30)
    """Megabytes of operations that are kept in the run's folder once they have taken effect, so
    that `tinkermq replay` can do a session again; those of the models that rest longest go first.
    0: none are kept."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens that are computed at once, of one model."""
    mixed_micro_batches: bool = False
    """Let micro-batches of several models be computed in one pass where they fit: faster for many
    small ones. The last bits of a result then depend on which those were; that is kept with the
    result, so that operations done again after a crash, and replays, come to the same bits."""

    @field_validator("base")
    @classmethod
    def _check_base(cls, base: str) -> str:
        """Raise ValueError for what programs could not ask for, or not tell apart."""
        if base and (_BASE.fullmatch(base) is None or base != normpath(base)):
            raise ValueError(
                f"{base!r} is no name of a base model: take one such as org/model, or the absolute "
                "path of its folder, of letters, digits, '.', '_', '-' and single '/'"
            )
        return base


def settle_tinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of such a service with what it implies; any other tree as it is."""
    tree = dict(values)
    section = cast("Mapping[str, Any]", tree.get("tinker") or {})
    if section.get("base"):
        tree.setdefault("env", dict(_IMPLIED))
    return tree
