"""The algorithm of a job: advantage, loss, off-policy correction, KL, and the critic."""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from .section import Section, when

AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "maxrl",
    "grpo_per_turn",
    "gigpo",
    "gae",
]
LossName = Literal["ppo", "gspo", "cispo", "dppo", "reinforce", "sft"]
CorrectionName = Literal["none", "tis", "icepop", "geometric", "mis", "veto", "decoupled", "m2po"]
AggregationName = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


class AlgorithmConfig(Section):
    """Advantage, policy loss, off-policy correction, KL."""

    advantage: AdvantageName = "grpo"
    """How rewards become advantages; gae is PPO and trains a critic beside the policy."""
    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount: per token for reinforce_pp and gae, per turn for grpo_per_turn, gigpo and turns as
    samples that earn what follows them (per turn only, then); default 1, for gigpo 0.95."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1, json_schema_extra=when("advantage", "gae"))
    """λ of the generalised advantage: 1 trusts the rewards, 0 the critic."""
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
        default=None, gt=0, json_schema_extra=when("loss", "ppo", "gspo", "dppo")
    )
    """Lower clip; default 0.2 (ppo, dppo), 3e-4 (gspo)."""
    clip_high: float | None = Field(
        default=None, gt=0, json_schema_extra=when("loss", "ppo", "gspo", "cispo", "dppo")
    )
    """Upper clip; default 0.2 (ppo, dppo), 4e-4 (gspo), 5 (cispo)."""
    dual_clip: float = Field(default=3.0, gt=1, json_schema_extra=when("loss", "ppo"))
    """Bound of the loss for negative advantages."""
    correction: CorrectionName = "tis"
    """Off-policy correction by the recorded behaviour log-probs; none for dppo, which corrects for
    them by itself."""
    correction_level: Literal["token", "sequence"] = Field(
        default="token", json_schema_extra=when("correction", "tis")
    )
    """Truncate each token's weight, or the product over the sequence."""
    correction_cap: float | None = Field(
        default=None, gt=0, json_schema_extra=when("correction", "tis", "mis", "icepop")
    )
    """Upper bound of the weight; default 2 (tis), 3 (mis), 5 (icepop)."""
    proximal: Literal["forward", "loglinear"] = Field(
        default="forward", json_schema_extra=when("correction", "decoupled")
    )
    """Proximal policy: a forward pass before the update, or interpolated by version."""
    router_replay: bool = False
    """Of a mixture of experts: record which experts read each token as it is generated, and train
    with those (R3), so that generator and learner compute with the same experts."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen initial policy; 0: no reference is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = Field(default="k3", json_schema_extra=when("kl_coef"))
    """Estimator of the KL; k1 in rewards only, its gradient in a loss is zero in expectation."""
    kl_in: Literal["loss", "reward"] = Field(default="loss", json_schema_extra=when("kl_coef"))
    """Where the KL enters."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
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

    @model_validator(mode="before")
    @classmethod
    def _dppo_corrects_by_itself(cls, values: Any) -> Any:
        """Let loss=dppo imply correction=none, and refuse another one."""
        if not isinstance(values, dict) or cast("dict[str, Any]", values).get("loss") != "dppo":
            return cast("Any", values)
        given = cast("dict[str, Any]", values)
        if given.get("correction", "none") != "none":
            raise ValueError(
                f"correction={given['correction']} cannot be used with loss=dppo, which corrects "
                "for the behaviour policy by itself: remove it"
            )
        return {**given, "correction": "none"}


class CriticConfig(Section):
    """The critic, which `algorithm.advantage: gae` trains; betas, weight decay, clipping of
    gradients, minibatches and memory are those of the learner."""

    path: str | None = None
    """Model whose weights it starts from; default: the policy's initial ones."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate; it rises and falls as `learner.schedule` says."""
    clip: float = Field(default=0.5, gt=0)
    """An update is not rewarded for moving a value further than this from where it was."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps, in which only the critic is trained and the policy stays as it is."""
