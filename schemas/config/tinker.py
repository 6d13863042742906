"""Configuration of a Tinker service, and what it implies."""

import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Any, cast

from pydantic import Field, field_validator

from .section import Section

_BASE = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._/-]*")
_IMPLIED: dict[str, Any] = {"game": "", "hosts": 0, "num_val": 0}


class TinkerConfig(Section):
    """A base model on which many users train adapters through the Tinker API."""

    base: str = Field(default="", max_length=200)
    """Name of the base model for programs (`base_model`), such as `Qwen/Qwen3.5-9B-Base`, or an
    absolute path. Empty: no such service."""
    max_rank: int = Field(default=64, ge=1, le=1024)
    """Largest rank of an adapter."""
    adapters_in_memory: int = Field(default=256, ge=1, le=100_000)
    """Adapters, with optimisers, in the trainer's memory; the least recently used are written to
    disk and return with their next operation."""
    adapters_mb: int = Field(default=16 << 10, ge=1, le=1 << 30)
    """Megabytes of these: weights, gradients and two moments each."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds after which an unused adapter is written to disk."""
    sampled_at_once: int = Field(default=16, ge=1, le=1024)
    """Adapters that one sampler holds and decodes in one batch; others wait until one is idle."""
    checkpoint_mb: int = Field(default=64 << 10, ge=1, le=1 << 30)
    """Megabytes of checkpoints per user; saving fails beyond."""
    history_mb: int = Field(default=64 << 10, ge=0, le=1 << 30)
    """Megabytes of operations kept in the run folder for `tinkermq replay`; those of the least
    recently used models go first. 0: none."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens of one model computed at once."""
    mixed_micro_batches: bool = False
    """Compute micro-batches of several models in one pass: faster for many small ones. The last
    bits of a result then depend on the others, which are recorded, so repeated operations and
    replays give the same bits."""

    @field_validator("base")
    @classmethod
    def _check_base(cls, base: str) -> str:
        """Raise ValueError for names that programs cannot request or distinguish."""
        if base and (_BASE.fullmatch(base) is None or base != normpath(base)):
            raise ValueError(
                f"{base!r} is no name of a base model: take one such as org/model, or the absolute "
                "path of its folder, of letters, digits, '.', '_', '-' and single '/'"
            )
        return base


def settle_tinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service's tree with implied keys; any other tree unchanged."""
    tree = dict(values)
    section = cast("Mapping[str, Any]", tree.get("tinker") or {})
    if section.get("base"):
        tree.setdefault("env", dict(_IMPLIED))
    return tree
