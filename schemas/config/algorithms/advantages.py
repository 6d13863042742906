"""Names of advantages and of loss aggregations."""

from typing import Literal

AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "gdpo",
    "gpg",
    "passk",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "maxrl",
    "grpo_per_turn",
    "grpo_per_step",
    "gigpo",
    "gae",
]
AggregationName = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
