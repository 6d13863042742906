"""Sections of a configuration: unknown keys and keys without effect are errors."""

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from ..wire.bounds import bounded
from ..wire.errors import ConfigError
from ..wire.field_docs import described

if TYPE_CHECKING:
    from .job import JobConfig


MAX_WAIT_S = 86_400.0
"""Longest configurable wait."""
OWN_FUNCTION = (
    r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
    r"|[a-z][a-z0-9_-]*)$"
)
"""A user's function: `module:function`, or a name registered by a package."""
MAX_TAGS = 32
MAX_NOTES = 4000
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/=+@-]{0,63}$")]
"""A tag, or the name of a group."""


def when(key: str, *values: Any) -> dict[str, Any]:
    """Declare that a field is used only if `key` of the same section has one of `values`.

    Without values: if it is set and not 0.
    """
    return {"when": {"key": key, "values": list(values)}}


def only_while(field: FieldInfo) -> str:
    """Return which values of another key a field needs, as Markdown; empty: none."""
    rule = _rule(field)
    if rule is None:
        return ""
    values = "|".join(str(value) for value in rule["values"])
    return f" Only with `{rule['key']}{f': {values}' if values else ''}`."


def _rule(field: FieldInfo) -> dict[str, Any] | None:
    extra = field.json_schema_extra
    return cast("dict[str, Any]", extra).get("when") if isinstance(extra, dict) else None


@dataclass(frozen=True)
class Rule:
    """A refused combination of values of several sections."""

    key: str
    """What is refused, as the user wrote it; `{section.key}` stands for a value."""
    when: "Callable[[JobConfig], Any]"
    """Whether a configuration has that combination."""
    because: str
    """The rest of the sentence that `key` begins: why, and what to do."""

    def sentence(self, job: "JobConfig") -> str:
        """Return the sentence with the configuration's values."""
        return f"{self.key} {self.because}".format_map(dict(job))


class Section(BaseModel):
    """Base of sections: unknown keys are errors, and every value is bounded."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return described(cls, core_schema, handler)

    @model_validator(mode="after")
    def _no_ineffective_key(self) -> Self:
        for name in self.model_fields_set:
            rule = self._unmet(name)
            if rule is not None:
                values = " or ".join(repr(value) for value in rule["values"])
                raise ValueError(
                    f"{name} has no effect while {rule['key']} is "
                    f"{getattr(self, rule['key'])!r}: remove it, or set {rule['key']}"
                    + (f" to {values}" if values else "")
                )
        return self

    def _unmet(self, name: str) -> dict[str, Any] | None:
        """Return the rule by which a field is unused: its own, or that of the key it names."""
        rule = _rule(type(self).model_fields[name])
        if rule is None:
            return None
        value = getattr(self, rule["key"])
        met = value in rule["values"] if rule["values"] else bool(value)
        return self._unmet(rule["key"]) or (None if met else rule)


# Trees of keys before they are validated.


def given_section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section given as a map; empty if it is missing or already a model."""
    section = tree.get(name)
    return cast("Mapping[str, Any]", section) if isinstance(section, Mapping) else {}


def with_implied(
    tree: Mapping[str, Any], implied: Mapping[str, Mapping[str, Any]], kind: str
) -> dict[str, Any]:
    """Return a tree with keys whose values follow from the kind of run.

    Raises ValueError for one of them that has another value.
    """
    settled = dict(tree)
    for name, keys in implied.items():
        section = given_section(tree, name)
        for key, value in keys.items():
            if section.get(key, value) != value:
                raise ValueError(
                    f"{name}.{key}={section[key]} has no effect in {kind}, where it is {value}: "
                    "remove it"
                )
        settled[name] = {**section, **keys}
    return settled


# Configuration of episodes: number, sampling, and length.

MAX_EPISODES = 4096
"""Largest group size."""


class RolloutConfig(Section):
    """How episodes are generated."""

    group_size: int = Field(default=8, ge=1, le=MAX_EPISODES)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, also for the learner's log-probs."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int = Field(default=1, ge=1)
    """Policy turns per episode."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A task with a longer first prompt fails."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Generated tokens per turn."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Tokens after the first prompt, observations included."""
    max_tries: int = Field(default=3, ge=1, le=100)
    """Tries of an episode before its task fails."""
    oversample: int = Field(default=0, ge=0)
    """Episodes started beyond `group_size`: the first `group_size` to end are the group, the others
    are cut. This favours short episodes, measured by `rollout/oversample/*`."""

    @property
    def response_limit(self) -> int:
        """Tokens after the first prompt at which an episode is cut."""
        return self.max_turn_tokens if self.max_turns == 1 else self.max_response_tokens

    @property
    def max_tokens(self) -> int:
        """Longest whole sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens


# Configuration of the learner.

_PASS_TOKENS = 16384


Dtype = Literal["auto", "float32", "bfloat16"]


def resolve_dtype(dtype: Dtype, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """Return the dtype that a key asks for; auto: bfloat16 on a GPU, float32 on CPUs."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype


Beta = Annotated[float, Field(ge=0, lt=1)]


class LearnerConfig(Section):
    """The optimiser and its memory."""

    slots: int = Field(default=1, ge=1, le=64)
    """Slots of the learner with all ranks: linked GPUs of one node, or CPU shares."""
    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that share model and batch (FSDP2), with equal parts of the slots."""
    machines: int = Field(default=1, ge=1, le=64)
    """Nodes over which the ranks may be spread equally, as few as needed."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Copies of the model among the ranks (HSDP), each sharded over ranks / replicas of them; only
    gradients travel between copies."""
    context_parallel: int = Field(default=1, ge=1, le=64)
    """Neighbouring ranks that share the columns of each row (Ulysses), so that each holds
    activations of a part. Must divide the ranks and the model's heads."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; muon: the momentum of the hidden layers' matrices, an adapter's too, made orthogonal,
    with AdamW for embeddings, output layer, norms and biases."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate; muon's updates are as large as AdamW's at the same rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, json_schema_extra=when("schedule", "linear", "cosine")
    )
    """Final learning rate, as a share of the peak."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay, times the learning rate."""
    muon_momentum: float = Field(
        default=0.95, ge=0, lt=1, json_schema_extra=when("optimizer", "muon")
    )
    """Momentum (Nesterov)."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates per batch and version, each on a part of it."""
    ppo_epochs: int = Field(default=1, ge=1, le=64)
    """Passes over a batch, with `num_minibatches` updates each; ratios and clips are relative to
    the policy before the first."""
    dtype: Dtype = "auto"
    """Compute dtype; master weights, gradients and optimiser state are float32. auto: bfloat16 on a
    GPU, float32 on CPUs."""
    publish_dtype: Dtype = "auto"
    """Dtype of the weights that generators get. auto: that of `generator.dtype`."""
    deterministic: bool = False
    """Use deterministic CUDA kernels only, so that `tinkermq replay` arrives at the same bits on a
    GPU: slower. On CPUs results always have the same bits."""
    max_row_tokens: int = Field(default=4096, ge=16)
    """Sequences are packed into rows of up to this many tokens."""
    microbatch_tokens: Annotated[int, Field(ge=16)] | Literal["auto"] = "auto"
    """Tokens per forward and backward pass; gradients are accumulated. auto: as many as the GPU is
    estimated to hold (`tinkermq plan`); on a CPU 16384, or `max_row_tokens` if that is more."""
    share_prompts: bool = True
    """Compute common beginnings of sequences once, if they fit into a row of `max_row_tokens`, a
    multiple of the longest episode (same result)."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass to save memory. auto: where the GPU is estimated
    to hold few tokens otherwise; not on a CPU."""
    offload_activations: bool | Literal["auto"] = "auto"
    """Keep the inputs of recomputed layers in the machine's memory until the backward pass. auto:
    where the GPU is estimated to hold no pass otherwise; not on a CPU. Implies
    `gradient_checkpointing`."""
    compile: bool = False
    """Use torch.compile for the model's layers: a minute or more at first use, equal results up to
    rounding. Needs a C++ compiler."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimiser state in CPU memory: slower; needs a GPU."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads for torch, of each rank."""

    @property
    def pass_tokens(self) -> int:
        """Tokens per forward and backward pass; a CPU's default while it is `auto`."""
        tokens = self.microbatch_tokens
        return max(_PASS_TOKENS, self.max_row_tokens) if tokens == "auto" else tokens

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed; not while it is `auto`."""
        return self.gradient_checkpointing is True or self.offloads

    @property
    def offloads(self) -> bool:
        """Whether the inputs of layers leave the GPU; not while it is `auto`."""
        return self.offload_activations is True

    @property
    def settings(self) -> dict[str, int | bool | str]:
        """The values of the keys that may be `auto`."""
        names = ("microbatch_tokens", "gradient_checkpointing", "offload_activations")
        return {name: getattr(self, name) for name in names}

    @property
    def num_updates(self) -> int:
        """Optimiser updates per batch."""
        return self.num_minibatches * self.ppo_epochs

    @property
    def spread(self) -> list[int]:
        """Numbers of nodes over which the ranks may be divided equally, best first."""
        whole = self.ranks // self.replicas
        parts = [n for n in range(1, self.machines + 1) if self.ranks % n == 0]
        return sorted(parts, key=lambda n: (n > 1 and (self.ranks // n) % whole > 0, n))

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded by FSDP2."""
        return self.ranks > 1 or self.cpu_offload


# Configuration of low-rank adapters.

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file that marks the folder of an adapter."""
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")
"""The files of an adapter, as PEFT writes them."""


class LoraConfig(Section):
    """Low-rank adapters: with a rank, only they are trained, sent and saved."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank; 0: all weights are trained."""
    alpha: int = Field(default=16, ge=1, json_schema_extra=when("rank"))
    """Adapters are scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", json_schema_extra=when("rank")
    )
    """Names of the adapted linear layers (`[q_proj, v_proj]`); all-linear: all but the output
    layer, MLPs of a model with experts, and state spaces' `out_proj` ([families](models.md))."""
    exclude: list[str] = Field(default_factory=list[str], json_schema_extra=when("rank"))
    """Names of layers without an adapter."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=dict[str, Annotated[int, Field(ge=1, le=1024)]],
        json_schema_extra=when("rank"),
    )
    """Other ranks by the end of a layer's name, or a regular expression, as in PEFT:
    `{layers.0.self_attn.q_proj: 4}`."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict[str, Annotated[float, Field(gt=0)]], json_schema_extra=when("rank")
    )
    """Other alphas, named as in `rank_pattern`."""
    rslora: bool = Field(default=False, json_schema_extra=when("rank"))
    """Scale by alpha / √rank (rank-stabilised, arXiv 2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=when("rank"))
    """Dropout of the adapters' inputs in updates; log-probs are computed without."""

    @model_validator(mode="after")
    def _patterns_are_expressions(self) -> Self:
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern {pattern!r:.80} cannot be read: {error}") from error
        return self

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same rank and the scale alpha / rank."""
        return not (self.rank_pattern or self.alpha_pattern or self.rslora)

    @property
    def max_rank(self) -> int:
        """The largest rank that a layer may have."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer by its name."""
        return self.rank_pattern.get(pattern_of(self.rank_pattern, layer), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of a layer's adapter."""
        alpha = self.alpha_pattern.get(pattern_of(self.alpha_pattern, layer), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def pattern_of(patterns: Iterable[str], layer: str) -> str:
    """Return the first pattern that matches a layer's name, as PEFT does; "" for none."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", layer)), "")


# Configuration of rewards besides the game's own.

_REMOTE = ("endpoint", "judge")


class RewardConfig(Section):
    """Rewards besides the game's own, computed where the game is hosted. If a source fails, its
    episode fails and is retried."""

    source: Literal["game", "function", "endpoint", "judge"] = "game"
    """The game alone, a Python function, an HTTP endpoint, or a judge model."""
    per: Literal["episode", "turn"] = Field(
        default="episode", json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Once at the end of the episode, or after every turn."""
    weight: float = Field(default=1.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of the source's reward."""
    game_weight: float = Field(default=0.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of the game's own rewards, which are added."""
    function: str | None = Field(default=None, json_schema_extra=when("source", "function"))
    """`package.module:function`, with verl's arguments: `data_source`, `solution_str`,
    `ground_truth`, `extra_info`, and `messages` and `info` if it takes them. Async functions share
    one event loop."""
    url: str | None = Field(
        default=None, pattern=r"^https?://", json_schema_extra=when("source", *_REMOTE)
    )
    """Endpoint that gets the same as JSON; for a judge the base URL of an OpenAI-compatible API."""
    key_variable: str | None = Field(default=None, json_schema_extra=when("url"))
    """Environment variable of the environment host with the key for `url`."""
    judge: str | None = Field(default=None, json_schema_extra=when("source", "judge"))
    """Inference job that judges, by id or name, through the broker; or the model's name at
    `url`."""
    judge_prompt: str | None = Field(
        default=None, max_length=64 << 10, json_schema_extra=when("source", "judge")
    )
    """The judge's prompt: `$question` is the first user message, `$answer` the policy's last,
    `$ground_truth` the row's, `$conversation` all, `$scale` the best score; `$form` demands the
    score ([judges](training.md#external-rewards)). Default: grade the answer."""
    judge_scale: float = Field(default=10.0, gt=0, json_schema_extra=when("source", "judge"))
    """Best score, which earns 1."""
    judge_tokens: int = Field(default=256, ge=1, json_schema_extra=when("source", "judge"))
    """Tokens of the judge's reply; a longer one is refused."""
    judge_request: dict[str, Any] = Field(
        default_factory=dict[str, Any], json_schema_extra=when("url")
    )
    """Further fields of requests to a judge at `url`, such as `reasoning_effort`; null removes one:
    `{max_tokens: null}`."""
    timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Time limit of one reward, including all tries."""
    tries: int = Field(default=4, ge=1, le=100, json_schema_extra=when("source", *_REMOTE))
    """Tries while endpoint or judge is unreachable, busy or slow."""
    max_requests: int = Field(
        default=64, ge=1, le=4096, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Concurrent rewards per host."""

    @model_validator(mode="after")
    def _requests_of_judges_alone(self) -> Self:
        if self.judge_request and self.source != "judge":
            raise ValueError(
                f"judge_request has no effect while source is {self.source!r}: remove it"
            )
        return self


def check_judge_prompt(reward: RewardConfig) -> None:
    """Raise ConfigError for a judge's prompt that does not demand the score's form.

    Otherwise every episode would fail.
    """
    prompt = reward.judge_prompt
    if reward.source != "judge" or prompt is None:
        return
    names_form = "form" in string.Template(prompt).get_identifiers()
    if not names_form and "score:" not in prompt.lower():
        raise ConfigError(
            f"env.reward.judge_prompt does not demand a score: {prompt[-100:]!r}",
            hint="the score is read from a last line `Score: N` only: end the prompt with $form, "
            "the sentence that demands it, or demand it in your own words",
        )


# Configuration of self-play against earlier versions.


class SelfPlayConfig(Section):
    """Earlier versions of the run as opponents, in games with roles."""

    past_share: float = Field(default=0.0, ge=0, le=1)
    """Share of tasks in which one role learns and an earlier version plays the others; in the rest
    all roles learn."""
    pool_every: int = Field(default=10, ge=1, json_schema_extra=when("past_share"))
    """Keep versions of every N steps as opponents, the first included."""
    pool_size: int = Field(default=4, ge=1, json_schema_extra=when("past_share"))
    """Newest of them to play against."""
    redraw_every: int = Field(default=1, ge=1, json_schema_extra=when("past_share"))
    """Versions after which a generator draws another opponent."""


# Configuration of the store for checkpoints and models.

BROKER = "broker:"
"""Instead of a URL: the broker keeps the checkpoints."""
URL_PATTERN = r"^(broker:|(s3|gs|file)://[A-Za-z0-9._/=+@-]+)$"
_URL = re.compile(r"(s3|gs|file)://|broker:runs/")


def is_url(value: str) -> bool:
    """Return whether a text is the URL of a store, not a folder or hub model."""
    return _URL.match(value) is not None


def model_paths(job: "JobConfig") -> dict[str, str]:
    """Return the models that a run names, by key."""
    named = {
        "model.path": job.model.path,
        "model.tokenizer": job.model.tokenizer,
        "critic.path": job.critic.path,
        **{f"policies.{role}": path for role, path in job.policies.items()},
        "algorithm.reference.path": job.algorithm.reference.path,
        **{f"algorithm.teacher.{name}": it for name, it in job.algorithm.loaded_teachers.items()},
    }
    return {key: path for key, path in named.items() if path is not None}


class StorageConfig(Section):
    """A store for pools whose machines share no disk."""

    url: str | None = Field(default=None, pattern=URL_PATTERN)
    """Also keep checkpoints below this URL (`s3://bucket/prefix`, `gs://`, `file:///folder`, or
    `broker:` for the broker), so that a learner on another machine can continue ([without a shared
    disk](clusters.md#without-a-shared-disk))."""
