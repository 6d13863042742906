"""What the configuration of an SFT job implies: `sft.data` decides most of `algorithm`."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import Field

from .section import Rule, Section

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
    if not _section(tree, "sft").get("data"):
        return tree
    tree.setdefault("env", _NO_GAME)
    for key in _section(tree, "algorithm"):
        if key not in _READ:
            raise ValueError(f"algorithm.{key} has no effect in an SFT job: remove it")
    for name, implied in _IMPLIED.items():
        given = _section(tree, name)
        for key, value in implied.items():
            if given.get(key, value) != value:
                raise ValueError(
                    f"{name}.{key}={given[key]} has no effect in an SFT job, where it is {value}: "
                    "remove it"
                )
        tree[name] = {**given, **implied}
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section given as a map; empty for one that is missing or a model already."""
    found = tree.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
