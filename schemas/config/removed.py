"""Keys and values that earlier versions had: what to use instead of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

_PAIRS = (
    "learning from pairs of answers was removed; train with TRL (DPOTrainer, RewardTrainer), or "
    "run the DPO recipe of tinker-cookbook on a service of the Tinker API (docs/tinker.md)"
)


@dataclass(frozen=True)
class _Removed:
    instead: str
    values: tuple[Any, ...] = ()
    """The values that were removed; none: the key itself."""
    ignored: tuple[Any, ...] = ()
    """Values of a removed key that said what is always the case now."""


_REMOVED = {
    "sft.objective": _Removed(_PAIRS, ignored=("sft",)),
    **dict.fromkeys(
        (
            "sft.beta",
            "sft.dpo_loss",
            "sft.label_smoothing",
            "sft.sft_coef",
            "sft.center_coef",
            "sft.val_data",
        ),
        _Removed(_PAIRS),
    ),
    "algorithm.loss": _Removed(_PAIRS, values=("dpo",)),
    "learner.optimizer": _Removed(
        "it was removed; use muon (half of AdamW's state for hidden matrices), or adamw with a "
        "low-rank adapter (lora.rank)",
        values=("adamw_8bit",),
    ),
    "learner.dtype": _Removed("it was removed; use bfloat16", values=("float16",)),
}


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the removed keys that change nothing.

    Raises ValueError, saying what to use instead, for removed keys and values that do.
    """
    tree = dict(values)
    for path, removed in _REMOVED.items():
        name, _, key = path.partition(".")
        section: Any = tree.get(name)
        if not isinstance(section, Mapping) or key not in section:
            continue
        section = cast("Mapping[str, Any]", section)
        value = section[key]
        if not removed.values and value in removed.ignored:
            tree[name] = {other: section[other] for other in section if other != key}
        elif not removed.values or value in removed.values:
            raise ValueError(f"{path}={value}: {removed.instead}")
    return tree
