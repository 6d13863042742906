"""A section of a configuration: it refuses keys that are unknown or have no effect."""

import math
import re
import string
from collections.abc import Callable, Iterable
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
"""The longest wait that a configuration may ask for."""
OWN_FUNCTION = (
    r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
    r"|[a-z][a-z0-9_-]*)$"
)
"""A function of the user's: `module:function`, or a name that a package has registered."""
MAX_TAGS = 32
MAX_NOTES = 4000
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/=+@-]{0,63}$")]
"""What runs are found by: a tag, or the name of a group."""


def when(key: str, *values: Any) -> dict[str, Any]:
    """Say that a field is read only while `key` of the same section has one of `values`.

    Without values: while it is set, to anything but 0.
    """
    return {"when": {"key": key, "values": list(values)}}


def only_while(field: FieldInfo) -> str:
    """Say under which values of another key a field is read, as Markdown; empty: always."""
    rule = _rule(field)
    if rule is None:
        return ""
    values = " or ".join(f"`{value}`" for value in rule["values"])
    return f" Only while `{rule['key']}` is {values or 'set'}."


def _rule(field: FieldInfo) -> dict[str, Any] | None:
    extra = field.json_schema_extra
    return cast("dict[str, Any]", extra).get("when") if isinstance(extra, dict) else None


@dataclass(frozen=True)
class Rule:
    """A combination of values of several sections that is refused."""

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
    """A part of the configuration: unknown keys are errors, and every value is bounded."""

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
                wanted = " or ".join(repr(value) for value in rule["values"])
                raise ValueError(
                    f"{name} has no effect while {rule['key']} is "
                    f"{getattr(self, rule['key'])!r}: remove it, or set {rule['key']}"
                    + (f" to {wanted}" if wanted else "")
                )
        return self

    def _unmet(self, name: str) -> dict[str, Any] | None:
        """Return the rule by which a field is not read: that of the key it names, or its own."""
        rule = _rule(type(self).model_fields[name])
        if rule is None:
            return None
        value = getattr(self, rule["key"])
        met = value in rule["values"] if rule["values"] else bool(value)
        return self._unmet(rule["key"]) or (None if met else rule)


# The configuration of episodes: how many, how they are sampled, and how long they may get.

MAX_EPISODES = 4096
"""Episodes of one task."""


class RolloutConfig(Section):
    """How episodes are generated."""

    group_size: int = Field(default=8, ge=1, le=MAX_EPISODES)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner computes log-probs at the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int = Field(default=1, ge=1)
    """Answers of the policy per episode; each one reaches the game."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A first prompt longer than this fails its task."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Tokens the policy may generate in one turn; binds at generation."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Tokens after the first prompt, observations included; binds at generation."""
    max_tries: int = Field(default=3, ge=1, le=100)
    """Tries of one episode before its task is given up."""
    oversample: int = Field(default=0, ge=0)
    """Episodes of a task that are started beyond `group_size`: the first `group_size` to end are
    its group, the others are cut. This favours short episodes; `rollout/oversample/*` tells by how
    much."""

    @property
    def response_limit(self) -> int:
        """Tokens behind the first prompt at which an episode is cut."""
        return self.max_turn_tokens if self.max_turns == 1 else self.max_response_tokens

    @property
    def max_tokens(self) -> int:
        """Longest whole sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens


# The learner, as a job configures it.


class LearnerConfig(Section):
    """The optimiser and its memory."""

    slots: int = Field(default=1, ge=1, le=64)
    """Slots that the learner holds with all its ranks: linked GPUs of one node, or CPU shares."""
    ranks: int = Field(default=1, ge=1, le=64)
    """Actors over which model and batch are divided (FSDP2), each with as many of the slots."""
    machines: int = Field(default=1, ge=1, le=64)
    """Nodes over which the ranks may lie in equal parts. One is taken where one can hold them all;
    a copy of the model (`replicas`) is never divided over more of them than it must."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Copies of the model among the ranks (HSDP): each is divided over ranks / replicas of them,
    which have neighbouring slots; between copies only gradients travel."""
    context_parallel: int = Field(default=1, ge=1, le=64)
    """Neighbouring ranks that compute the columns of each row together (Ulysses): a rank holds the
    activations of a part of it. It divides the number of ranks, and those of the model's heads."""
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
    """Learning rate at the last step, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Share of each weight that an update takes away, times the learning rate."""
    muon_momentum: float = Field(
        default=0.95, ge=0, lt=1, json_schema_extra=when("optimizer", "muon")
    )
    """Share of the momentum that stays from update to update (Nesterov)."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimiser updates per batch, each on a part of it; all of them make one version."""
    batch_epochs: int = Field(default=1, ge=1, le=64)
    """Times that a batch is gone through, with `num_minibatches` updates each; ratios and clips are
    those to the policy before the first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimiser state are float32."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights that generators get."""
    row_tokens: int = Field(default=4096, ge=16)
    """Sequences are packed into rows of at most this many tokens."""
    microbatch_tokens: int = Field(default=16384, ge=16)
    """Tokens of one forward and backward pass; the rest is accumulated."""
    share_prompts: bool = True
    """Compute the prompt of a group once, not once per episode, and what rows of an agent's
    episodes begin with in common once, too, as far as they fit into a row of `row_tokens`: some
    multiple of the longest episode (same result; sdpa only)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Translate the model's layers by torch.compile at their first use, which takes a minute or
    more: same results but for rounding, in fewer and larger kernels. Needs a C++ compiler."""
    cpu_offload: bool = False
    """Keep master weights, gradients and optimiser state in the memory of the machine, not the
    GPU's: slower, and refused without a GPU."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads for torch, of each rank."""

    @property
    def num_updates(self) -> int:
        """Optimiser updates for each batch."""
        return self.num_minibatches * self.batch_epochs

    @property
    def spread(self) -> list[int]:
        """Over how many nodes the ranks may lie, in equal parts of whole copies; best first."""
        whole = self.ranks // self.replicas
        parts = [n for n in range(1, self.machines + 1) if self.ranks % n == 0]
        return sorted(parts, key=lambda n: (n > 1 and (self.ranks // n) % whole > 0, n))

    @property
    def sharded(self) -> bool:
        """Whether the weights are held in parts, by FSDP2."""
        return self.ranks > 1 or self.cpu_offload


# Low-rank adapters, as a job configures them.

ADAPTER_CONFIG = "adapter_config.json"
"""The file by which PEFT tells the folder of an adapter from that of a model."""


class LoraConfig(Section):
    """Low-rank adapters: with a rank, they are all that is trained, sent and saved."""

    rank: int = Field(default=0, ge=0, le=1024)
    """Rank of the adapters; 0: all weights are trained."""
    alpha: int = Field(default=16, ge=1, json_schema_extra=when("rank"))
    """What an adapter adds is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", json_schema_extra=when("rank")
    )
    """Names of the linear layers that get an adapter (`[q_proj, v_proj]`); all-linear: every one
    but the output layer."""
    exclude: list[str] = Field(default_factory=list[str], json_schema_extra=when("rank"))
    """Names of layers that get none all the same."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=dict[str, Annotated[int, Field(ge=1, le=1024)]],
        json_schema_extra=when("rank"),
    )
    """Other ranks for some layers, by the end of a layer's name or a regular expression of it, as
    PEFT's: `{layers.0.self_attn.q_proj: 4}`."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict[str, Annotated[float, Field(gt=0)]], json_schema_extra=when("rank")
    )
    """Other alphas for some layers, named as in `rank_pattern`."""
    rslora: bool = Field(default=False, json_schema_extra=when("rank"))
    """Multiply by alpha / √rank instead of alpha / rank (rank-stabilised, arXiv 2312.03732)."""
    dropout: float = Field(default=0.0, ge=0, lt=1, json_schema_extra=when("rank"))
    """Share of an adapter's inputs that is left out at each update; log-probs are taken without."""

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same rank and the scale alpha / rank."""
        return not (self.rank_pattern or self.alpha_pattern or self.rslora)

    @property
    def max_rank(self) -> int:
        """The largest rank that a layer may have."""
        return max(self.rank, *self.rank_pattern.values(), 0)

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer, by its name in the model."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, layer), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return what the product of a layer's adapter is multiplied by."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, layer), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _pattern(patterns: Iterable[str], layer: str) -> str:
    """Return the first pattern that a layer's name matches, as PEFT finds it; "" for none."""
    return next((one for one in patterns if re.match(rf"(.*\.)?({one})$", layer)), "")


# The part of a job's configuration that says where rewards come from.

_REMOTE = ("endpoint", "judge")


class RewardConfig(Section):
    """What an episode earns besides the game's own rewards. It is worked out where the game is
    hosted, never on the server; a source that fails fails its episode, which is tried again."""

    source: Literal["game", "function", "endpoint", "judge"] = "game"
    """The game alone, a Python function, an HTTP endpoint, or a model that judges."""
    per: Literal["episode", "turn"] = Field(
        default="episode", json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Asked once at the end of the episode, or after every turn."""
    weight: float = Field(default=1.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of what the source says."""
    game_weight: float = Field(default=0.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of the game's own rewards, which are added."""
    function: str | None = Field(default=None, json_schema_extra=when("source", "function"))
    """`package.module:function`, called as verl calls its own: `data_source`, `solution_str`,
    `ground_truth`, `extra_info`, and `messages` and `info` where it takes them. It may be
    `async def`: all its calls then wait in one event loop."""
    url: str | None = Field(
        default=None, pattern=r"^https?://", json_schema_extra=when("source", *_REMOTE)
    )
    """Where the same is posted as JSON; of a judge, the base URL of an OpenAI-compatible API."""
    key_variable: str | None = Field(default=None, json_schema_extra=when("url"))
    """Environment variable of the environment host that holds the key for `url`."""
    judge: str | None = Field(default=None, json_schema_extra=when("source", "judge"))
    """Inference job that judges, by id or name, asked through the broker; or the model's name at
    `url`."""
    judge_prompt: str | None = Field(
        default=None, max_length=64 << 10, json_schema_extra=when("source", "judge")
    )
    """What the judge reads: `$question` is the first user message, `$answer` the policy's last one,
    `$ground_truth` the row's, `$conversation` all of it, `$scale` the best score. Default: grade
    the answer. Its reply must end with a line `Score: N`, N a plain number, and is refused without
    one: `$form` is the sentence that demands it, and a prompt that names neither is refused."""
    judge_scale: float = Field(default=10.0, gt=0, json_schema_extra=when("source", "judge"))
    """The judge's best score, which earns 1."""
    judge_tokens: int = Field(default=256, ge=1, json_schema_extra=when("source", "judge"))
    """Tokens that the judge may write; a reply that they cut is refused."""
    judge_request: dict[str, Any] = Field(
        default_factory=dict[str, Any], json_schema_extra=when("url")
    )
    """Further fields of the requests to a judge at `url`, such as `reasoning_effort`; null takes
    one of ours out: `{max_tokens: null}`. Where the API names `max_tokens` or `temperature` as what
    it refuses, it is asked with `max_completion_tokens`, or without a temperature."""
    timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Longest time that one reward may take, all tries together."""
    tries: int = Field(default=4, ge=1, le=100, json_schema_extra=when("source", *_REMOTE))
    """Tries while the endpoint or the judge cannot be reached, is busy or is slow."""
    max_requests: int = Field(
        default=64, ge=1, le=4096, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Rewards that one host works out at the same time."""

    @model_validator(mode="after")
    def _requests_of_judges_alone(self) -> Self:
        if self.judge_request and self.source != "judge":
            raise ValueError(
                f"judge_request has no effect while source is {self.source!r}: remove it"
            )
        return self


def check_judge_prompt(reward: RewardConfig) -> None:
    """Raise ConfigError for a judge's prompt that does not demand the form that scores are read in.

    Every episode would fail: a judge that is not told the form answers in another.
    """
    prompt = reward.judge_prompt
    if reward.source != "judge" or prompt is None:
        return
    names_form = "form" in string.Template(prompt).get_identifiers()
    if not names_form and "score:" not in prompt.lower():
        raise ConfigError(
            f"env.reward.judge_prompt does not say how the judge is to answer: {prompt[-100:]!r}",
            hint="a score is read from a last line `Score: N` and nothing else: end the prompt "
            "with $form, which stands for the sentence that demands it, or demand it yourself",
        )


# The configuration of self-play against earlier versions.


class SelfPlayConfig(Section):
    """Earlier versions of the run as opponents, in games with roles."""

    past_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the tasks in which one role learns and an earlier version plays the others; in the
    rest all roles are played by the present version, and learn."""
    pool_every: int = Field(default=10, ge=1, json_schema_extra=when("past_share"))
    """Versions of every so many steps are kept as opponents, the first one included."""
    pool_size: int = Field(default=4, ge=1, json_schema_extra=when("past_share"))
    """The newest so many of them are played against."""
    redraw_every: int = Field(default=1, ge=1, json_schema_extra=when("past_share"))
    """Versions after which a generator draws another opponent from the pool."""


# Where checkpoints and models lie that no path leads to on every machine.

BROKER = "broker:"
"""In the place of a URL: the broker keeps the checkpoints."""
URL_PATTERN = r"^(broker:|(s3|gs|file)://[A-Za-z0-9._/=+@-]+)$"
_URL = re.compile(r"(s3|gs|file)://|broker:runs/")


def is_url(value: str) -> bool:
    """Whether a text names a place in a store rather than a folder or a model of the hub."""
    return _URL.match(value) is not None


def model_paths(job: "JobConfig") -> dict[str, str]:
    """Return the models that a job names, by the key of each."""
    named = {
        "model.path": job.model.path,
        "model.tokenizer": job.model.tokenizer,
        "critic.path": job.critic.path,
        **{f"policies.{role}": path for role, path in job.policies.items()},
        "algorithm.reference.path": job.algorithm.reference.path,
        **{f"algorithm.teacher.{one}": it for one, it in job.algorithm.loaded_teachers.items()},
    }
    return {key: path for key, path in named.items() if path is not None}


class StorageConfig(Section):
    """A store that all machines of the pool reach, in the place of a disk that they share."""

    url: str | None = Field(default=None, pattern=URL_PATTERN)
    """Checkpoints are kept below this URL, too (`s3://bucket/prefix`, `gs://`, `file:///folder`):
    a learner on a machine that has none of the run's files goes on from there. Machines need the
    `storage` extra, and the store's credentials in their environment. `broker:` needs neither:
    the broker keeps them, up to `limits.checkpoint_bytes`."""
