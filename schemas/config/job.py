"""The configuration of a job: one typed tree.

The text below a field is its documentation everywhere: `--help`, the JSON schema, the reference
page. `when(...)` marks a key that only some choices read; setting it under another choice is an
error, because it would have no effect.
"""

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from .agent import AgentConfig, settle_agent
from .algorithms.algorithm import AlgorithmConfig
from .algorithms.critic import CriticConfig
from .episode import RolloutConfig
from .learner import LearnerConfig
from .lora import LoraConfig
from .removed import without_removed
from .reward import RewardConfig
from .rules import broken_rules
from .section import MAX_NOTES, MAX_TAGS, MAX_WAIT_S, OWN_FUNCTION, Label, Section, when
from .self_play import SelfPlayConfig
from .sft import SftConfig, settle_sft
from .storage import StorageConfig
from .tinker import TinkerConfig, settle_tinker

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
    attn_implementation: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention kernel of the learner; flash_attention_2 needs a GPU, the `flash-attn` extra and
    `learner.dtype=bfloat16`, and computes a shared prompt once for each of its episodes, and what
    rows of an agent's episode have in common once for each row."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the chat template (`enable_thinking: false`), the same at every turn."""

    @field_validator("template_kwargs")
    @classmethod
    def _no_words_for_booleans(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key, value in values.items():
            if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
                raise ValueError(
                    f"{key} is the word {value!r}, which a template takes for true: write true or "
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
    """Parquet or JSONL files of a dataset game; empty for a game that generates its states."""
    val_data: list[str] = Field(default_factory=list[str])
    """Validation files of a dataset game."""
    num_val: int = Field(default=64, ge=0, le=1_000_000)
    """Validation tasks: the first rows of `val_data` after a seeded shuffle, or generated seeds."""
    hosts: int = Field(default=1, ge=0, le=256)
    """Environment hosts that the pool runs; 0: the client hosts the game (`GameEnvironment`)."""
    workers: int = Field(default=4, ge=1, le=1024)
    """Games that step at the same time in one host."""
    isolation: Literal["thread", "process"] | None = None
    """Where games run; default: as the game's class says (`isolation`), threads where it says
    nothing. A hung game in a process is killed; in a thread it can only be given up."""
    worker_memory_mb: int | None = Field(
        default=None, ge=1, json_schema_extra=when("isolation", "process")
    )
    """Memory that the games of one worker process may use, beyond what it takes to load them; one
    that wants more fails its episode. Default: no bound."""
    reset_timeout_s: float = Field(default=30.0, gt=0, le=MAX_WAIT_S)
    """A reset that takes longer fails its episode."""
    step_timeout_s: float = Field(default=30.0, gt=0, le=MAX_WAIT_S)
    """A step that takes longer fails its episode, or ends it as `on_step_timeout` says."""
    on_step_timeout: Literal["retry", "penalty", "mask"] = "retry"
    """What an episode becomes whose step takes too long. retry: it has failed, and is played again.
    penalty: it has ended, its last turn is rewarded with `step_timeout_reward` and it is trained,
    for the policy's action is to blame. mask: it has ended, is in the rollout log, and is neither
    trained nor compared with. Under the last two games run in processes, which can be ended,
    unless `isolation` is thread or the game is async."""
    step_timeout_reward: float = Field(
        default=-1.0,
        allow_inf_nan=False,
        json_schema_extra=when("on_step_timeout", "penalty"),
    )
    """Reward of a turn whose step takes too long, in place of all others of that turn."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    lease_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """An episode that is neither stepped nor closed for this long is freed."""


class GeneratorConfig(Section):
    """The rollout generators."""

    count: int = Field(default=1, ge=0, le=1024)
    """Generators the pool runs for this job; more can be added while it runs."""
    slots: int = Field(default=1, ge=1, le=64)
    """Slots that each generator holds: linked GPUs of one node, or CPU shares."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates; vllm needs the `vllm` extra where generators run."""
    tensor_parallel: int = Field(default=1, ge=1, le=64, json_schema_extra=when("engine", "vllm"))
    """Slots that hold one copy of the model together, at most `slots`."""
    kv_cache_mb: int | None = Field(default=None, ge=1, json_schema_extra=when("engine", "vllm"))
    """Memory of the KV cache; default: what vLLM finds free on a GPU, 1024 on a CPU."""
    compile: bool = Field(default=True, json_schema_extra=when("engine", "vllm"))
    """Compile the model and record CUDA graphs: starts later, generates faster."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the engine."""
    max_episodes: int = Field(default=256, ge=1, le=65_536)
    """Episodes that run at the same time in one generator."""
    max_requests: int = Field(default=256, ge=1, le=65_536)
    """Requests that decode in one forward pass."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest sequence that the engine takes; default: the longest episode of `rollout`."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What becomes of the cache of running requests at a weight swap."""
    ack_wait_s: float = Field(default=30.0, ge=1, le=MAX_WAIT_S)
    """A task is given to another generator this long after its holder was last heard of."""
    segment_tokens: int = Field(default=0, ge=0)
    """Write running episodes down after so many tokens, and after each turn, so that another
    generator goes on with them when this one dies; 0: they start again."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads for torch."""


class TrainingConfig(Section):
    """How long, how far off-policy, and what is kept."""

    num_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; wins over `num_epochs`."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data; without either, one."""
    batch_size: int = Field(default=16, ge=1, le=65_536)
    """Tasks per step."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = 2
    """Nothing with a larger lag is trained (see `staleness_policy`); 0 is on-policy; auto: as far
    ahead as measured times ask for, from 1 to `staleness_limit`."""
    staleness_limit: int = Field(default=8, ge=1, json_schema_extra=when("max_staleness", "auto"))
    """Largest bound that auto may choose: no group with a larger lag is trained."""
    staleness_policy: Literal["drop", "wait", "train", "mask"] = "drop"
    """A group over the bound: dropped and issued again, waited for beforehand, or trained; with
    mask without its tokens over the bound, which stay as context, while its episodes count in
    baselines as they are: for episodes that take longer than many steps."""
    curriculum: Literal["none", "success_rate"] = "none"
    """Which task comes next: each once an epoch in a shuffled order, or by success rate, those
    that are solved about half of the time most often."""
    curriculum_uniform: float = Field(
        default=0.1, ge=0, le=1, json_schema_extra=when("curriculum", "success_rate")
    )
    """Share of the tasks that are chosen whatever their success rate."""
    own_curriculum: str | None = Field(
        default=None,
        pattern=OWN_FUNCTION,
        max_length=200,
        json_schema_extra=when("curriculum", "success_rate"),
    )
    """A function of one's own that weighs the tasks, from how often each was tried and solved
    ([own algorithms](own-algorithms.md))."""
    curriculum_tasks: int | None = Field(
        default=None, ge=1, json_schema_extra=when("curriculum", "success_rate")
    )
    """Seeds that are chosen from, of a game that generates its states."""
    tasks: Literal["data", "external"] = "data"
    """Tasks come from the data, or only from clients that publish tasks or trajectories."""
    test_freq: int = Field(default=0, ge=0)
    """Validate every so many steps; 0: only before and after."""
    validate_before_training: bool = True
    """Validate the initial weights."""
    save_freq: int = Field(default=0, ge=0)
    """Checkpoint every so many steps, and at the end; 0: when `save_minutes` ask for one."""
    save_minutes: float = Field(default=15.0, ge=0)
    """Checkpoint, too, when the last is so old: a learner that dies trains no more than that again.
    Rarer where writing one takes over a tenth of that time; 0: never."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept. The rollout log is kept from the one before the newest on,
    which is gone on from when the newest is damaged, unless it fills three quarters of
    `limits.rollout_bytes`; with 1 there is none to go back to."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of every so many steps are kept for good; 0: none."""
    keep_best: bool = Field(default=False, json_schema_extra=when("test_freq"))
    """Write a checkpoint at each step that is validated, and keep the one with the best mean score
    until a better one is there: `RUN@best`, and the link `best` in the run folder."""
    keep_rollouts: bool = False
    """Never trim the rollout log: the run can be replayed, and all of it looked at. Else the
    newest groups are left when it ends."""
    kept_rollout_bytes: int = Field(default=32 << 20, ge=0, le=1 << 40)
    """Bytes of rollouts that are kept in the run's folder, where they outlive the log, for people
    to look at: at its end the newest, for half of the bytes, and some of each checkpoint's steps,
    sampled more thinly the longer the run is; 0: none."""
    plateau_steps: int = Field(default=0, ge=0)
    """Who has asked for notifications is told when validation, or else the reward, has not improved
    for so many steps; 0: never."""

    @property
    def largest_staleness(self) -> int:
        """Largest bound that may come into force."""
        return self.staleness_limit if self.max_staleness == "auto" else self.max_staleness


class EvaluationConfig(Section):
    """How versions are validated."""

    samples: int = Field(default=1, ge=1, le=4096)
    """Episodes per validation task; over 1 gives pass@k."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    success_reward: float = 0.5
    """A return above this is a success, unless the game tells it in `info["success"]`."""
    data: Literal["val", "train"] = "val"
    """What is evaluated: the validation set, or the rows of `env.train_data` in their own order."""
    reset_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the game's `reset` in validation, such as another opponent."""
    tasks: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=50_000)] | None = None
    """A fixed list of rows, or of seeds of a game that generates its states; default: all."""


class WeightsConfig(Section):
    """How new weights reach the generators."""

    transport: Literal["object", "file", "nccl"] = "object"
    """Through NATS; through a folder that learner and generators share; or from the learner's
    memory by torch.distributed, which speaks NCCL between GPUs and gloo otherwise."""
    folder: str | None = Field(default=None, json_schema_extra=when("transport", "file"))
    """The shared folder; default: the run folder."""
    chunk_bytes: int = Field(
        default=1 << 20, ge=1 << 16, le=8 << 20, json_schema_extra=when("transport", "object")
    )
    """Size of one message."""
    differences: bool = Field(default=True, json_schema_extra=when("transport", "object", "file"))
    """Send 16-bit weights (`learner.publish_dtype: bfloat16`) as differences from earlier versions
    where that is less; learner, generators and evaluators then keep two versions in memory."""
    whole_every: int = Field(default=16, ge=2, json_schema_extra=when("differences", True))
    """Of so many versions one is stored whole, too, for those who join or were away."""
    stock_digest: bool = Field(default=True, json_schema_extra=when("transport", "object"))
    """Also compute the SHA-256 without which `nats object get` refuses what is published: on a
    processor without instructions for it that takes longer than sending."""
    shared_bytes: int = Field(
        default=64 << 30, ge=0, le=MAX_STREAM_BYTES, json_schema_extra=when("transport", "object")
    )
    """Room in each machine's shared memory (/dev/shm), where the first of the job's actors puts a
    version and the others find it: never more than half of what is free. 0: each reads for itself.
    """


class TrackingConfig(Section):
    """What trackers of experiments (`logger_backends`) are told beside metrics."""

    entity: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")] | None = None
    """Team or user of wandb; default: that of the key."""
    episodes_every: int = Field(default=0, ge=0)
    """Every so many steps, episodes of the step as a table: their messages, reward and version;
    0: never."""
    max_episodes: int = Field(default=16, ge=1, le=1024, json_schema_extra=when("episodes_every"))
    """Episodes in such a table."""
    checkpoints: bool = False
    """Keep each checkpoint there, too: an artifact of wandb or MLflow."""


class LimitsConfig(Section):
    """Bounds of the job's queues and logs, in bytes."""

    task_bytes: int = Field(default=64 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Task queue."""
    rollout_bytes: int = Field(default=4 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Rollout log; a full log makes generators wait."""
    segment_bytes: int = Field(default=256 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Running episodes, with `generator.segment_tokens` or programs; what does not fit is not
    written down."""
    operation_bytes: int = Field(default=4 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Operations of programs that use the Tinker API, and their results, each; results are kept for
    a day, the oldest go first."""
    checkpoint_bytes: int = Field(default=16 << 30, ge=1 << 20, le=MAX_STREAM_BYTES)
    """Checkpoints in the broker (`storage.url: "broker:"`): room for `training.keep_last` + 2,
    one more with `training.keep_best`."""
    log_bytes: int = Field(default=64 << 20, ge=1 << 16, le=MAX_STREAM_BYTES)
    """Log lines of the actors, metrics and events, and traces, each; the oldest go first."""
    max_restarts: int = Field(default=5, ge=0, le=1000)
    """An actor that fails more often within ten minutes fails the job; so does one that fails more
    often in a row, over any time, without having done any work in between: a step, a group, an
    evaluation, an answer."""
    max_losses: int = Field(default=5, ge=0, le=1000)
    """A job that loses its node more often is not queued again but fails."""
    untrainable_groups: int | None = Field(default=None, ge=0)
    """So many groups in a row that could not be trained (all returns equal, filtered, stale,
    malformed) end the run with a checkpoint; default: 20 batches, but at least 256; 0: never."""
    idle_s: float = Field(default=86400.0, gt=0)
    """A run of which no task was finished for so long, in seconds, ends with a checkpoint: it
    gives its slots back when whoever hosts its game has gone for good."""


class JobConfig(Section):
    """Everything a training job is made of."""

    name: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    """Name of the run; default `<env>-<model>-<two words>`."""
    tags: Annotated[list[Label], Field(max_length=MAX_TAGS)] = Field(default_factory=list[str])
    """What the run is found by in lists; `tinkermq label` changes them later."""
    group: Label | None = None
    """Runs that belong together have the same: those of one sweep, the seeds of one setting."""
    notes: str = Field(default="", max_length=MAX_NOTES)
    """What is to be remembered of the run, for people."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of data order, episodes and optimiser."""
    output_dir: str = "outputs"
    """Run folders are made here, on the pool."""
    logger_backends: list[LoggerName] = Field(default_factory=lambda: ["jsonl"])
    """Where metrics go besides the broker; jsonl always."""
    project: str = "tinkermq"
    """Project name at the experiment tracker."""
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
    """Roles with a policy of their own, and its model; `model` plays all the others."""
    self_play: SelfPlayConfig = Field(default_factory=SelfPlayConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)

    @property
    def episodes_at_once(self) -> int:
        """Episodes that one generator has under way: of programs no more than have a place."""
        most = self.generator.max_episodes
        if not self.agent.runs_programs:
            return most
        places = max(1, self.env.hosts) * self.agent.per_host
        return min(most, max(1, places // max(1, self.generator.count)))

    @property
    def keeps_segments(self) -> bool:
        """Whether running episodes are written down."""
        return self.agent.runs_programs or self.generator.segment_tokens > 0

    @property
    def has_evaluator(self) -> bool:
        """Whether versions are validated, by a game."""
        return self.env.num_val > 0

    @property
    def generator_slots(self) -> int:
        """Slots of one generator; that of an SFT job only reads data, which takes none."""
        return 0 if self.sft.data else self.generator.slots

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's own functions that the learner runs, by the key that names each."""
        named = {
            f"{section}.{name}": value
            for section in ("algorithm", "training")
            for name, value in dict(getattr(self, section)).items()
            if name.startswith("own_")
        }
        return {key: value for key, value in named.items() if value is not None}

    def with_model(self, path: str) -> "JobConfig":
        """Return the same configuration for another model, with the tokenizer that lies there."""
        model = self.model.model_copy(update={"path": path, "tokenizer": None})
        return self.model_copy(update={"model": model})

    @model_validator(mode="before")
    @classmethod
    def _kind_settles_the_rest(cls, values: Any) -> Any:
        """Fill in what an SFT or agent job implies, and refuse what would have no effect in one."""
        if not isinstance(values, dict):
            return values
        known = without_removed(cast("dict[str, Any]", values))
        return settle_tinker(settle_agent(settle_sft(known)))

    @model_validator(mode="after")
    def _no_broken_rule(self) -> Self:
        broken = "; ".join(broken_rules(self))
        if broken:
            raise ValueError(broken)
        return self
