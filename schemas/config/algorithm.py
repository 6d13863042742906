"""Configuration of the algorithm: advantage, loss, off-policy correction, KL, and the critic."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import parse_qs, urlsplit, urlunsplit

from pydantic import Field, model_validator

from ..wire.bounds import MAX_TOP_K
from .sections import OWN_FUNCTION, Rule, Section, when

# Names of advantages and of loss aggregations.

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


# Names of off-policy corrections, and their masks.

CorrectionName = Literal["none", "tis", "icepop", "geometric", "mis", "veto", "decoupled", "m2po"]
OF_WHOLE_SEQUENCES = ("geometric", "mis", "veto")
"""Corrections that need a whole sequence at once."""


class CorrectionMask(Section):
    """Mask of tokens from which the policy has moved too far. w = π_o/π_b of a token: the policy
    before the update over the generating one."""

    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """What is dropped: a token by its own value; all of a sequence by the sum (of ratios: the
    product) or the mean (the geometric one) of its tokens' values, or as soon as one of its tokens
    is out of bounds."""
    of: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """What is bounded: w, or an estimate of KL(π_b‖π_o): k1 = −log w, k2 = (log w)²/2,
    k3 = w − 1 − log w."""
    low: float | None = None
    """Dropped below this."""
    high: float | None = None
    """Dropped above this."""
    only: Literal["all", "negative"] = "all"
    """negative: only where the advantage is negative (DeepSeek-V3.2's off-policy mask is
    `{over: sequence_mean, of: k1, high: δ, only: negative}`)."""

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> Self:
        low, high = self.low, self.high
        if low is None and high is None:
            raise ValueError("a mask needs low, high, or both: without a bound it drops nothing")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low={low:g} is not under high={high:g}: nothing would be left")
        if self.of in ("k2", "k3") and (low is not None or (high or 0) <= 0):
            raise ValueError(f"{self.of} is never negative: bound it from above, by high > 0")
        if self.of == "ratio" and any(bound is not None and bound <= 0 for bound in (low, high)):
            raise ValueError("a ratio is never negative: bound it by low > 0 and high > 0")
        return self


# Names and options of policy losses.

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


# The reference policy, to which a KL is taken.


class ReferenceConfig(Section):
    """The policy to which a KL is taken, where `algorithm.kl_coef` asks for one."""

    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """Model with the policy's tokenizer, as `model.path`; default: what the run began with."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """After each step the reference becomes this share of itself and the rest of the policy;
    default: it stays."""
    reset_every: int = Field(default=0, ge=0)
    """The reference becomes the policy after every so many steps; 0: never."""

    @model_validator(mode="after")
    def _moves_in_one_way(self) -> Self:
        if self.ema is not None and self.reset_every:
            raise ValueError("ema and reset_every both move the reference: choose one of them")
        return self

    @property
    def moves(self) -> bool:
        """Whether it changes during training."""
        return self.ema is not None or self.reset_every > 0


# Names and kinds of teachers for on-policy distillation.

SELF = "self"
"""The policy before each step, with a text that only a teacher reads."""
_JOB = "job:"
_CHECKPOINT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}@(?:\d{1,9}|last|best)")


def is_checkpoint(name: str) -> bool:
    """Return whether a name is a run's checkpoint, `RUN@STEP`, not a folder or model."""
    return _CHECKPOINT.fullmatch(name) is not None


def served_job(name: str) -> str | None:
    """Return the inference run that a teacher names; None for another kind."""
    return name.removeprefix(_JOB) if name.startswith(_JOB) else None


def is_endpoint(name: str) -> bool:
    """Return whether a teacher is a model behind an OpenAI-compatible API."""
    return name.startswith(("http://", "https://"))


def is_asked(name: str) -> bool:
    """Return whether generators ask the teacher as episodes end; otherwise learners load it."""
    return is_endpoint(name) or served_job(name) is not None


def endpoint(name: str) -> tuple[str, str]:
    """Return an endpoint's base URL, up to `/v1`, and its model."""
    parts = urlsplit(name)
    model = parse_qs(parts.query).get("model", [""])[0]
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", "")), model


def why_no_teacher(name: str) -> str:
    """Return what is wrong with a teacher's name; empty: nothing."""
    if served_job(name) == "":
        return "job: names no job: write job:NAME, of one that `tinkermq serve` has started"
    if not is_endpoint(name):
        return ""
    base, model = endpoint(name)
    parts = urlsplit(base)
    if not parts.hostname or parts.username or parts.password:
        return f"{base} must be the URL of an API: https://HOST/v1?model=NAME, without a password"
    if not model or not re.fullmatch(r"[\w./:@+-]{1,200}", model):
        return f"{name[:200]} names no model: write https://HOST/v1?model=NAME"
    return ""


class AlgorithmConfig(Section):
    """Advantage, policy loss, off-policy correction, KL."""

    advantage: AdvantageName = "grpo"
    """How rewards become advantages; gae is PPO and trains a critic."""
    advantage_std: Literal["group", "batch", "none"] = Field(
        default="group", json_schema_extra=when("advantage", "grpo", "gigpo")
    )
    """Standard deviation that grpo and both parts of gigpo divide by; none: no division (gigpo's
    F_norm = 1); batch: grpo only."""
    reward_components: dict[str, float] = Field(
        default_factory=dict[str, float],
        max_length=16,
        json_schema_extra=when("advantage", "gdpo"),
    )
    """Weights of the numbers in the final `info` that gdpo adds up, each normalised in its group:
    `{correct: 1, format: 0.2}`."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount: per token for reinforce_pp and gae; per turn for grpo_per_turn, grpo_per_step,
    gigpo and turns as samples with returns. Default 1, for gigpo 0.95."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1, json_schema_extra=when("advantage", "gae"))
    """λ of the generalised advantage: 1 trusts the rewards, 0 the critic."""
    gae_lambda_length: float | None = Field(
        default=None, gt=0, le=1e6, json_schema_extra=when("advantage", "gae")
    )
    """α of a length-dependent λ for the policy, 1 − 1 / (α · tokens), at least 0 (VAPO); the critic
    keeps `gae_lambda`."""
    turn_gamma: float | None = Field(
        default=None, ge=0, le=1, json_schema_extra=when("advantage", "gae")
    )
    """gae's discount from a turn's last token to the next turn; `gamma` then holds within turns."""
    turn_lambda: float | None = Field(
        default=None, ge=0, le=1, json_schema_extra=when("advantage", "gae")
    )
    """gae's λ from a turn's last token to the next turn, instead of `gae_lambda`."""
    step_weight: float = Field(default=1.0, ge=0, json_schema_extra=when("advantage", "gigpo"))
    """Weight of the advantage among turns with equal observations."""
    sample: Literal["episode", "turn"] = "episode"
    """Unit that is rewarded and weighed: an episode, or each turn with the conversation before it
    as its prompt. Turns are compared by number within their group."""
    turn_reward: Literal["reward", "return"] = Field(
        default="return", json_schema_extra=when("sample", "turn")
    )
    """Reward of a turn as a sample: its own, or the discounted return from it."""
    branch_credit: Literal["episode", "own", "both"] = "episode"
    """Credit of an agent's branch with its own reward: the episode's; its own, compared with
    branches of its role in the group; or the sum of both advantages."""
    loss: LossName = "ppo"
    """Policy loss; SFT runs have sft, the cross entropy, by themselves."""
    clip_low: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=when(
            "loss", "ppo", "gspo", "gmpo", "cispo", "clip_cov", "dppo", "dppo_kl"
        ),
    )
    """Lower clip; default 0.2 (ppo, clip_cov, dppo), 3e-4 (gspo), 0.4 (gmpo), 0.05 (dppo_kl), none
    (cispo, of the weight itself)."""
    clip_high: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=when(
            "loss", "ppo", "gspo", "gmpo", "cispo", "clip_cov", "dppo", "dppo_kl"
        ),
    )
    """Upper clip; default 0.2 (ppo, clip_cov, dppo), 4e-4 (gspo), 0.4 (gmpo), 5 (cispo), 0.05
    (dppo_kl)."""
    loss_options: dict[str, float] = Field(default_factory=dict[str, float])
    """Options of the loss besides its clips: `{tau_pos: 1, tau_neg: 1.05}` of sapo
    ([losses](training.md#losses))."""
    dual_clip: float = Field(default=3.0, gt=1, json_schema_extra=when("loss", "ppo"))
    """Bound of the loss at negative advantages."""
    correction: CorrectionName = "tis"
    """Off-policy correction with the recorded behaviour log-probs; none for dppo, dppo_kl, topr and
    vespo, which correct themselves."""
    correction_level: Literal["token", "sequence"] = Field(
        default="token", json_schema_extra=when("correction", "tis")
    )
    """Truncate each token's weight, or that of the sequence."""
    correction_cap: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=when("correction", "tis", "mis", "icepop", "geometric", "decoupled"),
    )
    """Upper bound of weights, or of what is kept; default 2 (tis), 3 (mis), 5 (icepop), 1.01
    (geometric), none (decoupled)."""
    correction_floor: float | None = Field(
        default=None, ge=0, json_schema_extra=when("correction", "icepop", "geometric", "veto")
    )
    """Lower bound of what is kept; default 0.5 (icepop), 0.99 (geometric), 1e-4 (veto)."""
    correction_budget: float | None = Field(
        default=None, gt=0, json_schema_extra=when("correction", "m2po")
    )
    """Bound of the second moment of log w; default 0.04."""
    correction_masks: Annotated[list[CorrectionMask], Field(max_length=16)] = Field(
        default_factory=list[CorrectionMask]
    )
    """Further masks, each with its bounds."""
    correction_normalise: bool = False
    """Divide the weights by their batch mean; needs a forward pass before the update."""
    correction_denominator: Literal["all", "kept"] = "all"
    """Whether dropped tokens count in the divisor of losses; kept: they do not, which needs a
    forward pass before the update."""
    proximal: Literal["forward", "loglinear"] = Field(
        default="forward", json_schema_extra=when("correction", "decoupled")
    )
    """Proximal policy: a forward pass before the update, or interpolation by version."""
    router_replay: bool = False
    """For mixtures of experts: record the experts of each token at generation and train with them
    (R3)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy; 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3", json_schema_extra=when("kl_coef")
    )
    """Estimator of the KL. k1 only in rewards, since its gradient in a loss is zero in expectation;
    k1+ and k3+ have the gradient of k2, the KL's."""
    kl_in: Literal["loss", "reward"] = Field(default="loss", json_schema_extra=when("kl_coef"))
    """Where the KL enters."""
    kl_importance: bool = Field(default=False, json_schema_extra=when("kl_coef"))
    """Weigh the KL loss by π/π_b of each token, which makes it unbiased off-policy
    (DeepSeek-V3.2)."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    own_advantage: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Your own advantage function, `module:function` or a registered name, with the inputs of
    `advantage` ([own algorithms](own-algorithms.md))."""
    own_loss: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Your own policy loss, instead of `loss`."""
    own_correction: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Your own off-policy weights, instead of `correction`; masks still apply."""
    own_mask: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Your own mask of trained tokens, on top of the correction."""
    own_filter: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Your own filter of trained groups; those left out give their admission credit back."""
    teacher: (
        Annotated[str, Field(min_length=1, max_length=4096)]
        | Annotated[dict[str, str], Field(min_length=1, max_length=16)]
        | None
    ) = None
    """On-policy distillation: the model that scores the policy's tokens, or one per `data_source`,
    `""` for all others: a folder, URL, hub name, `RUN@STEP`, `job:NAME`,
    `https://HOST/v1?model=NAME` or `self` ([distillation](distillation.md))."""
    teacher_loss: Literal["reverse_kl", "forward_kl"] = Field(
        default="reverse_kl", json_schema_extra=when("teacher")
    )
    """reverse_kl: log π_teacher − log π_o of each drawn token is its advantage; forward_kl:
    KL(π_teacher‖π) over the teacher's likeliest tokens is a loss."""
    teacher_top_k: int = Field(
        default=32, ge=1, le=MAX_TOP_K, json_schema_extra=when("teacher_loss", "forward_kl")
    )
    """Likeliest tokens used by forward_kl; the rest counts as one event."""
    teacher_coef: float = Field(default=1.0, gt=0, le=1e6, json_schema_extra=when("teacher"))
    """Factor of the teacher's advantage or loss."""
    teacher_normalise: bool = Field(
        default=False, json_schema_extra=when("teacher_loss", "reverse_kl")
    )
    """Divide the advantage by its standard deviation over the batch."""
    teacher_context: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, json_schema_extra=when("teacher")
    )
    """What only the teacher reads: name of a text in the game's final `info` (such as a solution),
    appended to the first prompt."""
    teacher_context_tokens: int = Field(
        default=1024, ge=1, le=1 << 20, json_schema_extra=when("teacher_context")
    )
    """Largest length of it; an episode with a longer one is given up."""
    reward_coef: float = Field(default=1.0, ge=0, le=1e6, json_schema_extra=when("teacher"))
    """Factor of the rewards' advantages beside a teacher; 0: the teacher alone, which allows
    `rollout.group_size: 1`."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; with `entropy_target` its initial value."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Target entropy per token, in nats: after a step below it the bonus's weight rises, else it
    falls, and it only counts below (Skywork-OR1)."""
    entropy_coef_step: float = Field(
        default=0.001, gt=0, le=1, json_schema_extra=when("entropy_target")
    )
    """Change of that weight per step."""
    entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the batch's tokens that rewards train, those of the highest entropy; the rest still
    counts in divisors. Below 1 it needs a forward pass before the update."""
    loss_agg: AggregationName = "token-mean"
    """How token losses are aggregated."""
    loss_agg_length: int | None = Field(
        default=None, ge=1, json_schema_extra=when("loss_agg", "seq-mean-token-sum-norm")
    )
    """Constant divisor; default `rollout.max_response_tokens`."""
    filter_equal_rewards: bool = False
    """Drop groups with equal rewards; each gives its admission credit back (DAPO)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft penalty over the last tokens before the limit (`rollout.max_turn_tokens` for one-turn
    episodes, else `rollout.max_response_tokens`), by the tokens that the policy generated; 0:
    none."""
    overlong_factor: float = Field(default=1.0, ge=0, json_schema_extra=when("overlong_buffer"))
    """Largest overlong penalty, at the limit."""
    overlong_filter: bool = False
    """Leave episodes cut by a token limit out of all losses and their divisors (DAPO); their
    rewards still count in group mean and std."""
    length_coef: float = Field(default=0.0, ge=0)
    """Reward episodes of a group with fewer generated tokens by up to half of this; unsolved ones
    (`evaluation.success_reward`) only lose by length (Kimi k1.5)."""

    @property
    def teachers(self) -> dict[str, str]:
        """Teachers by data source; `""`: for all others."""
        return {"": self.teacher} if isinstance(self.teacher, str) else dict(self.teacher or {})

    @property
    def loaded_teachers(self) -> dict[str, str]:
        """Teachers that learners load, by data source."""
        return {
            source: name
            for source, name in self.teachers.items()
            if name != SELF and not is_asked(name)
        }

    @property
    def asked_teachers(self) -> dict[str, str]:
        """Teachers that generators ask, by data source."""
        return {source: name for source, name in self.teachers.items() if is_asked(name)}

    def renamed(self, places: Mapping[str, str]) -> "AlgorithmConfig":
        """Return a copy with other names of teachers and reference."""
        teachers = {source: places.get(name, name) for source, name in self.teachers.items()}
        path = self.reference.path
        reference = self.reference.model_copy(update={"path": places.get(path or "", path)})
        changes: dict[str, Any] = {"teacher": teachers} if teachers else {}
        if path is not None:
            changes["reference"] = reference
        return self.model_copy(update=changes)

    @property
    def weighs_whole_batches(self) -> bool:
        """Whether correction weights depend on the whole batch."""
        return (
            self.correction == "m2po"
            or self.correction_normalise
            or self.correction_denominator == "kept"
        )

    @property
    def corrects_sequences(self) -> bool:
        """Whether the correction treats a sequence as a whole."""
        by_weight = self.correction == "tis" and self.correction_level == "sequence"
        by_mask = any(mask.over != "token" for mask in self.correction_masks)
        return self.correction in OF_WHOLE_SEQUENCES or by_weight or by_mask

    @property
    def discount(self) -> float:
        """The discount in effect."""
        if self.gamma is None:
            return 0.95 if self.advantage == "gigpo" else 1.0
        return self.gamma

    @property
    def token_discount(self) -> float:
        """The discount between tokens (for per-turn advantages: between turns).

        Turns as samples with returns are discounted once, between turns.
        """
        return 1.0 if self.sample == "turn" and self.turn_reward == "return" else self.discount

    @property
    def end_discount(self) -> float:
        """The discount of the value after an episode that a limit cut."""
        return self.token_discount if self.turn_gamma is None else self.turn_gamma

    @model_validator(mode="before")
    @classmethod
    def _some_losses_correct_by_themselves(cls, values: Any) -> Any:
        """Let self-correcting losses imply correction=none, and refuse any other."""
        if not isinstance(values, dict):
            return values
        section = cast("dict[str, Any]", values)
        loss = section.get("loss")
        if loss not in CORRECTING_LOSSES:
            return section
        if section.get("correction", "none") != "none":
            raise ValueError(
                f"correction={section['correction']} cannot be used with loss={loss}, which "
                "corrects for the behaviour policy by itself: remove it"
            )
        further = ("correction_masks", "correction_normalise")
        if key_in_use := next((key for key in further if section.get(key)), None):
            raise ValueError(
                f"{key_in_use} cannot be used with loss={loss}, which corrects for the "
                "behaviour policy by itself: remove it"
            )
        return {**section, "correction": "none"}

    @model_validator(mode="after")
    def _options_are_known(self) -> Self:
        if self.advantage == "gdpo" and not self.reward_components:
            raise ValueError(
                "advantage=gdpo needs reward_components, the numbers of `info` that it adds up: "
                "{correct: 1, format: 0.2}"
            )
        if self.advantage == "gdpo" and (self.sample, self.branch_credit) != ("episode",) * 2:
            raise ValueError(
                "advantage=gdpo has rewards by episode: set sample and branch_credit to episode"
            )
        if self.advantage == "gigpo" and self.advantage_std == "batch":
            raise ValueError(
                "advantage_std=batch is not known of gigpo, whose parts have groups of their own: "
                "choose group or none"
            )
        allowed = LOSS_OPTIONS.get(self.loss, {})
        for name, value in self.loss_options.items():
            if name not in allowed:
                there = f"it has {', '.join(allowed)}" if allowed else "it has none"
                raise ValueError(f"loss={self.loss} has no option {name[:40]!r}: {there}")
            least, most = allowed[name]
            if not least <= value <= most:
                raise ValueError(
                    f"{name}={value:g} of loss={self.loss}: from {least:g} to {most:g}"
                )
        options = {"cov_low": 1.0, "cov_high": 5.0, **self.loss_options}
        if self.loss == "clip_cov" and options["cov_low"] >= options["cov_high"]:
            raise ValueError("cov_low is not under cov_high: no token would be left out")
        return self

    @model_validator(mode="after")
    def _kl_is_weighed_in_the_loss(self) -> Self:
        if self.kl_importance and self.kl_in == "reward":
            raise ValueError(
                "kl_importance weighs the KL of the loss: remove it, or set kl_in=loss"
            )
        return self

    @model_validator(mode="after")
    def _teachers_can_teach(self) -> Self:
        for name in self.teachers.values():
            if wrong := why_no_teacher(name):
                raise ValueError(f"teacher: {wrong}")
            if name == SELF and self.teacher_context is None:
                raise ValueError(
                    "teacher=self scores each token as the policy does: set teacher_context to a "
                    "text that only the teacher reads"
                )
        return self

    @model_validator(mode="after")
    def _bounds_are_not_crossed(self) -> Self:
        low, high = self.clip_low, self.clip_high or 5.0
        if self.loss == "cispo" and low is not None and low >= high:
            raise ValueError(
                f"clip_low={low:g} is not under clip_high={high:g}: all tokens would weigh the same"
            )
        floors, caps = {"icepop": 0.5, "geometric": 0.99}, {"icepop": 5.0, "geometric": 1.01}
        if self.correction in floors:
            floor = self.correction_floor
            floor = floors[self.correction] if floor is None else floor
            cap = self.correction_cap or caps[self.correction]
            if floor >= cap:
                raise ValueError(
                    f"correction_floor={floor:g} is not under correction_cap={cap:g}: "
                    f"{self.correction} would keep nothing"
                )
        return self


# Configuration of the critic.


class CriticConfig(Section):
    """The critic of `algorithm.advantage: gae`. Betas, weight decay, gradient clipping, minibatches
    and memory are the learner's."""

    path: str | None = None
    """Model of its initial weights; default: the policy's initial ones."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate, scheduled as `learner.schedule`."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """λ of the critic's returns; default: `algorithm.gae_lambda`."""
    bootstrap_cut: bool = False
    """Value the end of an episode that a turn or token limit cut by the critic instead of 0; needs
    one more pass over such episodes."""
    clip: float = Field(default=0.5, gt=0)
    """Largest rewarded change of a value per update."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critic is trained."""


# Rules between teachers and other sections (`rules.py` has all others).

TEACHER_RULES = (
    Rule(
        "algorithm.reward_coef=0",
        lambda job: job.algorithm.reward_coef == 0 and job.algorithm.filter_equal_rewards,
        "trains on the teacher alone, and algorithm.filter_equal_rewards drops groups by rewards, "
        "where there are none all of them: remove one of the two",
    ),
    Rule(
        "algorithm.teacher",
        lambda job: job.algorithm.asked_teachers and job.rollout.temperature != 1,
        "is asked for log-probs at temperature 1, and rollout.temperature is "
        "{rollout.temperature}: set it to 1, or name a model that the learner loads",
    ),
    Rule(
        "algorithm.teacher",
        lambda job: job.algorithm.asked_teachers and job.training.tasks == "external",
        "is asked by the pool's generators, and training.tasks=external has none: name a model "
        "that the learner loads",
    ),
    Rule(
        "algorithm.teacher_context",
        lambda job: job.algorithm.teacher_context and job.agent.runs_programs,
        "belongs to the first prompt of a game, and programs make theirs themselves: remove it",
    ),
    Rule(
        "algorithm.teacher_context_tokens",
        lambda job: (
            job.algorithm.teacher_context
            and job.rollout.max_tokens + job.algorithm.teacher_context_tokens
            > job.learner.max_row_tokens
        ),
        "({algorithm.teacher_context_tokens}) and rollout.max_tokens ({rollout.max_tokens}) are "
        "over learner.max_row_tokens ({learner.max_row_tokens}): raise it with "
        "learner.microbatch_tokens",
    ),
)
