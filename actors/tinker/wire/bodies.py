"""The JSON bodies of the Tinker API's operations.

Keys that are not named here are ignored where they are null, and refused otherwise: what would have
no effect is not taken silently.
"""

from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....schemas.tinker.datum import AdamParams, LoraSpec
from ....schemas.tinker.names import CheckpointName
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import ConfigError, MessageError
from ....schemas.wire.message import summarize

MAX_TTL_S = 10 * 365 * 86400
MAX_RECIPIENTS = 16
_NO_EFFECT = frozenset({"type", "user_metadata"})
B = TypeVar("B", bound="TinkerBody")


class TinkerBody(BaseModel):
    """A body: what it asks for, or ConfigError for what is not offered."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=False)
    defaults: ClassVar[dict[str, Any]] = {}
    """Further keys that are taken with one value only, as they then change nothing."""
    remedies: ClassVar[dict[str, str]] = {}
    """What to do instead of sending another, where that is more than to leave it out."""

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Read a body; raises MessageError, ConfigError."""
        value = read_json(raw)
        try:
            body = cls.model_validate(value)
        except ValidationError as error:
            raise MessageError(summarize(error)) from error
        for name, one in (body.model_extra or {}).items():
            unset = one is None or name in _NO_EFFECT
            if not unset and (name not in cls.defaults or cls.defaults[name] != one):
                hint = cls.remedies.get(name, f"leave {name} out of the request")
                raise ConfigError(f"{name}={one!r} is not offered here", hint=hint)
        return body


class LoraBody(BaseModel):
    """Which adapter is wanted."""

    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def spec(self) -> LoraSpec:
        """Return it as the trainer takes it."""
        return LoraSpec(**self.model_dump())


class OptimizerBody(BaseModel):
    """Which optimiser is wanted."""

    type: Literal["adamw"] = "adamw"


class CreateModelBody(TinkerBody):
    """`create_model`."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    lora_config: LoraBody
    optimizer_config: OptimizerBody = Field(default_factory=OptimizerBody)
    user_metadata: dict[str, Any] | None = None


class LoadWeightsBody(TinkerBody):
    """`load_weights`: into a new model, number 0 of its operations, or into one that is there."""

    path: str
    optimizer: bool = False
    base_model: str | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    model_id: str | None = None
    seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None

    def source(self) -> CheckpointName:
        """Return what is loaded; raises NotFoundError."""
        return CheckpointName.parse(self.path)


class AdamBody(BaseModel):
    """AdamW's parameters."""

    model_config = ConfigDict(extra="forbid")
    learning_rate: float = Field(default=1e-4, allow_inf_nan=False, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class OptimStepBody(TinkerBody):
    """`optim_step`."""

    model_id: str
    seq_id: int
    adam_params: AdamBody

    def params(self) -> AdamParams:
        """Return them as the trainer takes them."""
        return AdamParams(**self.adam_params.model_dump())


class SaveWeightsBody(TinkerBody):
    """`save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    model_id: str
    seq_id: int
    kind: Literal["snapshot", "inflight"] = "snapshot"
    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None
    age_encryption_recipients: list[str] | None = Field(default=None, max_length=MAX_RECIPIENTS)

    def check_kind(self, *, passing: bool) -> None:
        """Raise ConfigError where samples are to move on to what has a name, or is no sampler's."""
        if self.kind == "inflight" and not passing:
            raise ConfigError(
                "kind='inflight' is not offered for weights with a name",
                hint="save_weights_and_get_sampling_client(kind='inflight') gives none",
            )

    def name(self) -> str:
        """Return the checkpoint's name; raises ConfigError for one that cannot be."""
        if self.path is None or not CheckpointName.is_name(self.path):
            raise ConfigError(
                f"a checkpoint cannot be named {self.path!r}",
                hint="1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )
        return self.path
