"""Configuration of the algorithm: advantage, loss, off-policy correction, KL, and the critic."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from ...bounds.defaults import MAX_TOP_K
from ..section import OWN_FUNCTION, Section, when
from .advantages import AdvantageName, AggregationName
from .corrections import OF_WHOLE_SEQUENCES, CorrectionMask, CorrectionName
from .losses import CORRECTING_LOSSES, LOSS_OPTIONS, LossName
from .reference import ReferenceConfig
from .teacher import SELF, is_asked, why_no_teacher


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
    """Policy loss; SFT jobs have sft, the cross entropy, or dpo, by themselves."""
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
    """Your own advantage function, with the inputs of the named one: `module:function`, or a name
    registered by a package, available where the learner runs ([own
    algorithms](own-algorithms.md))."""
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
    `""` for all others. A folder, store URL, hub name, `RUN@STEP`, `job:NAME` (a serving job),
    `https://HOST/v1?model=NAME` (an API) or `self` (the policy with `teacher_context`). It needs
    the policy's tokenizer ([distillation](distillation.md))."""
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
    episodes, else `rollout.max_response_tokens`); 0: none."""
    overlong_factor: float = Field(default=1.0, ge=0, json_schema_extra=when("overlong_buffer"))
    """Largest overlong penalty, at the limit."""
    overlong_filter: bool = False
    """Leave episodes cut by a token limit out of all losses and their divisors (DAPO); their
    rewards still count in group mean and std."""
    length_coef: float = Field(default=0.0, ge=0)
    """Reward shorter episodes of a group by up to half of this; unsolved ones
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
        given = cast("dict[str, Any]", values)
        loss = given.get("loss")
        if loss not in CORRECTING_LOSSES:
            return given
        if given.get("correction", "none") != "none":
            raise ValueError(
                f"correction={given['correction']} cannot be used with loss={loss}, which corrects "
                "for the behaviour policy by itself: remove it"
            )
        further = ("correction_masks", "correction_normalise")
        if found := next((key for key in further if given.get(key)), None):
            raise ValueError(
                f"{found} cannot be used with loss={loss}, which corrects for the behaviour policy "
                "by itself: remove it"
            )
        return {**given, "correction": "none"}

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
        known = LOSS_OPTIONS.get(self.loss, {})
        for name, value in self.loss_options.items():
            if name not in known:
                there = f"it has {', '.join(known)}" if known else "it has none"
                raise ValueError(f"loss={self.loss} has no option {name[:40]!r}: {there}")
            least, most = known[name]
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
                    "teacher=self says of each token what the policy says itself: set "
                    "teacher_context to what only the teacher reads"
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
