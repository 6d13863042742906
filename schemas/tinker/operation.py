"""Operations of the Tinker API on models, their results, and their view on the dashboard."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from ..wire.errors import MessageError
from ..wire.message import Message
from .names import MAX_SEQ, ModelName, OperationName

OperationKind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "missing",
]
_AT_0 = frozenset({"create_model", "load_weights", "missing"})
MAX_BODY_BYTES = 7 << 20
"""Size of one operation, which must fit into one message of the broker."""
Seq = Annotated[int, Field(ge=0, le=MAX_SEQ)]
ModelId = Annotated[str, Field(min_length=1, max_length=80)]


class Company(NamedTuple):
    """Rows of other models computed with a micro-batch, which decide its last bits."""

    before: int = 0
    """Rows of others before its own; tokens, if the attention reads all rows as one."""
    behind: int = 0
    """Rows, or tokens, of others after its own."""
    columns: int = 0
    """Columns of each row."""


ALONE = Company()


class ModelOperation(Message):
    """One operation of one model, as the client sent it."""

    kind: OperationKind
    """`missing` replaces one that never arrived, so that later ones can be applied."""
    model: ModelId
    """`<session>:train:<number>`."""
    seq: Seq
    """Number among the model's operations; 0 creates it."""
    body: bytes = Field(max_length=MAX_BODY_BYTES)
    """Protobuf for `forward_backward`, else JSON."""
    is_zstd: bool = False
    time: float = 0.0
    """When it was accepted."""

    max_bytes: ClassVar[int] = MAX_BODY_BYTES + (4 << 10)

    @property
    def name(self) -> OperationName:
        """Its name; raises NotFoundError for an invalid model id."""
        return OperationName(ModelName.parse(self.model), self.seq)

    def check_place(self) -> None:
        """Raise MessageError for a kind that its number does not allow."""
        fits = self.kind in _AT_0 if self.seq == 0 else self.kind != "create_model"
        if not fits:
            raise MessageError(
                f"operation {self.seq} of a model cannot be {self.kind}",
                hint="operation 0 of a model is create_model or load_weights",
            )


class OperationTaken(Message):
    """The operation is in the log and takes effect once."""

    request_id: str
    """Its name, from model and number."""
    is_new: bool = True
    """False: it was accepted before; the first form counts."""


class AwaitResult(Message):
    """Wait for the result of an operation."""

    model: ModelId
    seq: Seq
    wait_s: float = Field(default=25.0, ge=0, le=60)

    max_bytes: ClassVar[int] = 1 << 10


class OperationResult(Message):
    """State and result of an operation."""

    state: Literal["pending", "done", "failed"] = "pending"
    """done: applied; failed: never will be."""
    body: bytes = b""
    """Result for the client."""
    is_proto: bool = False
    """Whether the body is protobuf instead of JSON."""
    error: str = ""
    category: Literal["user", "server", "unknown"] = "unknown"
    """Side that caused the error."""
    queue_reason: str = ""
    """Why a pending operation waits."""
    companies: list[Company] = Field(default_factory=list[Company])
    """Rows of other models computed with each micro-batch, which decide its last bits."""


class AboutModel(Message):
    """Request information about a model."""

    model: ModelId

    max_bytes: ClassVar[int] = 1 << 10


class AboutCheckpoint(Message):
    """Request information about a checkpoint."""

    path: str = Field(max_length=400)
    """`tinker://…`"""

    max_bytes: ClassVar[int] = 1 << 10


class ModelInfo(Message):
    """Information about one model."""

    model: ModelId
    base: str
    folder: str
    """The base model's, with its tokenizer."""
    arch: str
    """`model_type` of its configuration."""
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    applied: int = 0
    """Newest applied operation."""


class TrainerOffer(Message):
    """A base model that users may train."""

    job: str
    base: str
    """Name of the base model for programs."""
    max_context: int
    """Longest context in tokens; 0: the model's limit."""
    max_rank: int


class TrainerOffers(Message):
    """All offered base models, whether their trainers run or not."""

    offers: list[TrainerOffer] = Field(default_factory=list[TrainerOffer])


# -- view of a service on the dashboard ---------------------------------------------------------


class AboutSessions(Message):
    """Request the user's models and the queue."""

    max_bytes: ClassVar[int] = 1 << 10


class ModelShown(Message):
    """One of the user's models."""

    info: ModelInfo
    steps: int
    """Updates so far."""
    tokens: int = 0
    """Tokens computed in `forward` and `forward_backward`."""
    waiting: int
    """Waiting operations."""
    waiting_bytes: int
    reason: str = ""
    """Why they wait."""
    idle_s: float | None = None
    """Seconds since its last operation; null: before the trainer started."""
    last: dict[str, float] = Field(default_factory=dict[str, float])
    """Metrics of its newest step."""


class TenantShown(Message):
    """One user of the trainer."""

    user: str
    models: int
    tokens: int = 0
    """Tokens computed for the user."""
    waiting: int
    """Waiting operations."""
    waiting_bytes: int


class SessionsShown(Message):
    """The user's models, and all users of the trainer."""

    base: str
    models: list[ModelShown] = Field(default_factory=list[ModelShown])
    tenants: list[TenantShown] = Field(default_factory=list[TenantShown])


class ModelCurves(Message):
    """The curves of one model."""

    shown: ModelShown
    points: dict[str, Any]
    """`width` steps per point, `x` their first steps, `series` by name with `y`, `low`, `high`."""
