"""The algorithm of a job: advantage, loss, off-policy correction, KL, and the critic."""

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
    """How rewards become advantages; gae is PPO and trains a critic beside the policy."""
    advantage_std: Literal["group", "batch", "none"] = Field(
        default="group", json_schema_extra=when("advantage", "grpo", "gigpo")
    )
    """Whose standard deviation grpo and both parts of gigpo divide by; none: by nothing (gigpo's
    F_norm = 1). batch is grpo's alone."""
    reward_components: dict[str, float] = Field(
        default_factory=dict[str, float],
        max_length=16,
        json_schema_extra=when("advantage", "gdpo"),
    )
    """What gdpo adds up, with weights: numbers that the game tells in `info` at an episode's end,
    each normalised in its group by itself, so that none drowns the others. `{correct: 1, format:
    0.2}`."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount: per token for reinforce_pp and gae, per turn for grpo_per_turn, grpo_per_step,
    gigpo and turns as samples that earn what follows them (per turn only, then); default 1, for
    gigpo 0.95."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1, json_schema_extra=when("advantage", "gae"))
    """λ of the generalised advantage: 1 trusts the rewards, 0 the critic."""
    gae_lambda_length: float | None = Field(
        default=None, gt=0, le=1e6, json_schema_extra=when("advantage", "gae")
    )
    """α of a λ for the policy's advantages that grows with the sample, in place of `gae_lambda`,
    which stays the critic's: 1 − 1 / (α · tokens), at least 0 (VAPO)."""
    turn_gamma: float | None = Field(
        default=None, ge=0, le=1, json_schema_extra=when("advantage", "gae")
    )
    """Discount of gae from a turn's last token to the next turn, in place of `gamma`, which is then
    that between the tokens of a turn."""
    turn_lambda: float | None = Field(
        default=None, ge=0, le=1, json_schema_extra=when("advantage", "gae")
    )
    """λ of gae from a turn's last token to the next turn, in place of `gae_lambda`."""
    step_weight: float = Field(default=1.0, ge=0, json_schema_extra=when("advantage", "gigpo"))
    """Weight of the advantage among turns that answer equal observations."""
    sample: Literal["episode", "turn"] = "episode"
    """What is rewarded and weighed as one: an episode, or each of its turns with the conversation
    before it as its prompt. Turns are compared with those of the same number in their group."""
    turn_reward: Literal["reward", "return"] = Field(
        default="return", json_schema_extra=when("sample", "turn")
    )
    """What a turn as a sample earns: its own reward, or that and the later ones discounted."""
    branch_credit: Literal["episode", "own", "both"] = "episode"
    """What an agent's branch with a reward of its own is credited with: the episode's, as all else;
    its own, compared with the branches of its role in the group; or the sum of both advantages."""
    loss: LossName = "ppo"
    """Policy loss; SFT jobs have sft, the cross entropy, by themselves."""
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
    """What the loss has beside its clips, by name: `{tau_pos: 1, tau_neg: 1.05}` of sapo
    ([losses](training.md#losses))."""
    dual_clip: float = Field(default=3.0, gt=1, json_schema_extra=when("loss", "ppo"))
    """Bound of the loss for negative advantages."""
    correction: CorrectionName = "tis"
    """Off-policy correction by the recorded behaviour log-probs; none for dppo, dppo_kl, topr and
    vespo, which correct for them by themselves."""
    correction_level: Literal["token", "sequence"] = Field(
        default="token", json_schema_extra=when("correction", "tis")
    )
    """Truncate each token's weight, or the product over the sequence."""
    correction_cap: float | None = Field(
        default=None,
        gt=0,
        json_schema_extra=when("correction", "tis", "mis", "icepop", "geometric", "decoupled"),
    )
    """Upper bound of the weight, or of what is kept; default 2 (tis), 3 (mis), 5 (icepop), 1.01
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
    """Masks beside what the correction itself drops: any number, each with its bounds."""
    correction_normalise: bool = False
    """Divide the weights by their mean over the batch; needs a forward pass before the update."""
    correction_denominator: Literal["all", "kept"] = "all"
    """Whether tokens that are dropped count in what losses are divided by; kept, where they do not,
    needs a forward pass before the update."""
    proximal: Literal["forward", "loglinear"] = Field(
        default="forward", json_schema_extra=when("correction", "decoupled")
    )
    """Proximal policy: a forward pass before the update, or interpolated by version."""
    router_replay: bool = False
    """Of a mixture of experts: record which experts read each token as it is generated, and train
    with those (R3), so that generator and learner compute with the same experts."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference policy; 0: none is loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        default="k3", json_schema_extra=when("kl_coef")
    )
    """Estimator of the KL; k1 in rewards only, its gradient in a loss is zero in expectation. k1+
    and k3+ have the gradient of k2, which is that of the KL."""
    kl_in: Literal["loss", "reward"] = Field(default="loss", json_schema_extra=when("kl_coef"))
    """Where the KL enters."""
    kl_importance: bool = Field(default=False, json_schema_extra=when("kl_coef"))
    """Weigh the KL in the loss by π/π_b of each token, which makes its estimate unbiased where the
    policy has moved from what drew the token (DeepSeek-V3.2)."""
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    own_advantage: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """An advantage of one's own in the place of the one named, whose inputs it gets:
    `module:function`, or the name under which a package has registered it, found where the learner
    runs ([own algorithms](own-algorithms.md))."""
    own_loss: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """A policy loss of one's own in the place of `loss`."""
    own_correction: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """Off-policy weights of one's own in the place of `correction`'s; masks are laid over them."""
    own_mask: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """A mask of one's own, laid over the correction: which tokens are trained."""
    own_filter: str | None = Field(default=None, pattern=OWN_FUNCTION, max_length=200)
    """A filter of one's own: which groups are trained; those left out give their admission credit
    back."""
    teacher: (
        Annotated[str, Field(min_length=1, max_length=4096)]
        | Annotated[dict[str, str], Field(min_length=1, max_length=16)]
        | None
    ) = None
    """On-policy distillation: the model that says of each token that the policy drew how likely it
    was; several by the data source of the rows that each teaches, `""` for all others. It is named
    by folder, URL of a store, name of the hub, or `RUN@STEP`; `job:NAME` is a job that serves,
    `https://HOST/v1?model=NAME` an API, `self` the policy with a `teacher_context`. It must have
    the policy's tokenizer ([distillation](distillation.md))."""
    teacher_loss: Literal["reverse_kl", "forward_kl"] = Field(
        default="reverse_kl", json_schema_extra=when("teacher")
    )
    """How it teaches: by log π_teacher − log π_o of each token that was drawn, as its advantage; or
    by KL(π_teacher‖π) over its likeliest tokens in the place of each, as a loss."""
    teacher_top_k: int = Field(
        default=32, ge=1, le=MAX_TOP_K, json_schema_extra=when("teacher_loss", "forward_kl")
    )
    """Likeliest tokens that forward_kl looks at; all others are taken as one event."""
    teacher_coef: float = Field(default=1.0, gt=0, le=1e6, json_schema_extra=when("teacher"))
    """What the advantage, or the loss, of a teacher is multiplied by."""
    teacher_normalise: bool = Field(
        default=False, json_schema_extra=when("teacher_loss", "reverse_kl")
    )
    """Divide the advantage by its standard deviation over the batch."""
    teacher_context: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, json_schema_extra=when("teacher")
    )
    """What the teacher reads and the policy does not: the name of a text that the game tells in
    `info` at an episode's end (a solution, say), which stands at the end of the first prompt."""
    teacher_context_tokens: int = Field(
        default=1024, ge=1, le=1 << 20, json_schema_extra=when("teacher_context")
    )
    """Tokens by which it may make the prompt longer; an episode with a longer one is given up."""
    reward_coef: float = Field(default=1.0, ge=0, le=1e6, json_schema_extra=when("teacher"))
    """What the advantages of rewards are multiplied by beside a teacher's; 0: it teaches alone, and
    `rollout.group_size: 1` will do."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; with `entropy_target` that of the first step."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy of a token, in nats, at which the policy is held: after a step below it the weight of
    the bonus rises, after others it falls, and it counts only below (Skywork-OR1)."""
    entropy_coef_step: float = Field(
        default=0.001, gt=0, le=1, json_schema_extra=when("entropy_target")
    )
    """How far the weight of the entropy bonus rises or falls after a step."""
    entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the batch's tokens that rewards train: those with the highest entropy. The others
    count in what losses are divided by. Below 1 it needs a forward pass before the update."""
    loss_agg: AggregationName = "token-mean"
    """How token losses become one number."""
    loss_agg_length: int | None = Field(
        default=None, ge=1, json_schema_extra=when("loss_agg", "seq-mean-token-sum-norm")
    )
    """Constant length that divides; default `rollout.max_response_tokens`."""
    filter_equal_rewards: bool = False
    """Drop groups whose rewards are all equal; each gives its admission credit back (DAPO)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft penalty over the last so many tokens before the limit (`rollout.max_turn_tokens` of an
    episode of one turn, else `rollout.max_response_tokens`); 0: none."""
    overlong_factor: float = Field(default=1.0, ge=0, json_schema_extra=when("overlong_buffer"))
    """Largest overlong penalty: that of an episode which a token limit ended."""
    overlong_filter: bool = False
    """Leave episodes that a token limit ended out of the losses, the critic's too, and out of what
    those are divided by (DAPO); their rewards still count in their group's mean and std."""
    length_coef: float = Field(default=0.0, ge=0)
    """Reward the shorter episodes of a group, by up to half of this; those that are not solved
    (`evaluation.success_reward`) only lose by being long (Kimi k1.5)."""

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by data source; `""` for all that have none of their own."""
        return {"": self.teacher} if isinstance(self.teacher, str) else dict(self.teacher or {})

    @property
    def loaded_teachers(self) -> dict[str, str]:
        """Those that learners load, by data source."""
        return {
            source: name
            for source, name in self.teachers.items()
            if name != SELF and not is_asked(name)
        }

    @property
    def asked_teachers(self) -> dict[str, str]:
        """Those that generators ask, by data source."""
        return {source: name for source, name in self.teachers.items() if is_asked(name)}

    def renamed(self, places: Mapping[str, str]) -> "AlgorithmConfig":
        """Return the same with other names for teachers and reference, where there are some."""
        teachers = {source: places.get(name, name) for source, name in self.teachers.items()}
        path = self.reference.path
        reference = self.reference.model_copy(update={"path": places.get(path or "", path)})
        changes: dict[str, Any] = {"teacher": teachers} if teachers else {}
        if path is not None:
            changes["reference"] = reference
        return self.model_copy(update=changes)

    @property
    def weighs_whole_batches(self) -> bool:
        """Whether the weights of the correction hang on the whole batch."""
        return (
            self.correction == "m2po"
            or self.correction_normalise
            or self.correction_denominator == "kept"
        )

    @property
    def corrects_sequences(self) -> bool:
        """Whether the correction keeps, drops or weighs a sequence as a whole."""
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
        """The discount from token to token (of advantages by turn: from turn to turn).

        Turns as samples that earn what follows them are discounted once, from turn to turn.
        """
        return 1.0 if self.sample == "turn" and self.turn_reward == "return" else self.discount

    @property
    def end_discount(self) -> float:
        """The discount of what is expected behind an episode that a limit ended."""
        return self.token_discount if self.turn_gamma is None else self.turn_gamma

    @model_validator(mode="before")
    @classmethod
    def _some_losses_correct_by_themselves(cls, values: Any) -> Any:
        """Let such a loss imply correction=none, and refuse another one."""
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
