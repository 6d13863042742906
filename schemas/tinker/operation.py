"""The operations of a model under the Tinker API, their results, and what is asked about them."""

from typing import Annotated, ClassVar, Literal, NamedTuple

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
"""Of one operation, as it came: a request of the broker's size holds it and its names."""
Seq = Annotated[int, Field(ge=0, le=MAX_SEQ)]
ModelId = Annotated[str, Field(min_length=1, max_length=80)]


class Company(NamedTuple):
    """Beside how much of others' a micro-batch was computed, which decides its last bits."""

    before: int = 0
    """Rows of others before its own; tokens, where the attention reads all rows as one."""
    behind: int = 0
    """As much behind them."""
    columns: int = 0
    """Columns of each row."""


ALONE = Company()


class ModelOperation(Message):
    """One operation of one model, as its client sent it."""

    kind: OperationKind
    """What is done; `missing` stands for one that never came, so that those behind it can fail."""
    model: ModelId
    """`<session>:train:<number>`."""
    seq: Seq
    """Its place among the operations of the model; 0 makes the model."""
    body: bytes = Field(max_length=MAX_BODY_BYTES)
    """Protobuf for `forward_backward`, JSON for all else."""
    is_zstd: bool = False
    """Whether the body is compressed."""
    time: float = 0.0
    """When it was taken, in seconds since the epoch."""
    companies: list[Company] = Field(default_factory=list[Company])
    """Of its micro-batches, where it is kept for those who do it again; see `OperationResult`."""

    max_bytes: ClassVar[int] = MAX_BODY_BYTES + (4 << 10)

    @property
    def name(self) -> OperationName:
        """Its name; raises NotFoundError for a model id that is none."""
        return OperationName(ModelName.parse(self.model), self.seq)

    def check_place(self) -> None:
        """Raise MessageError for what cannot stand at its number."""
        fits = self.kind in _AT_0 if self.seq == 0 else self.kind != "create_model"
        if not fits:
            raise MessageError(
                f"operation {self.seq} of a model cannot be {self.kind}",
                hint="create_model and load_weights make a model, as its operation 0",
            )


class OperationTaken(Message):
    """Says that an operation is in the log: whatever dies, it takes effect once."""

    request_id: str
    """Its name, computed from model and number."""
    is_new: bool = True
    """False for one that had been taken before; its first form counts."""


class AwaitResult(Message):
    """Asks for the result of an operation, and waits for it a while."""

    model: ModelId
    seq: Seq
    wait_s: float = Field(default=25.0, ge=0, le=60)
    """How long."""

    max_bytes: ClassVar[int] = 1 << 10


class OperationResult(Message):
    """What has become of an operation."""

    state: Literal["pending", "done", "failed"] = "pending"
    """Whether it has taken effect, or never will."""
    body: bytes = b""
    """Its result, as clients read it."""
    is_proto: bool = False
    """Whether that is protobuf, or JSON."""
    error: str = ""
    """Why it failed."""
    category: Literal["user", "server", "unknown"] = "unknown"
    """Whose mistake that was."""
    queue_reason: str = ""
    """While it is pending: what it waits for."""
    companies: list[Company] = Field(default_factory=list[Company])
    """Of its micro-batches, if some were computed beside those of others."""


class AboutModel(Message):
    """Asks about one model."""

    model: ModelId

    max_bytes: ClassVar[int] = 1 << 10


class AboutCheckpoint(Message):
    """Asks what a checkpoint holds."""

    path: str = Field(max_length=400)
    """`tinker://…`"""

    max_bytes: ClassVar[int] = 1 << 10


class ModelInfo(Message):
    """What a trainer knows of one model."""

    model: ModelId
    base: str
    """Name under which the base model is offered."""
    folder: str
    """Folder of the base model, with its tokenizer."""
    arch: str
    """`model_type` of its configuration."""
    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    applied: int = 0
    """Number of the newest operation that has taken effect."""


class TrainerOffer(Message):
    """A base model on which users of the pool may train."""

    job: str
    """The job that trains on it."""
    base: str
    """Name under which programs ask for it."""
    max_context: int
    """Longest sequence in tokens; 0: as the model has it."""
    max_rank: int
    """Largest rank of an adapter."""


class TrainerOffers(Message):
    """All base models that are offered, whether their trainers run at this moment or not."""

    offers: list[TrainerOffer] = Field(default_factory=list[TrainerOffer])
