"""Jobs: records, states, and requests to the scheduler."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from .config.sections import MAX_NOTES, MAX_TAGS, Label, rename_keys
from .metric import Event
from .tinker.usage import SamplerTokens
from .wire.message import Message, Request
from .wire.subjects import JobScope, token

# Secrets of jobs: sealed by the client, opened by the scheduler.

SecretName = Literal["WANDB_API_KEY", "TINKERMQ_NOTIFY_URL", "TINKERMQ_TEACHER_KEY"]
"""Environment variables that a user may pass to a job."""
WANDB_KEY: SecretName = "WANDB_API_KEY"
NOTIFY_URL: SecretName = "TINKERMQ_NOTIFY_URL"
TEACHER_KEY: SecretName = "TINKERMQ_TEACHER_KEY"
MAX_SEALED_BYTES = 16 << 10


class JobSecrets(Message):
    """Content of a sealed box; never sent, stored or logged in the clear."""

    user: str
    """Who sealed it; a copy opens for no other user's job."""
    values: dict[SecretName, Annotated[str, Field(min_length=1, max_length=4096)]]
    """The secrets, by name."""


class SealingKey(Message):
    """Public key for sealing secrets: reply of the scheduler's `key`."""

    public: bytes = Field(min_length=32, max_length=32)
    """An X25519 key."""


class SecretsRequest(Request):
    """Set the secrets of an existing job: `secrets`."""

    job: str
    """Job id or run name."""
    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class SealedSecrets(Message):
    """Secrets of a job, in the KV bucket of secrets until the job ends."""

    sealed: bytes = Field(max_length=MAX_SEALED_BYTES)
    """JobSecrets in a sealed box."""


class OpenRequest(Message):
    """A node requests the secrets of a process that it starts, on `rpc.node.secrets.open`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    actor: str
    """Name of the actor."""
    attempt: int = Field(ge=1)
    """Attempt of the job."""


class OpenedSecrets(Message):
    """Secrets for the process's environment."""

    values: dict[SecretName, str]
    """The secrets, by name; empty: it needs none."""


JobState = Literal[
    "QUEUED", "STARTING", "RUNNING", "PAUSED", "LOST", "COMPLETED", "FAILED", "CANCELLED"
]
HOLDING_STATES: frozenset[str] = frozenset({"STARTING", "RUNNING", "PAUSED"})
"""States in which a job has actors on nodes."""
FINAL_STATES: frozenset[str] = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
LAST_STEP = "last"
"""Step in `run@step`: the run's newest checkpoint."""
BEST_STEP = "best"
"""Step in `run@step`: the remaining checkpoint with the best validation."""
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
"""Allowed transitions of states; final states are left only by `resume`."""


MAX_PRIORITY = 10
MAX_CONFIG_BYTES = 512 << 10
"""Size of a request with a configuration."""
MAX_RECORD_BYTES = 1 << 20
"""Size of a job's record."""
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class ActorPlacement(Message):
    """One actor of a job, and its node."""

    name: str
    """Name within the job: `learner`, `generator-0` …"""
    role: Role
    """What it does."""
    node: str | None = None
    """Its node; null: it waits for one."""
    slots: int = Field(default=1, ge=0)
    """Slots that it holds."""
    devices: list[int] = Field(default_factory=list[int])
    """Which slots of the node: indices of GPUs or CPU shares."""
    state: Literal["placed", "running", "exited", "failed"] = "placed"
    """State that the node last reported."""
    restarts: int = 0
    """How often the node restarted it."""
    trouble: str = ""
    """Why it was restarted, until it finishes some work."""
    spread: list[int] = Field(default_factory=list[int])
    """For a learner with ranks: numbers of machines over which they may be divided equally, best
    first."""


class JobRecord(Message):
    """The scheduler's record of a job, in the KV bucket of jobs."""

    job: str
    """Job id."""
    name: str
    """Name of the run and of its folder."""
    user: str
    """Owner."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    """What it does."""
    state: JobState
    """Its state."""
    reason: str = ""
    """Why it is in this state."""
    priority: int = 0
    """Jobs of a higher priority are placed first."""
    config: Annotated[dict[str, Any], AfterValidator(rename_keys)]
    """The effective configuration."""
    configured: bool = True
    """False until a client has completed the configuration (`set_config`, `fit`)."""
    actors: list[ActorPlacement] = Field(default_factory=list[ActorPlacement])
    """Its actors."""
    attempt: int = Field(default=1, ge=1)
    """1 + number of resumes."""
    losses: int = 0
    """Node losses since it was submitted or resumed."""
    run_dir: str = ""
    """Run folder on the pool."""
    output_roots: list[str] = Field(default_factory=list[str])
    """Folders below which its processes may write; empty: anywhere."""
    fork_of: str | None = None
    """`run@step` of the checkpoint that it starts from."""
    weights_only: bool = False
    """That checkpoint is the initial model; optimiser, steps and data order start anew."""
    fork_dir: str = ""
    """Folder of that checkpoint; once configured, the job's own copy in `run_dir`."""
    follow: str | None = None
    """Job id of the live run whose newest version an inference job serves."""
    judge: str | None = None
    """Job id of the inference job that judges its episodes (`env.reward.judge`)."""
    teachers: dict[str, str] = Field(default_factory=dict[str, str])
    """Job ids of its teachers, by their names in the configuration (`job:NAME`)."""
    serves: str = ""
    """What an inference job serves: `run@step`, the followed run, or empty for a model."""
    adapters: dict[str, str] = Field(default_factory=dict[str, str])
    """Further LoRA adapters served on the same base: `run@step` to the folder of its copy."""
    stop: Literal["no", "drain", "now"] = "no"
    """Requested stop: drain writes a checkpoint first, now does not."""
    stop_complete: bool = False
    """Whether that stop ends the job as COMPLETED."""
    stopped_by: str = ""
    """Who requested the stop."""
    place: int = 0
    """Place in the queue, from 1; in replies only."""
    version: int = 0
    """Newest policy version known to the scheduler."""
    created: float
    """Seconds since the epoch."""
    started: float | None = None
    """First start."""
    finished: float | None = None
    """Time of its final state."""
    untold: list[Event] = Field(default_factory=list[Event])
    """Events not yet in its stream: all until the stream exists, at the first start; later those of
    the scheduler's current round."""
    has_streams: bool = False
    """Whether its streams exist."""
    stored_bytes: int = Field(default=0, ge=0)
    """Bytes that its streams may hold while it lives, and do hold after its end."""
    slot_s: dict[str, float] = Field(default_factory=dict[str, float])
    """Slot-seconds used until `metered`, by role."""
    tinker_tokens: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens that a Tinker service has computed for models, by user."""
    tinker_sampled: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens that its samplers have computed, prompts included, by user."""
    tinker_samplers: dict[str, SamplerTokens] = Field(default_factory=dict[str, SamplerTokens])
    """Last report of each sampler; included in the sum."""
    secrets: list[SecretName] = Field(default_factory=list[SecretName])
    """Names of its sealed secrets."""
    metered: float = 0.0
    """When its slots last changed."""
    removal: Removal = "no"
    """Archiving or deletion in progress."""
    archived: float | None = None
    """When it was archived, in seconds since the epoch; the record is then in the bucket of
    archived jobs."""
    refused: str = ""
    """Why the last request to restore it failed."""
    archive_digest: str = Field(default="", max_length=64, pattern=r"^[0-9a-f]*$")
    """BLAKE3 of its complete archive, checked before restoring."""
    brought_back: float | None = None
    """When it was last restored; it counts as ended then."""

    def named_at(self, at: str) -> str:
        """Return the key of the job; checks the names of its actors and of other jobs, too."""
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
        """The configuration without the keys that name this job, for another job."""
        own = ("name", "tags", "group", "notes")
        return {key: value for key, value in self.config.items() if key not in own}

    @property
    def tags(self) -> list[str]:
        """Tags of the job."""
        return [str(tag) for tag in self.config.get("tags") or ()]

    @property
    def group(self) -> str:
        """Group of the job, or nothing."""
        return str(self.config.get("group") or "")

    @property
    def notes(self) -> str:
        """Notes of the job."""
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
    """The job made by a submission, in the KV bucket of requests, for repeated requests."""

    job: str
    """Job id."""


class SubmitRequest(Request):
    """Submit a job: `rpc.<u>.scheduler.submit`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    request_id: str = Field(min_length=1, max_length=64)
    """Made by the client; a repeated id returns the same job."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    """What the job does."""
    config: dict[str, Any]
    """Configuration (JobConfig)."""
    configured: bool = True
    """False: `configure` completes the configuration later."""
    fork_of: str | None = None
    """Checkpoint to start from: `run@step`, `run@last` or `run@best`."""
    weights_only: bool = False
    """Use only the checkpoint's weights, as the initial model of a new run."""
    priority: Priority = 0
    """Jobs of a higher priority are placed first."""
    sealed: bytes = Field(default=b"", max_length=MAX_SEALED_BYTES)
    """JobSecrets in a box sealed to the scheduler's key; kept apart from the record."""
    follow: str | None = None
    """Live run, by id or name, whose newest version an inference job serves."""
    adapters: list[str] = Field(default_factory=list[str], max_length=64)
    """Further LoRA checkpoints (`run@step`, `run@last`) served on one base."""


class JobRequest(Request):
    """Name one job."""

    job: str
    """Job id or run name."""


class ResumeRequest(Request):
    """Continue a job: `resume`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    job: str
    """Job id or run name."""
    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keys that replace those of an ended job, such as `training.num_steps`."""


class ConfigureRequest(Request):
    """Complete the configuration of a job: `configure`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    job: str
    """Job id or run name."""
    config: dict[str, Any]
    """Keys to merge into the configuration."""
    start: bool = False
    """True: the configuration is complete; start the actors."""


class StopRequest(Request):
    """Stop a job: `stop`."""

    job: str
    """Job id or run name."""
    now: bool = False
    """Do not wait for a checkpoint."""
    complete: bool = False
    """End as COMPLETED instead of CANCELLED."""


class ScaleRequest(Request):
    """Change the number of a job's generators, servers or environment hosts: `scale`."""

    job: str
    """Job id or run name."""
    role: Literal["generator", "environment", "server"]
    """Which actors."""
    count: int = Field(ge=0, le=1024)
    """Their number."""


class PriorityRequest(Request):
    """Change the priority of a waiting job: `priority`."""

    job: str
    """Job id or run name."""
    priority: Priority
    """The new priority."""


class LabelRequest(Request):
    """Change tags, group and notes of a job: `label`. null leaves a value as it is."""

    job: str
    """Job id or run name."""
    tags: Annotated[list[Label], Field(max_length=MAX_TAGS)] | None = None
    """All its tags."""
    group: Label | Literal[""] | None = None
    """Its group; empty: none."""
    notes: Annotated[str, Field(max_length=MAX_NOTES)] | None = None
    """Its notes."""


class ListRequest(Request):
    """List jobs: `list`."""

    all: bool = False
    """Include ended jobs."""
    archived: bool = False
    """Include archived jobs."""
    widest: bool = False
    """Include jobs of others, for admins."""
    after: str = Field(default="", max_length=128)
    """Continue after this place, from the previous reply."""


class JobReply(Message):
    """One job."""

    record: JobRecord
    """Its record."""


class SubmissionFinding(Message):
    """Result of one check of a job."""

    what: Literal["job", "model", "data", "game", "slots"]
    """What was checked."""
    ok: bool
    """Whether a submission would pass."""
    text: str
    """The finding, or why a submission would be refused."""
    hint: str = ""
    """What to do about it."""
    by: str
    """Who checked: the scheduler, or nodes by name."""


class SubmissionFindings(Message):
    """Result of a dry run."""

    findings: list[SubmissionFinding]
    """In the order of the checks."""


class JobList(Message):
    """Jobs, newest first."""

    records: list[JobRecord]
    """Their records."""
    after: str = ""
    """`after` of the next request; empty: these were the last."""
