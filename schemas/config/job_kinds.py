"""What the configuration of an SFT job implies: `sft.data` decides most of `algorithm`."""

import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Any

from pydantic import Field, field_validator

from .sections import Rule, Section, given_section, with_implied

_IMPLIED: dict[str, dict[str, Any]] = {
    "rollout": {"group_size": 1, "temperature": 1.0},
    "algorithm": {"loss": "sft", "correction": "none"},
    "training": {"staleness_policy": "train", "tasks": "data", "curriculum": "none"},
}
_READ = frozenset(
    {
        *_IMPLIED["algorithm"],
        "loss_agg",
        "loss_agg_length",
        "kl_coef",
        "kl_estimator",
        "reference",
        "entropy_coef",
        "entropy_target",
        "entropy_coef_step",
    }
)
"""Keys of `algorithm` that such a job reads."""
_NO_GAME: dict[str, Any] = {"game": "", "hosts": 0, "num_val": 0}


class SftConfig(Section):
    """What an SFT job learns from: conversations."""

    data: list[str] = Field(default_factory=list[str])
    """Parquet or JSONL files, on the pool, with the column `messages`: conversations in which the
    assistant's messages are learnt; `tools` and `images` may stand beside it. Empty: not an SFT
    job."""


SFT_RULES = (
    Rule(
        "algorithm.loss=sft",
        lambda job: job.algorithm.loss == "sft" and not job.sft.data,
        "needs sft.data, and a job of kind sft",
    ),
    Rule(
        "policies",
        lambda job: job.policies and job.sft.data,
        "of an SFT job are not built: train them by reinforcement, or one policy",
    ),
    Rule(
        "self_play.past_share",
        lambda job: job.self_play.past_share and job.sft.data,
        "has no effect in an SFT job: remove it",
    ),
    Rule(
        "algorithm.reference",
        lambda job: "reference" in job.algorithm.model_fields_set and not job.algorithm.kl_coef,
        "has no effect while algorithm.kl_coef is {algorithm.kl_coef!r}: remove it, or set "
        "algorithm.kl_coef",
    ),
)


def settle_sft(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of an SFT job with what it implies; any other tree as it is.

    Raises ValueError for a key that would have no effect.
    """
    tree = dict(values)
    if not given_section(tree, "sft").get("data"):
        return tree
    tree.setdefault("env", _NO_GAME)
    for key in given_section(tree, "algorithm"):
        if key not in _READ:
            raise ValueError(f"algorithm.{key} has no effect in an SFT job: remove it")
    return with_implied(tree, _IMPLIED, "an SFT job")


# Configuration of a Tinker service, and what it implies.

_BASE = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._/-]*")


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
    if given_section(tree, "tinker").get("base"):
        tree.setdefault("env", _NO_GAME)
    return tree
