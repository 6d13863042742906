"""Names and options of policy losses."""

from typing import Literal

LossName = Literal[
    "ppo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "dppo",
    "dppo_kl",
    "topr",
    "vespo",
    "reinforce",
    "sft",
    "dpo",
]
CORRECTING_LOSSES = ("dppo", "dppo_kl", "topr", "vespo")
"""Losses with an off-policy correction of their own."""
LOSSES_OF_SEQUENCES = ("gspo", "gmpo", "topr", "vespo")
"""Losses that need a whole sequence at once."""
_ABOVE_0, _AT_MOST_1 = (1e-6, 1e6), (1e-6, 1.0)
LOSS_OPTIONS: dict[str, dict[str, tuple[float, float]]] = {
    "sapo": {"tau_pos": _ABOVE_0, "tau_neg": _ABOVE_0},
    "clip_cov": {"share": _AT_MOST_1, "cov_low": (-1e6, 1e6), "cov_high": (-1e6, 1e6)},
    "kl_cov": {"share": _AT_MOST_1, "coef": (0.0, 1e6)},
    "dppo": {"kl_tau": (0.0, 1e6)},
    "dppo_kl": {"ratio_cap": _ABOVE_0},
    "vespo": dict.fromkeys(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), _ABOVE_0),
}
"""Options of losses besides clips, with their bounds."""
