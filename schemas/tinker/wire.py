"""The protobuf messages of the Tinker API, made from a table of their fields.

Field numbers and types are those of the API's clients. The messages are in a descriptor pool of
their own: an SDK in the same process has other messages with the same names.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..wire.codec import read_json
from ..wire.errors import ConfigError, DataError, MessageError
from ..wire.message import summarize
from .datum import AdamParams, Datum, LoraSpec, LossResult
from .names import CheckpointName

_PACKAGE: Final = "tinkermq_tinker"
_Field = tuple[int, str, str]
_REPEATED, _MAP, _ONEOF, _OPTIONAL = "repeated ", "map ", "oneof ", "optional "

_MESSAGES: Final[dict[str, list[_Field]]] = {
    "EncodedTextChunk": [(1, "tokens", "bytes")],
    "ImageChunk": [(1, "data", "bytes"), (2, "format", "string")],
    "DmelChunk": [(1, "dmel", "bytes")],
    "Chunk": [
        (1, "encoded_text", "oneof chunk EncodedTextChunk"),
        (2, "image", "oneof chunk ImageChunk"),
        (3, "dmel", "oneof chunk DmelChunk"),
    ],
    "SparseCsr": [
        (1, "values", "bytes"),
        (2, "crow_indices", "bytes"),
        (3, "col_indices", "bytes"),
    ],
    "Tensor": [
        (1, "dense", "oneof encoding bytes"),
        (2, "sparse_csr", "oneof encoding SparseCsr"),
        (3, "dtype", "int32"),
        (4, "shape", "repeated int64"),
    ],
    "Datum": [(1, "model_input", "repeated Chunk"), (2, "loss_fn_inputs", "map Tensor")],
    "LossConfigValue": [(1, "number", "oneof value double"), (2, "text", "oneof value string")],
    "ForwardBackwardRequest": [
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "repeated Datum"),
        (4, "loss_fn", "string"),
        (5, "loss_fn_config", "map double"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "map LossConfigValue"),
    ],
    "RequestName": [(1, "model_id", "string"), (2, "seq_id", "int32")],
    "BatchedTensor": [
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "repeated int64"),
    ],
    "ArrayRecord": [
        (1, "type_tag", "string"),
        (2, "fields", "map BatchedTensor"),
        (3, "num_datums", "int64"),
    ],
    "ForwardBackwardOutput": [
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "repeated ArrayRecord"),
        (3, "metrics", "map double"),
    ],
    "TopkLogprobs": [
        (1, "token_ids", "bytes"),
        (2, "logprobs", "bytes"),
        (3, "k", "uint32"),
        (4, "length", "uint32"),
    ],
    "SampledSequence": [
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "optional bytes"),
        (4, "topk_sampled_logprobs", "optional TopkLogprobs"),
    ],
    "SampleResponse": [
        (1, "sequences", "repeated SampledSequence"),
        (2, "prompt_logprobs", "optional bytes"),
        (3, "topk_prompt_logprobs", "optional TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", "int32"),
        (5, "target_prompt_logprobs", "optional Tensor"),
    ],
}
"""Number, name and type of the fields. An enumeration has the wire form of an int32."""

_F = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bytes": _F.TYPE_BYTES,
    "string": _F.TYPE_STRING,
    "int32": _F.TYPE_INT32,
    "uint32": _F.TYPE_UINT32,
    "int64": _F.TYPE_INT64,
    "double": _F.TYPE_DOUBLE,
    "bool": _F.TYPE_BOOL,
}


def _make_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tinkermq/tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add(message, field)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(names[name]) for name in _MESSAGES}


def _add(message: descriptor_pb2.DescriptorProto, field: _Field) -> None:
    number, name, kind = field
    made = message.field.add(name=name, number=number, label=_F.LABEL_OPTIONAL)
    if kind.startswith(_REPEATED):
        made.label, kind = _F.LABEL_REPEATED, kind.removeprefix(_REPEATED)
    elif kind.startswith(_MAP):
        made.label = _F.LABEL_REPEATED
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add(entry, (1, "key", "string"))
        _add(entry, (2, "value", kind.removeprefix(_MAP)))
        made.type, made.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    elif kind.startswith(_ONEOF):
        _, oneof, kind = kind.split(" ")
        names = [group.name for group in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        made.oneof_index = names.index(oneof)
    elif kind.startswith(_OPTIONAL):
        kind = kind.removeprefix(_OPTIONAL)
        made.proto3_optional = True
        made.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if kind in _SCALARS:
        made.type = _SCALARS[kind]
    else:
        made.type, made.type_name = _F.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_CLASSES: Final = _make_classes()
ForwardBackwardRequest: Final = _CLASSES["ForwardBackwardRequest"]
RequestName: Final = _CLASSES["RequestName"]
"""A `ForwardBackwardRequest` without its data, which takes much more memory than its bytes."""
ForwardBackwardOutput: Final = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Final = _CLASSES["SampleResponse"]


# Arrays in the Tinker API's protobuf messages: little-endian bytes and a type.

FLOAT32: Final = 1
_INT64, _INT32, _BFLOAT16 = 2, 3, 4
_TYPES: Final[dict[int, Any]] = {FLOAT32: "<f4", _INT64: "<i8", _INT32: "<i4"}
_MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 1 << 24
"""Bound on all arrays of a request: a sparse array of any size may take a few bytes."""


def read_tensor(tensor: Any, *, what: str, most: int = MAX_ELEMENTS) -> NDArray[Any]:
    """Return a `Tensor` message as an array: integers as int64, others as float32.

    Raises DataError for bytes that do not fit the shape, for more than `most` elements, and for an
    unknown type.
    """
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise DataError(f"{what} has {len(tensor.shape):,} dimensions", hint="send one or two")
    shape = tuple(int(size) for size in tensor.shape)
    if any(size < 0 for size in shape) or math.prod(shape) > most:
        raise DataError(
            f"{what} cannot have the shape {shape}",
            hint=f"all arrays of a request may have {MAX_ELEMENTS:,} elements together",
        )
    which = tensor.WhichOneof("encoding")
    if which == "dense":
        flat = _values(tensor.dense, tensor.dtype, what)
        shape = shape or (len(flat),)
        if math.prod(shape) != len(flat):
            raise DataError(f"{what} has {len(flat)} values for the shape {shape}")
        return flat.reshape(shape)
    if which == "sparse_csr":
        return _from_csr(tensor.sparse_csr, tensor.dtype, shape, what)
    raise DataError(f"{what} has no values", hint="send it dense or as sparse CSR")


def _values(raw: bytes, dtype: int, what: str) -> NDArray[Any]:
    if dtype == _BFLOAT16:
        halves = _from_bytes(raw, "<u2", what).astype("<u4")
        return (halves << np.uint32(16)).view("<f4")
    if dtype not in _TYPES:
        raise DataError(f"{what} is of type {dtype}", hint="float32, bfloat16, int32 or int64")
    values = _from_bytes(raw, _TYPES[dtype], what)
    return values if dtype == FLOAT32 else values.astype(np.int64)


def _from_bytes(raw: bytes, dtype: str, what: str) -> NDArray[Any]:
    if len(raw) % np.dtype(dtype).itemsize:
        raise DataError(f"{what} has {len(raw)} bytes, which are not values of type {dtype}")
    return np.frombuffer(raw, dtype)


def _from_csr(csr: Any, dtype: int, shape: Sequence[int], what: str) -> NDArray[Any]:
    values = _values(csr.values, dtype, what)
    rows = _from_bytes(csr.crow_indices, "<i8", what)
    columns = _from_bytes(csr.col_indices, "<i8", what)
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(f"{what} is not a sparse array of the shape {tuple(shape)}")
    counts = np.diff(rows)
    whole = len(rows) > 0 and rows[0] == 0 and rows[-1] == len(values) and bool((counts >= 0).all())
    if not whole or bool(((columns < 0) | (columns >= shape[1])).any()):
        raise DataError(f"{what} has indices outside the shape {tuple(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def write_batch(target: Any, arrays: Sequence[NDArray[np.float32]]) -> None:
    """Write arrays that differ only in their first size into a `BatchedTensor` message."""
    packed = [np.ascontiguousarray(array, dtype="<f4") for array in arrays]
    offsets = np.zeros(len(packed) + 1, dtype="<i8")
    np.cumsum([array.nbytes for array in packed], out=offsets[1:])
    target.data = b"".join(array.tobytes() for array in packed)
    target.offsets = offsets.tobytes()
    target.dtype = FLOAT32
    if packed:
        target.trailing_shape.extend(packed[0].shape[1:])


# The JSON bodies of the Tinker API's operations.
#
# Unknown keys are ignored if they are null, and refused otherwise, since they would have no effect.

MAX_TTL_S = 10 * 365 * 86400
MAX_RECIPIENTS = 16
_NO_EFFECT = frozenset({"type", "user_metadata"})
B = TypeVar("B", bound="TinkerBody")


class TinkerBody(BaseModel):
    """A body; one with keys that are not offered raises ConfigError."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=False)
    defaults: ClassVar[dict[str, Any]] = {}
    """Further keys that are accepted with one value, with which they have no effect."""
    remedies: ClassVar[dict[str, str]] = {}
    """Hints for other values of these keys; by default to leave the key out."""

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Read a body; raises MessageError, ConfigError."""
        value = read_json(raw)
        try:
            body = cls.model_validate(value)
        except ValidationError as error:
            raise MessageError(summarize(error)) from error
        for name, value in (body.model_extra or {}).items():
            is_ignored = value is None or name in _NO_EFFECT
            if not is_ignored and (name not in cls.defaults or cls.defaults[name] != value):
                hint = cls.remedies.get(name, f"leave {name} out of the request")
                raise ConfigError(f"{name}={value!r} is not offered here", hint=hint)
        return body


class LoraBody(BaseModel):
    """The adapter of a model."""

    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def spec(self) -> LoraSpec:
        """Return the specification."""
        return LoraSpec(**self.model_dump())


class OptimizerBody(BaseModel):
    """The optimiser of a model."""

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
    """`load_weights`: into a new model, as its operation 0, or into an existing one."""

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
        """Return the checkpoint to load; raises NotFoundError."""
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
        """Return the settings."""
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
        """Raise ConfigError for named in-flight weights."""
        if self.kind == "inflight" and not passing:
            raise ConfigError(
                "kind='inflight' is not offered for weights with a name",
                hint="save_weights_and_get_sampling_client(kind='inflight') gives none",
            )

    def name(self) -> str:
        """Return the checkpoint's name; raises ConfigError for an invalid one."""
        if self.path is None or not CheckpointName.is_name(self.path):
            raise ConfigError(
                f"a checkpoint cannot be named {self.path!r}",
                hint="1 to 128 letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )
        return self.path


# `forward_backward`: a protobuf request, and its result.

MAX_PLAIN_BYTES = 64 << 20
"""Bound on an uncompressed body: enough for the most targets of a call."""
MAX_PARTS = 100_000
"""Bound on a request's datums, chunks and inputs: empty ones take few bytes but much memory."""
_RECORD = "ArrayRecord"
_IGNORED_INPUTS = frozenset({"mask"})


@dataclass(frozen=True)
class ForwardBackward:
    """One request to compute a loss, and its gradients unless `forward_only`."""

    model: str
    seq: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


def plain_body(body: bytes, *, is_zstd: bool) -> bytes:
    """Return an uncompressed body; raises MessageError if it cannot be uncompressed."""
    if not is_zstd:
        return body
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as reader:
            plain = reader.read(MAX_PLAIN_BYTES + 1)
    except (OSError, pa.ArrowInvalid) as error:
        raise MessageError(f"the body is not zstd: {error}", hint="send it again") from error
    if len(plain) > MAX_PLAIN_BYTES:
        raise MessageError(
            f"the uncompressed body has more than {MAX_PLAIN_BYTES:,} bytes",
            hint="send fewer datums",
        )
    return plain


def parse_request(body: bytes, form: Any = ForwardBackwardRequest) -> Any:
    """Return the protobuf message in a body; raises MessageError for another body."""
    try:
        return form.FromString(body)
    except DecodeError as error:
        raise MessageError(
            f"the body of {len(body):,} bytes is not a ForwardBackwardRequest",
            hint="send protobuf, as SDKs from 0.25 do",
        ) from error


def request_of(message: Any) -> ForwardBackward:
    """Return the request in a message; raises DataError that names the datum and the input."""
    _check_parts(message)
    newer = {name: _value(item) for name, item in message.loss_fn_config_v2.items()}
    return ForwardBackward(
        model=message.model_id,
        seq=message.seq_id,
        data=_data(message.data),
        loss_fn=message.loss_fn,
        config=newer or dict(message.loss_fn_config),
        forward_only=message.forward_only,
    )


def write_result(result: LossResult) -> bytes:
    """Return a result for clients: one record for each run of datums of the same width."""
    message = ForwardBackwardOutput(loss_fn_output_type=_RECORD)
    for _, run in groupby(result.logprobs, key=lambda logprobs: logprobs.shape[1:]):
        alike = list(run)
        record = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(alike))
        write_batch(record.fields["logprobs"], alike)
    for name, value in result.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)


def _value(setting: Any) -> float | str:
    return setting.text if setting.WhichOneof("value") == "text" else setting.number


def _check_parts(message: Any) -> None:
    """Raise DataError for too many parts."""
    num = len(message.data) + len(message.loss_fn_config) + len(message.loss_fn_config_v2)
    if num <= MAX_PARTS:
        num += sum(len(datum.model_input) + len(datum.loss_fn_inputs) for datum in message.data)
    if num > MAX_PARTS:
        raise DataError(
            f"the request has {num:,} datums, chunks and inputs",
            hint=f"send at most {MAX_PARTS:,}: fewer datums, and the tokens of each in one chunk",
        )


def _data(messages: Iterable[Any]) -> list[Datum]:
    data: list[Datum] = []
    left = MAX_ELEMENTS
    for number, message in enumerate(messages):
        data.append(_datum(message, number, left))
        left -= sum(array.size for array in data[-1].inputs.values())
    return data


def _datum(message: Any, number: int, most: int) -> Datum:
    what = f"datum {number}"
    tokens = [_tokens(chunk, what) for chunk in message.model_input]
    inputs: dict[str, NDArray[Any]] = {}
    for name, tensor in message.loss_fn_inputs.items():
        if name not in _IGNORED_INPUTS:
            inputs[name] = read_tensor(tensor, what=f"{what}: {name[:80]}", most=most)
            most -= inputs[name].size
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    return Datum(tokens=joined, inputs=inputs)


def _tokens(chunk: Any, what: str) -> NDArray[np.int32]:
    which = chunk.WhichOneof("chunk")
    if which != "encoded_text":
        raise DataError(
            f"{what} has a chunk of type {which or 'none'}", hint="this service trains on text"
        )
    raw = chunk.encoded_text.tokens
    if len(raw) % 4:
        raise DataError(f"{what} has {len(raw)} bytes of tokens, which are not int32")
    return np.frombuffer(raw, "<i4")
