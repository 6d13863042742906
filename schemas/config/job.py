"""The configuration of a job: a typed tree.

The text below a field is its documentation in `--help`, the JSON schema and the reference page.
`when(...)` marks a key that only some values of another key use; setting it under others is an
error.
"""

import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from .agent import AgentConfig, TaskSource, settle_agent
from .algorithm import AlgorithmConfig, CriticConfig
from .rules import broken_rules
from .sections import (
    MAX_NOTES,
    MAX_TAGS,
    MAX_WAIT_S,
    OWN_FUNCTION,
    Dtype,
    Label,
    LearnerConfig,
    LoraConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    SelfPlayConfig,
    StorageConfig,
    given_section,
    resolve_dtype,
    when,
    with_implied,
)

MAX_STREAM_BYTES = 1 << 44
LoggerName = Literal[
    "console", "jsonl", "tensorboard", "wandb", "wandb-offline", "trackio", "mlflow"
]


class ModelConfig(Section):
    """The model that learns."""

    path: str
    """Hugging Face folder, or the name of a model on the hub."""
    tokenizer: str | None = None
    """Folder of the tokenizer; default: the model's own."""
    attn_implementation: Literal["auto", "sdpa", "varlen", "flash_attention_2"] = "auto"
    """Attention kernel of the learner ([kernels](training.md#kernels-and-memory)). varlen: torch's
    for packed rows; flash_attention_2: that of the extra `flash-attn`; sdpa: with a mask, in any
    dtype; auto: on a GPU the first of these that can compute the model, on CPUs sdpa."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the chat template at every turn (`enable_thinking: false`)."""

    @field_validator("template_kwargs")
    @classmethod
    def _no_words_for_booleans(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key, value in values.items():
            if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
                raise ValueError(
                    f"{key} is the word {value!r}, which a template reads as true: write true or "
                    "false"
                )
        return values


class EnvConfig(Section):
    """The game, its data, and the hosts that run it."""

    game: str
    """Registered name (`tinkermq env list`) or `package.module:Class`; empty: callers bring one."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the game's constructor."""
    train_data: list[str] = Field(default_factory=list[str])
    """Parquet, Arrow or JSONL files of a dataset game, folders of Hugging Face's `save_to_disk`, or
    `harbor:FOLDER` for an agent program; empty: the game generates its states."""
    val_data: list[str] = Field(default_factory=list[str])
    """Validation files of a dataset game."""
    num_val: int = Field(default=64, ge=0, le=1_000_000)
    """Validation tasks: rows of `val_data` after a seeded shuffle, or seeds."""
    hosts: int = Field(default=1, ge=0, le=256)
    """Environment hosts in the pool; 0: the client hosts the game (`GameEnvironment`)."""
    workers: int = Field(default=4, ge=1, le=1024)
    """Games that step concurrently in one host."""
    isolation: Literal["thread", "process"] | None = None
    """Where games run; default: as the game's class says, else in threads. A hung game can be
    killed in a process, not in a thread."""
    worker_memory_mb: int | None = Field(
        default=None, ge=1, json_schema_extra=when("isolation", "process")
    )
    """Memory per worker process beyond loading its games; an episode that exceeds it fails.
    Default: no bound."""
    reset_timeout_s: float = Field(default=30.0, gt=0, le=MAX_WAIT_S)
    """A reset that takes longer fails its episode."""
    step_timeout_s: float = Field(default=30.0, gt=0, le=MAX_WAIT_S)
    """A step that takes longer fails its episode, or ends it as `on_step_timeout` says."""
    on_step_timeout: Literal["retry", "penalty", "mask"] = "retry"
    """When a step times out: retry: the episode fails and is played again; penalty: it ends with
    `step_timeout_reward`; mask: it ends, and is neither trained nor compared with. penalty and mask
    run games in processes, unless `isolation` is thread or the game is async."""
    step_timeout_reward: float = Field(
        default=-1.0,
        allow_inf_nan=False,
        json_schema_extra=when("on_step_timeout", "penalty"),
    )
    """Reward of a turn whose step times out, replacing that turn's others."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    lease_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """An episode that is neither stepped nor closed for this long is freed."""


class GeneratorConfig(Section):
    """The rollout generators."""

    count: int = Field(default=1, ge=0, le=1024)
    """Generators that the pool runs; more can be added later."""
    slots: int = Field(default=1, ge=1, le=64)
    """Slots per generator: linked GPUs of one node, or CPU shares."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine; vllm needs the extra `vllm` where generators run."""
    tensor_parallel: int = Field(default=1, ge=1, le=64, json_schema_extra=when("engine", "vllm"))
    """Slots per copy of the model, at most `slots`."""
    kv_cache_mb: int | None = Field(default=None, ge=1, json_schema_extra=when("engine", "vllm"))
    """KV cache; default: the rest of `memory_share` on a GPU, 1024 on a CPU."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory that a generator takes, all its engines together; default: 0.92 of
    its own GPU, on a shared one what fits beside the learner."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Whether the engine frees its memory while a learner on the same GPU trains; auto: if both do
    not fit."""
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        default="auto", json_schema_extra=when("engine", "vllm")
    )
    """fp8: twice the tokens in the cache; log-probs then differ from the learner's. Needs compute
    capability 8.9."""
    quantization: Literal["fp8"] | None = Field(
        default=None, json_schema_extra=when("engine", "vllm")
    )
    """Quantise weights when they are loaded, and at each new version: faster and smaller, and
    log-probs differ from the learner's. fp8 needs compute capability 8.9."""
    batch_invariant: bool = Field(default=False, json_schema_extra=when("engine", "vllm"))
    """Use kernels of vLLM whose results do not depend on what else is in the batch: slower. Needs
    compute capability 8.0."""
    prefix_caching: bool = Field(default=True, json_schema_extra=when("engine", "vllm"))
    """Compute common beginnings of prompts once."""
    max_batched_tokens: int | None = Field(
        default=None, ge=1, json_schema_extra=when("engine", "vllm")
    )
    """Tokens per forward pass, those of prompts included; default: 16384 on a large GPU, else
    8192."""
    compile: bool = Field(default=True, json_schema_extra=when("engine", "vllm"))
    """Compile the model and record CUDA graphs: slower start, faster generation."""
    dtype: Dtype = "auto"
    """Compute dtype of the engine. auto: bfloat16 on a GPU, float32 on CPUs."""
    max_episodes: int = Field(default=256, ge=1, le=65_536)
    """Concurrent episodes per generator."""
    adapt_episodes: bool = False
    """Let the number of concurrent episodes follow the engine's free KV cache, up to `max_episodes`
    ([how](engines.md#episodes-and-the-cache))."""
    max_requests: int | None = Field(default=None, ge=1, le=65_536)
    """Requests per forward pass; default: as many as the run has and the GPU's memory holds ([will
    it fit](gpu.md#will-it-fit)), 256 on a CPU."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest sequence; default: the longest episode of `rollout`."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """KV caches of running requests at a weight swap."""
    ack_wait_s: float = Field(default=30.0, ge=1, le=MAX_WAIT_S)
    """Seconds of silence after which a task goes to another generator."""
    segment_tokens: int = Field(default=0, ge=0)
    """Log running episodes after this many tokens and after each turn, so that another generator
    can continue them; 0: they start again."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads for torch."""

    @property
    def num_requests(self) -> int:
        """Requests per forward pass; 256 where none are set or chosen for a GPU."""
        return self.max_requests or 256


class TrainingConfig(Section):
    """Length, staleness, and what is kept."""

    num_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data, in place of `num_steps`; without either, one."""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """Tasks per step."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = 2
    """Largest lag of trained groups (see `staleness_policy`); 0: on-policy; auto: chosen from
    measured times, from 1 to `staleness_limit`."""
    staleness_limit: int = Field(default=8, ge=1, json_schema_extra=when("max_staleness", "auto"))
    """Largest bound that auto may choose."""
    staleness_policy: Literal["drop", "wait", "train", "mask"] = "drop"
    """Groups over the bound ([what each does](training.md#staleness))."""
    curriculum: Literal["none", "success_rate"] = "none"
    """Task order: none: shuffled, each once per epoch; success_rate: prefer tasks solved about half
    of the time."""
    curriculum_uniform: float = Field(
        default=0.1, ge=0, le=1, json_schema_extra=when("curriculum", "success_rate")
    )
    """Share of tasks chosen regardless of success rate."""
    own_curriculum: str | None = Field(
        default=None,
        pattern=OWN_FUNCTION,
        max_length=200,
        json_schema_extra=when("curriculum", "success_rate"),
    )
    """Your own function that weighs tasks by how often each was tried and solved ([own
    algorithms](own-algorithms.md))."""
    curriculum_tasks: int | None = Field(
        default=None, ge=1, json_schema_extra=when("curriculum", "success_rate")
    )
    """Number of seeds to choose from, for a game that generates its states."""
    tasks: Literal["data", "external"] = "data"
    """Tasks come from the data, or only from clients that publish tasks or trajectories."""
    test_freq: int = Field(default=0, ge=0)
    """Validate every N steps; 0: only before and after training."""
    validate_before_training: bool = True
    """Validate the initial weights."""
    save_freq: int = Field(default=0, ge=0)
    """Checkpoint every N steps, and at the end; 0: only by `save_minutes`."""
    save_minutes: float = Field(default=15.0, ge=0)
    """Checkpoint also when the last is this old, which bounds the work that a dying learner loses.
    Less often if writing takes over a tenth of that time; 0: never."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints to keep; with 1 there is none to fall back on if it is damaged. The
    rollout log goes back to the second newest, unless it fills three quarters of
    `limits.rollout_bytes`."""
    keep_every: int = Field(default=0, ge=0)
    """Keep checkpoints of every N steps for good; 0: none."""
    keep_best: bool = Field(default=False, json_schema_extra=when("test_freq"))
    """Write a checkpoint at each validated step, and keep the best by mean score: `RUN@best`, link
    `best` in the run folder. An episode that a validation lacks counts as the worst of all of
    them."""
    keep_rollouts: bool = False
    """Never trim the rollout log, so that the run can be replayed. Otherwise only the newest groups
    remain at its end."""
    kept_rollout_bytes: int = Field(default=32 << 20, ge=0, le=1 << 40)
    """Bytes of rollouts kept in the run folder for people, beyond the log: half for the newest,
    half for samples of each checkpoint's steps; 0: none."""

    @property
    def largest_staleness(self) -> int:
        """Largest bound that may apply."""
        return self.staleness_limit if self.max_staleness == "auto" else self.max_staleness


class EvaluationConfig(Section):
    """How versions are validated."""

    slots: int = Field(default=0, ge=0, le=64)
    """Slots of a separate evaluator; 0: the generators validate. A job without generators, or of
    kind `eval`, has an evaluator with `generator.slots`."""
    deadline_s: float = Field(default=1800.0, gt=0, le=86_400)
    """Longest time for which a generator stays at a version to validate it. Episodes that have not
    ended by then count as failed."""
    samples: int = Field(default=1, ge=1, le=4096)
    """Episodes per validation task; more than 1 gives pass@k."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    success_reward: float = 0.5
    """A return above this is a success, unless `info["success"]` says otherwise."""
    data: Literal["val", "train"] = "val"
    """The validation set, or the rows of `env.train_data` in order."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of `reset` in validation, such as another opponent."""
    tasks: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=50_000)] | None = None
    """Fixed list of rows or seeds; default: all."""


class WeightsConfig(Section):
    """How new weights reach the generators."""

    transport: Literal["auto", "object", "file", "nccl"] = "auto"
    """object: through NATS; file: a shared folder; nccl: [from memory to
    memory](architecture.md#from-memory-to-memory); auto: nccl where learner and generators have
    GPUs (in a pool with users: share one), else object."""
    folder: str | None = Field(default=None, json_schema_extra=when("transport", "file"))
    """The shared folder; default: the run folder."""
    chunk_bytes: int = Field(
        default=1 << 20,
        ge=1 << 16,
        le=8 << 20,
        json_schema_extra=when("transport", "auto", "object"),
    )
    """Size of one message."""
    differences: bool = Field(
        default=True, json_schema_extra=when("transport", "auto", "object", "file")
    )
    """Send 16-bit weights as differences where smaller; learner and generators then hold two
    versions in memory."""
    full_snapshot_every: int = Field(default=16, ge=2, json_schema_extra=when("differences", True))
    """Every N versions one is stored whole, for receivers that join or were away."""
    sha256: bool = Field(default=True, json_schema_extra=when("transport", "auto", "object"))
    """Also compute the SHA-256 that `nats object get` requires; without CPU instructions for it,
    this takes longer than sending."""
    shared_bytes: int = Field(
        default=64 << 30,
        ge=0,
        le=MAX_STREAM_BYTES,
        json_schema_extra=when("transport", "auto", "object"),
    )
    """Space in each machine's /dev/shm in which the run's actors share a version, at most half of
    what is free. 0: each reads for itself."""


class TrackingConfig(Section):
    """What experiment trackers (`logger_backends`) get besides metrics."""

    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """wandb team or user; default: the key's."""
    episodes_every: int = Field(default=0, ge=0)
    """Log a table of episodes (messages, reward, version) every N steps; 0: never."""
    max_episodes: int = Field(default=16, ge=1, le=1024, json_schema_extra=when("episodes_every"))
    """Episodes per table."""


class LimitsConfig(Section):
    """Bounds of the run's queues and logs, in bytes."""

    task_bytes: int = Field(default=64 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Task queue."""
    rollout_bytes: int = Field(default=4 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Rollout log; generators wait while it is full."""
    segment_bytes: int = Field(default=256 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Running episodes, with `generator.segment_tokens` or programs; the rest is not logged."""
    operation_bytes: int = Field(default=4 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Operations of Tinker programs, and their results, each; results are kept for a day, the
    oldest go first."""
    checkpoint_bytes: int = Field(default=16 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Checkpoints in the broker (`storage.url: "broker:"`): room for `training.keep_last` + 2, one
    more with `training.keep_best`."""
    log_bytes: int = Field(default=64 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Log lines, metrics and events, and traces, each; the oldest go first."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """Failures of one actor within ten minutes, or in a row without any finished work (a step,
    group, evaluation or answer), after which the run fails."""
    max_node_failures: int = Field(default=5, ge=0, le=1000)
    """Nodes that the run may lose before it fails."""
    untrainable_groups: int | None = Field(default=None, ge=0)
    """Untrainable groups in a row (equal returns, filtered, stale, malformed) that end the run with
    a checkpoint; default: 20 batches, at least 256; 0: never."""
    idle_s: float = Field(default=86400.0, gt=0)
    """Seconds without a finished task after which the run ends with a checkpoint and frees its
    slots."""


# -- an SFT job: `sft.data` decides most of `algorithm` --------------------------------------------

_IMPLIED_BY_SFT: dict[str, dict[str, Any]] = {
    "rollout": {"group_size": 1, "temperature": 1.0},
    "algorithm": {"loss": "sft", "correction": "none"},
    "training": {"staleness_policy": "train", "tasks": "data", "curriculum": "none"},
}
_READ_BY_SFT = frozenset(
    {
        *_IMPLIED_BY_SFT["algorithm"],
        "loss_agg",
        "loss_agg_length",
        "kl_coef",
        "kl_estimator",
        "reference",
        "entropy_coef",
        "entropy_target",
        "entropy_coef_step",
    }
)
"""Keys of `algorithm` that such a run reads."""
_NO_GAME: dict[str, Any] = {"game": "", "hosts": 0, "num_val": 0}


class SftConfig(Section):
    """The conversations that an SFT run trains on."""

    data: list[str] = Field(default_factory=list[str])
    """Parquet or JSONL files with [conversations](training.md#from-conversations) in the column
    `messages`, and optionally `tools` and `images`. Empty: not an SFT run."""


def _settle_sft(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of an SFT run with what it implies; any other tree as it is.

    Raises ValueError for a key that would have no effect.
    """
    tree = dict(values)
    if not given_section(tree, "sft").get("data"):
        return tree
    tree.setdefault("env", _NO_GAME)
    for key in given_section(tree, "algorithm"):
        if key not in _READ_BY_SFT:
            raise ValueError(f"algorithm.{key} has no effect in an SFT run: remove it")
    return with_implied(tree, _IMPLIED_BY_SFT, "an SFT run")


# -- a Tinker service ------------------------------------------------------------------------------

_BASE_NAME = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._/-]*")


class TinkerConfig(Section):
    """A base model on which many users train adapters through the Tinker API."""

    base: str = Field(default="", max_length=200)
    """Name of the base model for programs (`base_model`), such as `Qwen/Qwen3.5-9B-Base`, or an
    absolute path. Empty: no such service."""
    max_rank: int = Field(default=64, ge=1, le=1024)
    """Largest rank of an adapter."""
    adapters_in_memory: int = Field(default=256, ge=1, le=100_000)
    """Adapters, with optimisers, in the trainer's memory; the least recently used are written to
    disk and return with their next operation."""
    adapters_mb: int = Field(default=16 << 10, ge=1, le=1 << 30)
    """Megabytes of these: weights, gradients and two moments each."""
    idle_s: float = Field(default=600.0, gt=0)
    """Seconds after which an unused adapter is written to disk."""
    sampled_at_once: int = Field(default=16, ge=1, le=1024)
    """Adapters that one sampler holds and decodes in one batch; users take them in turn."""
    checkpoint_mb: int = Field(default=64 << 10, ge=1, le=1 << 30)
    """Megabytes of checkpoints per user; saving fails beyond."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Tokens of one model computed at once."""
    mixed_micro_batches: bool = False
    """Compute micro-batches of several models in one pass: faster for many small ones ([how bits
    are kept](tinker.md#many-users))."""

    @field_validator("base")
    @classmethod
    def _check_base(cls, base: str) -> str:
        """Raise ValueError for names that programs cannot request or distinguish."""
        if base and (_BASE_NAME.fullmatch(base) is None or base != normpath(base)):
            raise ValueError(
                f"{base!r} must be the name of a base model, such as org/model, or the absolute "
                "path of its folder, of letters, digits, '.', '_', '-' and single '/'"
            )
        return base


def _settle_tinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a service's tree with implied keys; any other tree unchanged."""
    tree = dict(values)
    if given_section(tree, "tinker").get("base"):
        tree.setdefault("env", _NO_GAME)
    return tree


# -- the whole configuration -----------------------------------------------------------------------


class JobConfig(Section):
    """Everything a training run is made of."""

    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    """Name: lower-case letters, digits, `-` and `_`; default `<env>-<model>-<two words>`."""
    tags: Annotated[list[Label], Field(max_length=MAX_TAGS)] = Field(default_factory=list[str])
    """Tags for lists and search; `tinkermq label` changes them later."""
    group: Label | None = None
    """Group of related runs, such as a sweep."""
    notes: str = Field(default="", max_length=MAX_NOTES)
    """Notes for people."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of data order, episodes and optimiser."""
    output_dir: str = "outputs"
    """Parent of run folders, on the pool."""
    logger_backends: list[LoggerName] = Field(default_factory=lambda: ["jsonl"])
    """Where metrics go besides the broker; always jsonl."""
    project: str = "tinkermq"
    """Project at the experiment tracker."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    model: ModelConfig
    env: EnvConfig
    agent: AgentConfig = Field(default_factory=AgentConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    policies: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")], str] = Field(
        default_factory=dict[str, str]
    )
    """Models of roles with their own policy; `model` plays all others."""
    self_play: SelfPlayConfig = Field(default_factory=SelfPlayConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """separate: learner and generators hold slots of their own; colocated: learner and generator
    share one GPU ([on one GPU](gpu.md#on-one-gpu)); auto: colocated in a pool of one GPU."""

    @property
    def may_colocate(self) -> bool:
        """Whether learner and generator are one slot each and may be the same one."""
        pair = self.learner.slots == self.generator.slots == self.generator.count == 1
        return pair and self.generator_slots == 1 and self.placement != "separate"

    @property
    def episodes_at_once(self) -> int:
        """Concurrent episodes of one generator; programs are also limited by their places."""
        most = self.generator.max_episodes
        if not self.agent.runs_programs:
            return most
        places = max(1, self.env.hosts) * self.agent.per_host
        return min(most, max(1, places // max(1, self.generator.count)))

    @property
    def task_sources(self) -> list[TaskSource | None]:
        """The folders of tasks among the data, None in place of a file."""
        return [TaskSource.parse(name) for name in (*self.env.train_data, *self.env.val_data)]

    @property
    def has_tasks(self) -> bool:
        """Whether the data are folders of tasks."""
        return any(self.task_sources)

    @property
    def keeps_segments(self) -> bool:
        """Whether running episodes are logged."""
        return self.agent.runs_programs or self.generator.segment_tokens > 0

    @property
    def validates(self) -> bool:
        """Whether versions are validated, by a game."""
        return self.env.num_val > 0

    @property
    def plays_in_pool(self) -> bool:
        """Whether actors of a training run play its game; external agents bring their own."""
        external = self.training.tasks == "external" and self.generator.count == 0
        return self.validates or not external

    @property
    def has_evaluator(self) -> bool:
        """Whether a separate evaluator validates, as it always does without generators."""
        return self.validates and (self.evaluation.slots > 0 or self.generator.count == 0)

    @property
    def evaluator_slots(self) -> int:
        """Slots of a separate evaluator: its engine is that of a generator."""
        return self.evaluation.slots or self.generator.slots

    def published_dtype(self, *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
        """Dtype of published weights: that in which engines compute, unless another is set."""
        own = self.learner.publish_dtype
        return resolve_dtype(self.generator.dtype if own == "auto" else own, on_gpu=on_gpu)

    @property
    def generator_slots(self) -> int:
        """Slots of one generator; that of an SFT run takes none unless it validates."""
        has_engine = not self.sft.data or (self.validates and not self.has_evaluator)
        return self.generator.slots if has_engine else 0

    def with_model(self, path: str) -> "JobConfig":
        """Return a copy for another model, with its tokenizer."""
        model = self.model.model_copy(update={"path": path, "tokenizer": None})
        return self.model_copy(update={"model": model})

    @model_validator(mode="before")
    @classmethod
    def _kind_settles_the_rest(cls, values: Any) -> Any:
        """Add what an SFT or agent run implies, and refuse keys without effect."""
        if not isinstance(values, dict):
            return values
        tree = dict(cast("dict[str, Any]", values))
        return _settle_tinker(settle_agent(_settle_sft(tree)))

    @model_validator(mode="after")
    def _no_broken_rule(self) -> Self:
        broken = "; ".join(broken_rules(self))
        if broken:
            raise ValueError(broken)
        return self
