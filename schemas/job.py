"""Jobs: their record, states, and what clients ask the scheduler for."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .config.sections import MAX_NOTES, MAX_TAGS, Label
from .metric import Event
from .tinker.sessions import SamplerTokens
from .wire.message import Message, Request
from .wire.subjects import JobScope, token

# Secrets of a job: sealed by the client, opened by the scheduler, given to one process.

SecretName = Literal["WANDB_API_KEY", "TINKERMQ_NOTIFY_URL", "TINKERMQ_TEACHER_KEY"]
"""What a user may hand over with a job: the names of environment variables."""
WANDB_KEY: SecretName = "WANDB_API_KEY"
NOTIFY_URL: SecretName = "TINKERMQ_NOTIFY_URL"
TEACHER_KEY: SecretName = "TINKERMQ_TEACHER_KEY"
MAX_SEALED_BYTES = 16 << 10


class JobSecrets(Message):
    """What a sealed text holds; never sent, stored or logged as it is."""

    user: str
    """Who sealed it: a copied text opens for nobody else's job."""
    values: dict[SecretName, Annotated[str, Field(min_length=1, max_length=4096)]]
    """The secrets, by name."""


class SealingKey(Message):
    """The public key to which secrets are sealed: reply of the scheduler's `key`."""

    public: bytes = Field(min_length=32, max_length=32)
    """An X25519 key."""


class SecretsRequest(Request):
    """Hand secrets over for a job that is there: `secrets`."""

    job: str
    """Job id or run name."""
    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class SealedSecrets(Message):
    """The secrets of a job, in the KV bucket of secrets until the job has ended."""

    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class OpenRequest(Message):
    """A node asks for what a process that it starts needs, on `rpc.node.secrets.open`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    actor: str
    """Name of the actor."""
    attempt: int = Field(ge=1)
    """Attempt of the job."""


class OpenedSecrets(Message):
    """What the process gets in its environment."""

    values: dict[SecretName, str]
    """The secrets, by name; empty for a process that needs none."""


JobState = Literal[
    "QUEUED", "STARTING", "RUNNING", "PAUSED", "LOST", "COMPLETED", "FAILED", "CANCELLED"
]
HOLDING_STATES: frozenset[str] = frozenset({"STARTING", "RUNNING", "PAUSED"})
"""States in which a job has actors on nodes."""
FINAL_STATES: frozenset[str] = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
LAST_STEP = "last"
"""Stands for a step in `run@step`: that of the run's newest checkpoint."""
BEST_STEP = "best"
"""Stands for that of the checkpoint, of those that are left, with the best validation."""
Removal = Literal["no", "archive", "unarchive", "delete"]
Role = Literal[
    "learner", "rank", "generator", "evaluator", "environment", "server", "trainer", "sampler"
]
MAY_FOLLOW: dict[str, frozenset[str]] = {
    "QUEUED": frozenset({"STARTING", "CANCELLED", "FAILED"}),
    "STARTING": frozenset({"RUNNING", "QUEUED", "FAILED", "CANCELLED", "LOST"}),
    "RUNNING": frozenset({"PAUSED", "COMPLETED", "FAILED", "CANCELLED", "LOST"}),
    "PAUSED": frozenset({"RUNNING", "COMPLETED", "FAILED", "CANCELLED", "LOST"}),
    "LOST": frozenset({"QUEUED", "FAILED", "CANCELLED"}),
    "COMPLETED": frozenset({"QUEUED"}),
    "FAILED": frozenset({"QUEUED"}),
    "CANCELLED": frozenset({"QUEUED"}),
}
"""Which state may follow which; a final state is left only by `resume`."""


MAX_PRIORITY = 10
MAX_CONFIG_BYTES = 512 << 10
"""Of a request that carries a configuration."""
MAX_RECORD_BYTES = 1 << 20
"""Of a job's record."""
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class ActorPlacement(Message):
    """One actor of a job, and the node it was given to."""

    name: str
    """Name within the job: `learner`, `generator-0` …"""
    role: Role
    """What it does."""
    node: str | None = None
    """The node it was given to, or None while it waits for one."""
    slots: int = Field(default=1, ge=0)
    """Slots of the node that it holds."""
    devices: list[int] = Field(default_factory=list[int])
    """Which slots of the node: indices of its GPUs, or of its CPU shares."""
    state: Literal["placed", "running", "exited", "failed"] = "placed"
    """What the node last said of it."""
    restarts: int = 0
    """How often the node started it again."""
    trouble: str = ""
    """Why it was started again, while it has finished no piece of work since."""
    spread: list[int] = Field(default_factory=list[int])
    """Of a learner with ranks: over how many machines they may lie in equal parts, best first."""


class JobRecord(Message):
    """All that the scheduler knows of a job, in the KV bucket of jobs."""

    job: str
    """Job id."""
    name: str
    """Readable name of the run; also the name of its folder."""
    user: str
    """Owner."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    """What it does."""
    state: JobState
    """Where it stands."""
    reason: str = ""
    """Why it is in this state."""
    priority: int = 0
    """Jobs of a higher priority are placed first."""
    config: dict[str, Any]
    """The effective configuration."""
    configured: bool = True
    """False while a client still has to complete the configuration (`set_config`, `fit`)."""
    actors: list[ActorPlacement] = Field(default_factory=list[ActorPlacement])
    """Its actors."""
    attempt: int = Field(default=1, ge=1)
    """1 + the number of times it was resumed."""
    losses: int = 0
    """How often it lost its node since it was submitted or resumed."""
    run_dir: str = ""
    """Folder of the run on the pool."""
    output_roots: list[str] = Field(default_factory=list[str])
    """Folders below which its processes may write; none: anywhere."""
    fork_of: str | None = None
    """`run@step` whose checkpoint the job starts from."""
    weights_only: bool = False
    """The checkpoint is the job's initial model: optimiser, steps and data order begin anew."""
    fork_dir: str = ""
    """Folder of that checkpoint; once the job is configured, its own copy in `run_dir`."""
    follow: str | None = None
    """Job id of the live run whose newest version an inference job serves."""
    judge: str | None = None
    """Job id of the inference job that judges its episodes (`env.reward.judge`)."""
    teachers: dict[str, str] = Field(default_factory=dict[str, str])
    """Inference jobs that its generators ask as teachers: their names in the configuration
    (`job:NAME`) to their ids."""
    serves: str = ""
    """What an inference job serves: `run@step`, the run that it follows, or empty for a model."""
    adapters: dict[str, str] = Field(default_factory=dict[str, str])
    """Further LoRA adapters that an inference job serves on the same base: `run@step` to the folder
    of its own copy."""
    stop: Literal["no", "drain", "now"] = "no"
    """Whether a stop was asked for: drain writes a checkpoint first, now does not."""
    stop_complete: bool = False
    """The stop that was asked for ends the job as COMPLETED."""
    stopped_by: str = ""
    """Who asked for the stop."""
    place: int = 0
    """Place in the queue, from 1; told in answers only."""
    version: int = 0
    """Newest policy version that the scheduler has heard of."""
    created: float
    """Seconds since the epoch."""
    started: float | None = None
    """When it first ran."""
    finished: float | None = None
    """When it came to its last state."""
    untold: list[Event] = Field(default_factory=list[Event])
    """Events of its moves that are not in its stream yet: all until that is made, when it first
    starts; then the scheduler tells them at its next turn."""
    has_streams: bool = False
    """Whether its streams were made."""
    stored_bytes: int = Field(default=0, ge=0)
    """What its streams may hold while it lives, what they do hold once it has ended."""
    slot_s: dict[str, float] = Field(default_factory=dict[str, float])
    """Slot-seconds that it has held, by role, until `metered`."""
    tinker_tokens: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens that a Tinker service has computed for models, by user."""
    tinker_sampled: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens that its samplers have computed, prompts included, by user."""
    tinker_samplers: dict[str, SamplerTokens] = Field(default_factory=dict[str, SamplerTokens])
    """What each of its samplers has last told; it is in the sum."""
    secrets: list[SecretName] = Field(default_factory=list[SecretName])
    """Names of what its owner has handed over sealed; never the values."""
    metered: float = 0.0
    """When what it holds last changed."""
    removal: Removal = "no"
    """What the scheduler is doing to a job that has ended, until it is done."""
    archived: float | None = None
    """When its streams were put into its archive, in seconds since the epoch; the record is in the
    bucket of archived jobs then."""
    refused: str = ""
    """Why it could not be brought back when that was last asked for."""
    archive_digest: str = Field(default="", max_length=64, pattern=r"^[0-9a-f]*$")
    """BLAKE3 of its archive, once that is whole: nothing else is brought back."""
    brought_back: float | None = None
    """When it was last brought back from there: it stays as long as one that ended then."""

    def named_at(self, at: str) -> str:
        """Return the key of the job; the names of its actors and of other jobs are checked, too."""
        for actor in self.actors:
            token(actor.name, what="actor")
        for job in (self.follow, self.judge, *self.teachers.values()):
            token(job or self.job, what="job id")
        return self.scope.key

    @property
    def scope(self) -> JobScope:
        """The job's names on the broker."""
        return JobScope(self.user, self.job)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as a job for the same thing takes it: without what names this one."""
        own = ("name", "tags", "group", "notes")
        return {key: value for key, value in self.config.items() if key not in own}

    @property
    def tags(self) -> list[str]:
        """What the job is found by."""
        return [str(tag) for tag in self.config.get("tags") or ()]

    @property
    def group(self) -> str:
        """The group that the job is in, or nothing."""
        return str(self.config.get("group") or "")

    @property
    def notes(self) -> str:
        """What its owner wrote down of the job."""
        return str(self.config.get("notes") or "")

    @property
    def trains(self) -> bool:
        """Whether the job has a learner, and so steps, versions and checkpoints."""
        return self.kind in ("train", "sft")

    @property
    def has_own_code(self) -> bool:
        """Whether functions of the job's owner run where its folder is written."""
        sections: list[dict[str, Any]] = [
            self.config.get("algorithm") or {},
            self.config.get("training") or {},
        ]
        return any(
            name.startswith("own_") and value is not None
            for section in sections
            for name, value in section.items()
        )


class RequestRecord(Message):
    """The job that a submission made, in the KV bucket of requests: it may be sent again."""

    job: str
    """Job id."""


class SubmitRequest(Request):
    """Submit a job: `rpc.<u>.scheduler.submit`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    request_id: str = Field(min_length=1, max_length=64)
    """Made by the client; the same id returns the same job."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    """What the job does."""
    config: dict[str, Any]
    """Configuration, checked against JobConfig."""
    configured: bool = True
    """False: the configuration is completed later by `configure`."""
    fork_of: str | None = None
    """`run@step` whose checkpoint the job starts from, `run@last` or `run@best`."""
    weights_only: bool = False
    """Take the checkpoint's weights as the initial model and begin a new run with them, instead of
    going on where the other one was."""
    priority: Priority = 0
    """Jobs of a higher priority are placed first."""
    sealed: bytes = Field(default=b"", max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box to the scheduler's key; kept beside the record, never in it."""
    follow: str | None = None
    """Live run, by id or name, whose newest version an inference job serves."""
    adapters: list[str] = Field(default_factory=list[str], max_length=64)
    """Further checkpoints of LoRA runs (`run@step`, `run@last`) that an inference job serves on one
    base."""


class JobRequest(Request):
    """Name one job, by id or by name of its run."""

    job: str
    """Job id or run name."""


class ResumeRequest(Request):
    """Let a job go on: `resume`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    job: str
    """Job id or run name."""
    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys to lay over the configuration of a job that has ended: `training.num_steps`."""


class ConfigureRequest(Request):
    """Complete the configuration of a job that was submitted without: `configure`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    job: str
    """Job id or run name."""
    config: dict[str, Any]
    """Keys to merge over those sent before."""
    start: bool = False
    """True: the configuration is complete, start the actors."""


class StopRequest(Request):
    """Stop a job: `stop`."""

    job: str
    """Job id or run name."""
    now: bool = False
    """Do not wait for a checkpoint."""
    complete: bool = False
    """End as COMPLETED instead of CANCELLED."""


class ScaleRequest(Request):
    """Change the number of generators, servers or environment hosts of a job: `scale`."""

    job: str
    """Job id or run name."""
    role: Literal["generator", "environment", "server"]
    """Which actors."""
    count: int = Field(ge=0, le=1024)
    """How many there shall be."""


class PriorityRequest(Request):
    """Change the priority of a job that waits: `priority`."""

    job: str
    """Job id or run name."""
    priority: Priority
    """The new one."""


class LabelRequest(Request):
    """Change what a job is found by, whether it runs or has ended: `label`."""

    job: str
    """Job id or run name."""
    tags: Annotated[list[Label], Field(max_length=MAX_TAGS)] | None = None
    """All its tags from now on; none: they stay."""
    group: Label | Literal[""] | None = None
    """Its group; empty: it leaves the one that it is in; none: it stays."""
    notes: Annotated[str, Field(max_length=MAX_NOTES)] | None = None
    """Its notes; none: they stay."""


class ListRequest(Request):
    """List jobs: `list`."""

    all: bool = False
    """Also those that have ended."""
    archived: bool = False
    """Also those that were archived."""
    widest: bool = False
    """Also those of others, as far as the user may see them: for admins."""
    after: str = Field(default="", max_length=128)
    """Only those behind this place, which the reply before told."""


class JobReply(Message):
    """One job."""

    record: JobRecord
    """Its record."""


class SubmissionFinding(Message):
    """What was found of one thing that a job needs."""

    what: Literal["job", "model", "data", "game", "slots"]
    """What it is of."""
    ok: bool
    """Whether a submission would pass."""
    text: str
    """What was found, or why it would be refused."""
    hint: str = ""
    """What to do about it."""
    by: str
    """Who says so: the scheduler, or nodes by their names."""


class SubmissionFindings(Message):
    """What the pool says of a job that was not submitted."""

    findings: list[SubmissionFinding]
    """In the order in which they were looked for."""


class JobList(Message):
    """Jobs, newest first."""

    records: list[JobRecord]
    """Their records."""
    after: str = ""
    """There are more: ask again with this place. Empty: these were the last."""
