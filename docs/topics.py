"""Which message travels on which subject, and what each stream and bucket holds.

Tables for people, tools and docs/messages.md. The actors build the names themselves, from
`subjects`; tests compare both sides.
"""

from typing import Literal, NamedTuple

from tinkermq.schemas.agent import (
    CallDelivered,
    CallPart,
    CallRequest,
    CancelCall,
    EpisodePost,
    EpisodePosted,
    EpisodeSecret,
    GiveReply,
    GiveRequest,
)
from tinkermq.schemas.checks import CheckReply
from tinkermq.schemas.control import (
    ControlReply,
    ControlRequest,
    GpuTurn,
    GpuTurnRequest,
    PublishTasksReply,
    PublishTasksRequest,
    RankOrder,
    RankState,
    ReserveReply,
    ReserveRequest,
)
from tinkermq.schemas.env import (
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    ResetReply,
    ResetRequest,
    StepReply,
    StepRequest,
)
from tinkermq.schemas.infer import (
    CancelInference,
    ChatRequest,
    CompletionRequest,
    InferPart,
    PlayPart,
    PlayRequest,
)
from tinkermq.schemas.job import (
    ConfigureRequest,
    JobList,
    JobRecord,
    JobReply,
    JobRequest,
    LabelRequest,
    ListRequest,
    OpenedSecrets,
    OpenRequest,
    PriorityRequest,
    RequestRecord,
    ResumeRequest,
    ScaleRequest,
    SealedSecrets,
    SealingKey,
    SecretsRequest,
    StopRequest,
    SubmitRequest,
    TenantShares,
    TrainerUsage,
)
from tinkermq.schemas.machines import MachineList, MachineSpending
from tinkermq.schemas.metric import (
    EvalRecord,
    Event,
    LogLines,
    Metric,
    Presence,
    ValidationResult,
)
from tinkermq.schemas.node import (
    DamagedRecords,
    InspectQuestion,
    InspectRequest,
    LookQuestion,
    ModelQuestion,
    NodeList,
    NodeStatus,
    NodeSync,
    RemoveRun,
    SchedulerLease,
)
from tinkermq.schemas.rollout import Group, Segment
from tinkermq.schemas.task import BatchRecord, DeadLetter, Task
from tinkermq.schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportCheckpoint,
    FetchFile,
    FilePart,
    ListCheckpoints,
    ListRuns,
    ListSessions,
    RunPage,
    SessionPage,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from tinkermq.schemas.tinker.operation import (
    AboutCheckpoint,
    AboutModel,
    AboutSessions,
    AwaitResult,
    ModelCurves,
    ModelInfo,
    ModelOperation,
    OperationResult,
    OperationTaken,
    SessionsShown,
    TrainerOffers,
)
from tinkermq.schemas.tinker.sampling import (
    AwaitSample,
    FindSnapshot,
    FoundSnapshot,
    SampleRequest,
    SampleTaken,
)
from tinkermq.schemas.user import (
    AddUser,
    AuditList,
    AuditRecord,
    AuditRequest,
    JobKeyRequest,
    ListUsers,
    NameUser,
    NewKey,
    QuotaReply,
    RotateKey,
    SetQuota,
    UserList,
    UserRecord,
    UserReply,
)
from tinkermq.schemas.weights import (
    JoinRound,
    Manifest,
    Round,
    WeightsAnnouncement,
    WeightsBound,
    WeightsRoom,
)
from tinkermq.schemas.wire import subjects
from tinkermq.schemas.wire.message import Empty, Message
from tinkermq.schemas.wire.trace import StepTrace

_SCOPE = subjects.JobScope("u", "j")


class Topic(NamedTuple):
    """One subject: what is sent there, by whom, and what comes back."""

    subject: str
    """Subject, with `<u>` for the user, `<j>` for the job id, `<n>` for a task number."""
    kind: Literal["request", "stream", "announcement"]
    """A request has a reply; a stream stores what is sent; an announcement is heard or lost."""
    message: type[Message]
    """What is sent."""
    reply: type[Message] | None
    """What comes back, or None."""
    route: str
    """From whom to whom."""


class Store(NamedTuple):
    """One stream, key-value bucket or object store."""

    name: str
    """Its name; streams of buckets are called `KV_<name>`, those of object stores `OBJ_<name>`."""
    kind: Literal["stream", "bucket", "objects"]
    """What it is."""
    entries: str
    """Its subjects or keys."""
    message: type[Message] | None
    """What an entry is; None for raw bytes, or for more than one kind."""
    keeps: str
    """How long it keeps what."""


def _shown(name: str) -> str:
    """Put placeholders in the place of the example user and job."""
    named = name.replace(".u.j.", ".<u>.<j>.").replace("-u-j-", "-<u>-<j>-")
    return named.replace(".episode.e.", ".episode.<e>.")


def _job(subject: str, message: type[Message], reply: type[Message], route: str) -> Topic:
    return Topic(_shown(subject), "request", message, reply, route)


def _stored(subject: str, message: type[Message], route: str) -> Topic:
    return Topic(_shown(subject), "stream", message, None, route)


def _scheduler(
    method: str, message: type[Message], reply: type[Message], who: str = "client"
) -> Topic:
    subject = subjects.rpc("<u>", "scheduler", method)
    return Topic(subject, "request", message, reply, f"{who} → scheduler")


def _users(method: str, message: type[Message], reply: type[Message], who: str = "admin") -> Topic:
    subject = subjects.rpc("<u>", "users", method)
    return Topic(subject, "request", message, reply, f"{who} → auth service")


def _tinker(method: str, message: type[Message], reply: type[Message], to: str) -> Topic:
    subject = subjects.rpc("<u>", "tinker-<j>", method)
    return Topic(subject, "request", message, reply, f"gateway → {to} of the service")


TOPICS: tuple[Topic, ...] = (
    _scheduler("submit", SubmitRequest, JobReply),
    _scheduler("try", SubmitRequest, CheckReply),
    _scheduler("inspect", InspectRequest, CheckReply),
    _scheduler("configure", ConfigureRequest, JobReply),
    _scheduler("get", JobRequest, JobReply),
    _scheduler("list", ListRequest, JobList),
    _scheduler("quota", Empty, QuotaReply),
    _scheduler("trainers", Empty, TrainerOffers),
    _scheduler("tinker-usage", TrainerUsage, TenantShares, "trainer, sampler"),
    _scheduler("weights-room", WeightsRoom, WeightsBound, "learner"),
    _scheduler("stop", StopRequest, JobReply),
    _scheduler("resume", ResumeRequest, JobReply),
    _scheduler("scale", ScaleRequest, JobReply),
    _scheduler("priority", PriorityRequest, JobReply),
    _scheduler("label", LabelRequest, JobReply),
    _scheduler("pause", JobRequest, JobReply),
    _scheduler("unpause", JobRequest, JobReply),
    _scheduler("archive", JobRequest, JobReply),
    _scheduler("unarchive", JobRequest, JobReply),
    _scheduler("delete", JobRequest, JobReply),
    _scheduler("nodes", Empty, NodeList),
    _scheduler("machines", Empty, MachineList),
    _scheduler("damaged", Empty, DamagedRecords),
    _scheduler("key", Empty, SealingKey),
    _scheduler("secrets", SecretsRequest, JobReply),
    Topic(
        subjects.rpc("node", "secrets", "open"),
        "request",
        OpenRequest,
        OpenedSecrets,
        "node → scheduler",
    ),
    _users("add", AddUser, NewKey),
    _users("list", ListUsers, UserList),
    _users("rotate", RotateKey, NewKey, "admin, user"),
    _users("revoke", NameUser, UserReply),
    _users("quota", SetQuota, UserReply),
    _users("audit", AuditRequest, AuditList),
    _users("me", Empty, UserReply, "user"),
    Topic(
        subjects.rpc("node", "keys", "job"),
        "request",
        JobKeyRequest,
        NewKey,
        "node → auth service",
    ),
    Topic(subjects.AUDIT, "stream", AuditRecord, None, "auth service, scheduler → admins"),
    Topic(subjects.REFUSALS, "stream", AuditRecord, None, "auth service → admins"),
    Topic(subjects.node("<node>", "sync"), "request", NodeSync, NodeStatus, "scheduler → node"),
    Topic(subjects.node("<node>", "remove"), "request", RemoveRun, Empty, "scheduler → node"),
    Topic(
        subjects.node("<node>", "model"), "request", ModelQuestion, CheckReply, "scheduler → node"
    ),
    Topic(subjects.node("<node>", "look"), "request", LookQuestion, CheckReply, "scheduler → node"),
    Topic(
        subjects.node("<node>", "inspect"),
        "request",
        InspectQuestion,
        CheckReply,
        "scheduler → node",
    ),
    Topic(subjects.node("<node>", "status"), "request", Empty, NodeStatus, "anyone → node"),
    _stored(_SCOPE.task("<n>"), Task, "learner → one generator"),
    _stored(
        _SCOPE.validation_task("<version>", "<n>"), Task, "learner → one generator or evaluator"
    ),
    _stored(
        _SCOPE.validation_result("<version>", "<n>"),
        ValidationResult,
        "generator, evaluator → learner",
    ),
    _stored(_SCOPE.rollout("<n>"), Group, "generator, external agent → learner"),
    _stored(_SCOPE.segment("<n>", "<e>"), Segment, "generator → next holder of the task"),
    _tinker("submit", ModelOperation, OperationTaken, "trainer"),
    _tinker("result", AwaitResult, OperationResult, "trainer"),
    _tinker("info", AboutModel, ModelInfo, "trainer"),
    _tinker("checkpoint", AboutCheckpoint, ModelInfo, "trainer"),
    _tinker("sessions", AboutSessions, SessionsShown, "trainer"),
    _tinker("curves", AboutModel, ModelCurves, "trainer"),
    _tinker("checkpoints", ListCheckpoints, CheckpointPage, "trainer"),
    _tinker("change", ChangeCheckpoint, TinkerCheckpoint, "trainer"),
    _tinker("export", ExportCheckpoint, CheckpointExport, "trainer"),
    _tinker("fetch", FetchFile, FilePart, "trainer"),
    _tinker("runs", ListRuns, RunPage, "trainer"),
    _tinker("session", TellSession, SessionState, "trainer"),
    _tinker("session-list", ListSessions, SessionPage, "trainer"),
    _tinker("sample", SampleRequest, SampleTaken, "any sampler"),
    _tinker("sampled-<actor>", AwaitSample, OperationResult, "that sampler"),
    _tinker("chat", ChatRequest, InferPart, "any sampler"),
    _tinker("complete", CompletionRequest, InferPart, "any sampler"),
    Topic(
        subjects.rpc("<u>", "tinker-<j>", "cancel"),
        "announcement",
        CancelInference,
        None,
        "gateway → all samplers",
    ),
    _stored(
        _SCOPE.operation("<user>", "session", "<n>", "<seq>").replace("session", "<session>"),
        ModelOperation,
        "trainer → itself after a restart",
    ),
    _stored(
        _SCOPE.result("<user>", "session", "<n>", "<seq>").replace("session", "<session>"),
        OperationResult,
        "trainer → clients",
    ),
    Topic(
        _shown(_SCOPE.appended),
        "announcement",
        Empty,
        None,
        "nats-server → learner, clients: headers of a stored group",
    ),
    Topic(
        _shown(_SCOPE.validated),
        "announcement",
        Empty,
        None,
        "nats-server → learner: headers of a stored validation result",
    ),
    _stored(_SCOPE.batch, BatchRecord, "learner → clients, itself after a restart"),
    _stored(_SCOPE.dead, DeadLetter, "generator, clients → clients, learner"),
    _stored(_SCOPE.metric, Metric, "learner, evaluator → clients"),
    _stored(_SCOPE.event, Event, "any actor → clients"),
    _stored(_SCOPE.trace, StepTrace, "learner → clients"),
    _stored(_SCOPE.log("<actor>"), LogLines, "node → clients"),
    Topic(
        _shown(_SCOPE.weights),
        "announcement",
        WeightsAnnouncement,
        None,
        "learner → generators, evaluator",
    ),
    _job(_SCOPE.snapshot("find"), FindSnapshot, FoundSnapshot, "sampler → trainer"),
    _job(
        _SCOPE.snapshot("fetch"),
        FetchFile,
        FilePart,
        "sampler → trainer, on different disks",
    ),
    _job(
        _SCOPE.weights_join,
        JoinRound,
        Round,
        "generator, evaluator, server → learner, with `weights.transport: nccl`",
    ),
    _job(
        _SCOPE.env_describe,
        DescribeRequest,
        DescribeReply,
        "learner, evaluator → any environment host",
    ),
    _job(_SCOPE.env_give, GiveRequest, GiveReply, "gateway → the host in the pool"),
    _job(_SCOPE.env_reset, ResetRequest, ResetReply, "generator, evaluator → any environment host"),
    _job(
        _SCOPE.env("<host>", "reset"),
        ResetRequest,
        ResetReply,
        "generator, evaluator → the episode's host",
    ),
    _job(
        _SCOPE.env("<host>", "step"),
        StepRequest,
        StepReply,
        "generator, evaluator → the episode's host",
    ),
    _job(
        _SCOPE.env("<host>", "close"),
        CloseRequest,
        Empty,
        "generator, evaluator → the episode's host",
    ),
    _job(_SCOPE.episode("e", "call"), CallRequest, CallPart, "host of a program → its generator"),
    Topic(
        _shown(_SCOPE.episode("e", "cancel")),
        "announcement",
        CancelCall,
        None,
        "host of a program → its generator",
    ),
    Topic(
        _shown(_SCOPE.episode("e", "delivered")),
        "announcement",
        CallDelivered,
        None,
        "host of a program → its generator",
    ),
    _job(_SCOPE.episode("e", "post"), EpisodePost, EpisodePosted, "gateway → the episode's host"),
    _job(_SCOPE.episode_keys, Empty, EpisodeSecret, "host of programs → auth service"),
    _job(_SCOPE.infer("chat"), ChatRequest, InferPart, "gateway, client → any server"),
    _job(_SCOPE.infer("complete"), CompletionRequest, InferPart, "gateway, client → any server"),
    _job(_SCOPE.infer_at("<server>", "chat"), ChatRequest, InferPart, "gateway → one server"),
    _job(
        _SCOPE.infer_at("<server>", "complete"),
        CompletionRequest,
        InferPart,
        "gateway → one server",
    ),
    _job(_SCOPE.infer("play"), PlayRequest, PlayPart, "client → any server"),
    Topic(
        _shown(_SCOPE.infer("cancel")),
        "announcement",
        CancelInference,
        None,
        "gateway, client → all servers",
    ),
    _job(_SCOPE.rank("<actor>", "begin"), RankOrder, RankState, "learner → one of its ranks"),
    _job(
        _SCOPE.rank("<actor>", "order-<process>"),
        RankOrder,
        RankState,
        "learner → one of its ranks",
    ),
    _job(_SCOPE.rank("<actor>", "look-<process>"), Empty, RankState, "learner → one of its ranks"),
    _job(_SCOPE.control("<actor>"), ControlRequest, ControlReply, "scheduler, client → actor"),
    _job(
        _SCOPE.control("learner.reserve"), ReserveRequest, ReserveReply, "external agent → learner"
    ),
    _job(
        _SCOPE.control("learner.tasks"), PublishTasksRequest, PublishTasksReply, "client → learner"
    ),
    _job(_SCOPE.gpu_turn("learner"), GpuTurnRequest, GpuTurn, "generator on its GPU → learner"),
)
"""Every subject of the system."""

STORES: tuple[Store, ...] = (
    Store(
        _shown(_SCOPE.stream_task),
        "stream",
        "`task.<n>`, one message each",
        Task,
        "until acknowledged",
    ),
    Store(
        _shown(_SCOPE.stream_rollout),
        "stream",
        "`rollout.<n>`, one message each",
        Group,
        "until trimmed behind checkpoints; with `training.keep_rollouts` for good",
    ),
    Store(
        _shown(_SCOPE.stream_validation),
        "stream",
        "`validation.task.<version>.<n>`, `validation.result.<version>.<n>`, one message each; "
        "only of jobs that validate",
        ValidationResult,
        "tasks until acknowledged, results until the version's is reported",
    ),
    Store(
        _shown(_SCOPE.stream_segment),
        "stream",
        "`segment.<n>.<e>`; only with `generator.segment_tokens`",
        Segment,
        "until the group is logged, at most a day, up to `limits.segment_bytes`",
    ),
    Store(
        _shown(_SCOPE.stream_operation),
        "stream",
        "`op.<user>.<session>.<n>.<seq>`, one message each; only of a Tinker service",
        ModelOperation,
        "until included in the model's state on disk",
    ),
    Store(
        _shown(_SCOPE.stream_result),
        "stream",
        "`result.<user>.<session>.<n>.<seq>`, one message each; only of a Tinker service",
        OperationResult,
        "a day, the newest up to `limits.operation_bytes`",
    ),
    Store(_shown(_SCOPE.stream_batch), "stream", "`batch`", BatchRecord, "for good"),
    Store(
        _shown(_SCOPE.stream_dead),
        "stream",
        "`dead`",
        DeadLetter,
        "the newest, up to a byte bound",
    ),
    Store(
        _shown(_SCOPE.stream_feed),
        "stream",
        "`metric`, `event`",
        None,
        "the newest, up to `limits.log_bytes`",
    ),
    Store(
        _shown(_SCOPE.stream_trace),
        "stream",
        "`trace`",
        StepTrace,
        "the newest, up to `limits.log_bytes`",
    ),
    Store(
        _shown(_SCOPE.stream_log),
        "stream",
        "`log.<actor>`",
        LogLines,
        "the newest, up to `limits.log_bytes`",
    ),
    Store(
        _shown(_SCOPE.bucket_weights),
        "bucket",
        "`v<version>`, `latest`",
        Manifest,
        "while the version is needed",
    ),
    Store(
        _shown(_SCOPE.object_weights),
        "objects",
        "payloads that manifests name",
        None,
        "as long as the manifest",
    ),
    Store(
        _shown(_SCOPE.object_checkpoints),
        "objects",
        'files of checkpoints, with `storage.url: "broker:"`',
        None,
        "up to `limits.checkpoint_bytes`",
    ),
    Store(subjects.BUCKET_JOBS, "bucket", "`<u>.<j>`", JobRecord, "until the job is archived"),
    Store(subjects.BUCKET_ARCHIVE, "bucket", "`<u>.<j>`", JobRecord, "for good"),
    Store(subjects.BUCKET_COPIES, "bucket", "`<u>.<j>`", JobRecord, "as long as in `tmq-jobs`"),
    Store(subjects.BUCKET_SECRETS, "bucket", "`<u>.<j>`", SealedSecrets, "until the job has ended"),
    Store(
        subjects.BUCKET_REQUESTS,
        "bucket",
        "`<u>.<request id>`",
        RequestRecord,
        "a day",
    ),
    Store(
        subjects.BUCKET_EVALS,
        "bucket",
        "`<u>.<j>.<version>`",
        EvalRecord,
        "for good",
    ),
    Store(
        subjects.BUCKET_ACTORS,
        "bucket",
        "`<u>.<j>.<actor>`, `pool.<name>`",
        Presence,
        "10 s after the last heartbeat",
    ),
    Store(
        subjects.BUCKET_NODES,
        "bucket",
        "`<node>`",
        NodeStatus,
        "while the node is alive",
    ),
    Store(
        subjects.BUCKET_LEASES,
        "bucket",
        "`scheduler`",
        SchedulerLease,
        "until its holder ends",
    ),
    Store(subjects.BUCKET_MACHINES, "bucket", "`spent`", MachineSpending, "until the next day"),
    Store(
        subjects.BUCKET_USERS,
        "bucket",
        "`user.<u>`",
        UserRecord,
        "for good",
    ),
    Store(
        subjects.STREAM_AUDIT,
        "stream",
        "`tmq.v1.audit`",
        AuditRecord,
        "the newest, up to a byte bound; cannot be deleted",
    ),
    Store(
        subjects.STREAM_REFUSALS,
        "stream",
        "`tmq.v1.refusals`",
        AuditRecord,
        "as the audit",
    ),
)
"""Every stream, bucket and object store of the system."""
