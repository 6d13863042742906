"""What the configuration of an SFT job implies: `sft.data` decides most of `algorithm`.

What is learnt of the rows is `sft.objective`: the assistant's messages, or which of two answers is
the better one, by the policy itself (DPO) or by a reward model.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field

from .section import Rule, Section, when

Objective = Literal["sft", "dpo", "reward"]

_OF_PAIRS = ("dpo", "reward")
_ROLLOUT = {"temperature": 1.0}
_TRAINING = {"staleness_policy": "train", "tasks": "data", "curriculum": "none"}
_IMPLIED: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "rollout": {"group_size": 1, **_ROLLOUT},
        "algorithm": {"loss": "sft", "correction": "none"},
        "training": _TRAINING,
    },
    "dpo": {
        "rollout": {"group_size": 2, **_ROLLOUT},
        "algorithm": {"loss": "dpo", "correction": "none", "loss_agg": "seq-mean-token-sum"},
        "training": _TRAINING,
    },
    "reward": {
        "rollout": {"group_size": 2, **_ROLLOUT},
        "algorithm": {"correction": "none"},
        "training": _TRAINING,
    },
}
_READ: dict[str, frozenset[str]] = {
    "sft": frozenset(
        {
            "loss_agg",
            "loss_agg_length",
            "kl_coef",
            "kl_estimator",
            "reference",
            "entropy_coef",
            "entropy_target",
            "entropy_coef_step",
        }
    ),
    "dpo": frozenset({"reference"}),
    "reward": frozenset(),
}
"""Keys of `algorithm` that are read, by objective."""
_NAMES: dict[str, str] = {
    "sft": "an SFT job",
    "dpo": "a DPO job",
    "reward": "a job that trains a reward model",
}
_NO_GAME: dict[str, Any] = {"game": "", "hosts": 0, "num_val": 0}


class SftConfig(Section):
    """What an SFT job learns from: conversations, or pairs of answers."""

    data: list[str] = Field(default_factory=list[str])
    """Parquet or JSONL files, on the pool, with the column `messages`: conversations in which the
    assistant's messages are learnt; `tools` and `images` may stand beside it. Pairs have `prompt`,
    `chosen` and `rejected`. Empty: not an SFT job."""
    objective: Objective = Field(default="sft", json_schema_extra=when("data"))
    """What is learnt. sft: the assistant's messages; dpo: of pairs, that the policy prefers the
    chosen answer to the rejected one; reward: of pairs, a reward model in the policy's place."""
    beta: float = Field(default=0.1, gt=0, le=1e3, json_schema_extra=when("objective", "dpo"))
    """β: how much a pair may move the policy from `algorithm.reference`; the greater the less. Of
    the IPO loss its τ."""
    dpo_loss: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid", json_schema_extra=when("objective", "dpo")
    )
    """Loss of a pair: −log σ(β(Δ_chosen − Δ_rejected)), where Δ is log π/π_ref of an answer, or
    (Δ_chosen − Δ_rejected − 1/2β)² with Δ by token (IPO)."""
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, json_schema_extra=when("dpo_loss", "sigmoid")
    )
    """Share of the pairs that are taken to be labelled the wrong way round (cDPO)."""
    sft_coef: float = Field(default=0.0, ge=0, le=1e6, json_schema_extra=when("objective", "dpo"))
    """Weight of the cross entropy of the chosen answers, by token, beside the loss of pairs."""
    center_coef: float = Field(
        default=0.0, ge=0, le=1e6, json_schema_extra=when("objective", "reward")
    )
    """Weight of (r_chosen + r_rejected)², which holds a reward model's scores around 0."""
    val_data: list[str] = Field(
        default_factory=list[str], json_schema_extra=when("objective", *_OF_PAIRS)
    )
    """Held-out pairs: on the versions that `training.test_freq` chooses, the share of them is told
    whose chosen answer wins (`val/mean_score`)."""

    @property
    def has_pairs(self) -> bool:
        """Whether rows are pairs of answers."""
        return bool(self.data) and self.objective in _OF_PAIRS

    @property
    def trains_rewards(self) -> bool:
        """Whether a reward model is trained in the policy's place."""
        return bool(self.data) and self.objective == "reward"


SFT_RULES = (
    Rule(
        "algorithm.loss=sft",
        lambda job: job.algorithm.loss == "sft" and not job.sft.data,
        "needs sft.data, and a job of kind sft",
    ),
    Rule(
        "algorithm.loss=dpo",
        lambda job: job.algorithm.loss == "dpo" and job.sft.objective != "dpo",
        "needs sft.data with pairs, and sft.objective=dpo",
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
        lambda job: (
            "reference" in job.algorithm.model_fields_set
            and not job.algorithm.kl_coef
            and job.algorithm.loss != "dpo"
        ),
        "has no effect while algorithm.kl_coef is {algorithm.kl_coef!r}: remove it, or set "
        "algorithm.kl_coef",
    ),
    Rule(
        "lora.dropout",
        lambda job: job.lora.dropout and job.algorithm.loss == "dpo",
        "is not built for DPO, whose weights of pairs come from a forward pass before the update, "
        "which has none: remove it",
    ),
    Rule(
        "lora.rank",
        lambda job: job.lora.rank and job.sft.trains_rewards,
        "is not built for reward models, whose checkpoints are whole models: remove it",
    ),
    Rule(
        "env",
        lambda job: job.env.game and job.sft.trains_rewards,
        "has no effect while sft.objective is reward, since a reward model plays no game: remove "
        "it, and let sft.val_data validate",
    ),
    Rule(
        "sft.val_data",
        lambda job: job.sft.val_data and job.env.num_val,
        "and a game cannot both validate: remove sft.val_data, or set env.num_val=0",
    ),
    Rule(
        "sft.val_data",
        lambda job: job.sft.val_data and job.algorithm.reference.moves,
        "needs a reference that stays, since only the learner has one that moves: remove it, or "
        "algorithm.reference.ema and reset_every",
    ),
)


def settle_sft(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of an SFT job with what it implies; any other tree as it is.

    Raises ValueError for a key that would have no effect.
    """
    tree = dict(values)
    section = _section(tree, "sft")
    if not section.get("data"):
        return tree
    objective = str(section.get("objective", "sft"))
    if objective not in _IMPLIED:
        return tree  # the section itself says what it may be
    job, implied_of = _NAMES[objective], _IMPLIED[objective]
    tree.setdefault("env", _NO_GAME)
    for key in _section(tree, "algorithm"):
        if key not in _READ[objective] and key not in implied_of["algorithm"]:
            raise ValueError(f"algorithm.{key} has no effect in {job}: remove it")
    for name, implied in implied_of.items():
        given = _section(tree, name)
        for key, value in implied.items():
            if given.get(key, value) != value:
                raise ValueError(
                    f"{name}.{key}={given[key]} has no effect in {job}, where it is {value}: "
                    "remove it"
                )
        tree[name] = {**given, **implied}
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section given as a map; empty for one that is missing or a model already."""
    found = tree.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
