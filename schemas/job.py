"""Jobs: records, states, usage, and requests to the scheduler."""

from collections import Counter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .config.sections import MAX_NOTES, MAX_TAGS, Label
from .metric import Event
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
    """User who sealed it; it opens for this user's jobs only."""
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
    actor: str
    """Name of the actor."""
    attempt: int = Field(ge=1)


class OpenedSecrets(Message):
    """Secrets for the process's environment."""

    values: dict[SecretName, str]
    """Secrets by name."""


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
"""Maximum size of a request with a configuration."""
MAX_RECORD_BYTES = 1 << 20
"""Maximum size of a job's record."""
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class ActorPlacement(Message):
    """One actor of a job, and its node."""

    name: str
    """`learner`, `generator-0` …"""
    role: Role
    node: str | None = None
    """Node of the actor; null: it waits for one."""
    slots: int = Field(default=1, ge=0)
    devices: list[int] = Field(default_factory=list[int])
    """The node's slots: indices of GPUs or CPU shares."""
    gpus: bool = False
    """Whether they are whole GPUs, not instances of one or CPU shares."""
    shares: str = ""
    """Actor of the job whose slots it uses too: always if it has none of its own, else in a pool
    of one GPU."""
    own_slots: int = Field(default=0, ge=0)
    """Slots that it holds where it does not share."""
    state: Literal["placed", "running", "exited", "failed"] = "placed"
    """State that the node last reported."""
    restarts: int = 0
    """How often the node restarted it."""
    trouble: str = ""
    """Why it was restarted, until it finishes some work."""
    spread: list[int] = Field(default_factory=list[int])
    """For a learner with ranks: numbers of machines over which they may be divided equally, best
    first."""
    added: bool = False
    """Whether it was added to a running job and has not had a node."""


class SamplerTokens(Message):
    """Last report of one sampler of a Tinker service."""

    since: float
    tokens: dict[str, int]
    """Tokens since then, prompts included, by user."""


class JobRecord(Message):
    """The scheduler's record of a job, in the KV bucket of jobs."""

    job: str
    name: str
    """Name of the run and its folder."""
    user: str
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    state: JobState
    reason: str = ""
    """Why it is in this state."""
    priority: int = 0
    """Higher ones are placed first."""
    config: dict[str, Any]
    """The effective configuration."""
    configured: bool = True
    """False until a client has completed the configuration (`set_config`, `fit`)."""
    actors: list[ActorPlacement] = Field(default_factory=list[ActorPlacement])
    attempt: int = Field(default=1, ge=1)
    """Number of the attempt: 1 + number of resumes."""
    losses: int = 0
    """Node losses since submission or resume."""
    run_dir: str = ""
    """Run folder on the pool."""
    output_roots: list[str] = Field(default_factory=list[str])
    """Folders below which it may write; empty: anywhere."""
    own_folders: list[str] = Field(default_factory=list[str])
    """Folders in which runs of its owner lie, besides that of its own `run_dir`."""
    fork_of: str | None = None
    """`run@step` of its first checkpoint."""
    weights_only: bool = False
    """Whether only the weights of that checkpoint are used."""
    fork_dir: str = ""
    """That checkpoint's folder; once configured, a copy in `run_dir`."""
    follow: str | None = None
    """Id of the live run whose newest version it serves."""
    judge: str | None = None
    """Id of the job that judges its episodes (`env.reward.judge`)."""
    teachers: dict[str, str] = Field(default_factory=dict[str, str])
    """Ids of its teachers, by name in the configuration (`job:NAME`)."""
    serves: str = ""
    """`run@step`, the followed run, or empty for a model."""
    adapters: dict[str, str] = Field(default_factory=dict[str, str])
    """Further LoRA adapters served: `run@step` to the folder of its copy."""
    stop: Literal["no", "drain", "now"] = "no"
    """Requested stop: drain writes a checkpoint first."""
    stop_complete: bool = False
    """Whether that stop ends the job as COMPLETED."""
    stopped_by: str = ""
    place: int = 0
    """Place in the queue, from 1; in replies only."""
    version: int = 0
    """Newest version known to the scheduler."""
    figures: dict[str, float] = Field(default_factory=dict[str, float], max_length=16)
    """Newest values of the metrics in lists, at its end; empty while it runs."""
    created: float
    started: float | None = None
    finished: float | None = None
    """Time of its final state."""
    untold: list[Event] = Field(default_factory=list[Event])
    """Events not yet in its stream: all until the stream exists; later those of the scheduler's
    current round."""
    has_streams: bool = False
    stored_bytes: int = Field(default=0, ge=0)
    """Bytes that its streams may hold; after its end, bytes that they hold."""
    slot_s: dict[str, float] = Field(default_factory=dict[str, float])
    """Slot-seconds used until `metered`, by role."""
    tinker_tokens: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens computed for models of a Tinker service, by user."""
    tinker_sampled: dict[str, int] = Field(default_factory=dict[str, int])
    """Tokens of its samplers, prompts included, by user."""
    tinker_samplers: dict[str, SamplerTokens] = Field(default_factory=dict[str, SamplerTokens])
    """Last report of each sampler, included in the sum."""
    secrets: list[SecretName] = Field(default_factory=list[SecretName])
    """Names of its sealed secrets."""
    metered: float = 0.0
    """Time at which its slots last changed."""
    removal: Removal = "no"
    """Archiving or deletion in progress."""
    archived: float | None = None
    """Time of archiving; the record is then in the bucket of archived jobs."""
    refused: str = ""
    """Why the last restore failed."""
    archive_digest: str = Field(default="", max_length=64, pattern=r"^[0-9a-f]*$")
    """BLAKE3 of its archive, checked before restoring."""
    brought_back: float | None = None
    """Time of the last restore, which counts as its end."""

    def named_at(self, at: str) -> str:
        """Return the key of the job; checks the names of its actors and of other jobs, too."""
        for actor in self.actors:
            token(actor.name, what="actor")
        for job in (self.follow, self.judge, *self.teachers.values()):
            token(job or self.job, what="job id")
        return self.scope.key

    @property
    def is_colocated(self) -> bool:
        """Whether an actor uses the slots of another one."""
        return any(actor.shares and actor.node and not actor.slots for actor in self.actors)

    @property
    def scope(self) -> JobScope:
        """The job's names on the broker."""
        return JobScope(self.user, self.job)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration for another job, without the keys that name this one."""
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


class RequestRecord(Message):
    """The job made by a submission, in the KV bucket of requests, for repeated requests."""

    job: str


class SubmitRequest(Request):
    """Submit a job: `rpc.<u>.scheduler.submit`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    request_id: str = Field(min_length=1, max_length=64)
    """Made by the client; a repeated id returns the same job."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    config: dict[str, Any]
    configured: bool = True
    """False: `configure` completes the configuration later."""
    fork_of: str | None = None
    """First checkpoint: `run@step`, `run@last` or `run@best`."""
    weights_only: bool = False
    """Use only its weights, as the initial model."""
    priority: Priority = 0
    sealed: bytes = Field(default=b"", max_length=MAX_SEALED_BYTES)
    """JobSecrets, sealed to the scheduler's key."""
    follow: str | None = None
    """Live run whose newest version an inference job serves."""
    adapters: list[str] = Field(default_factory=list[str], max_length=64)
    """Further LoRA checkpoints (`run@step`, `run@last`) to serve."""


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
    """Keys to replace, such as `training.num_steps`."""


class ConfigureRequest(Request):
    """Complete the configuration of a job: `configure`."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    job: str
    """Job id or run name."""
    config: dict[str, Any]
    """Keys to merge into the configuration."""
    start: bool = False
    """The configuration is complete: start."""


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
    count: int = Field(ge=0, le=1024)


class PriorityRequest(Request):
    """Change the priority of a waiting job: `priority`."""

    job: str
    """Job id or run name."""
    priority: Priority


class LabelRequest(Request):
    """Change tags, group and notes of a job: `label`. null leaves a value as it is; an empty group
    is none."""

    job: str
    """Job id or run name."""
    tags: Annotated[list[Label], Field(max_length=MAX_TAGS)] | None = None
    group: Label | Literal[""] | None = None
    notes: Annotated[str, Field(max_length=MAX_NOTES)] | None = None


class ListRequest(Request):
    """List jobs: `list`."""

    all: bool = False
    """Include ended jobs."""
    archived: bool = False
    """Include archived jobs."""
    widest: bool = False
    """Include jobs of others, for admins."""
    after: str = Field(default="", max_length=128)
    """`after` of the previous reply: continue there."""


class JobReply(Message):
    """One job."""

    record: JobRecord


class JobList(Message):
    """Jobs, newest first."""

    records: list[JobRecord]
    after: str = ""
    """`after` of the next request; empty: the end."""


# -- usage and shares of the users of a Tinker service ---------------------------------------------


class TrainerUsage(Request):
    """A trainer or sampler reports its users' usage and requests their shares."""

    job: str
    """Job of the service, owned by the requesting user."""
    sampler: str = Field(default="", max_length=80)
    """The reporting sampler; empty: the trainer."""
    since: float = 0.0
    """Start of that sampler, from which its tokens count."""
    tokens: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict[str, int], max_length=1000
    )
    """Tokens by user: of a trainer in the service's life, of a sampler since its start."""


class TenantShare(Message):
    """One user's share of a service."""

    weight: float = 1.0
    tokens_left: int | None = None
    """Tokens that the user may still compute; null: no bound."""


class TenantShares(Message):
    """Shares of the users that a trainer named."""

    users: dict[str, TenantShare] = Field(default_factory=dict[str, TenantShare])


# -- slot-seconds of a job by role: its record counts them as its actors start and end -------------


def metered(before: JobRecord, after: JobRecord, now: float) -> JobRecord:
    """Return `after` with the slot-seconds until `now` added, if its held slots differ."""
    held, holds = held_slots(before), held_slots(after)
    if held == holds:
        return after
    return after.model_copy(update={"slot_s": slot_seconds(before, now), "metered": now})


def slot_seconds(record: JobRecord, now: float) -> dict[str, float]:
    """Return the slot-seconds of a job by role, up to `now`."""
    total = dict(record.slot_s)
    for role, slots in held_slots(record).items():
        total[role] = total.get(role, 0.0) + slots * max(now - record.metered, 0.0)
    return total


def held_slots(record: JobRecord) -> dict[str, int]:
    """Return the slots that a job holds now, by role."""
    held: Counter[str] = Counter()
    if record.state in HOLDING_STATES:
        for actor in record.actors:
            if actor.node is not None and actor.slots:
                held[actor.role] += actor.slots
    return dict(held)
