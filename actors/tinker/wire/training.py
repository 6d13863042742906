"""`forward_backward` as it travels: a protobuf request, and its result."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from ....schemas.tinker.datum import Datum, LossResult
from ....schemas.wire.errors import DataError, MessageError
from . import schema
from .tensors import read_tensor, write_batch

MAX_PLAIN_BYTES = 256 << 20
"""Of a body once it is no longer compressed."""
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
    """Return a body without its compression; raises MessageError for what cannot be unpacked."""
    if not is_zstd:
        return body
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as reader:
            plain = reader.read(MAX_PLAIN_BYTES + 1)
    except (OSError, pa.ArrowInvalid) as error:
        raise MessageError(f"the body is not zstd: {error}", hint="send it again") from error
    if len(plain) > MAX_PLAIN_BYTES:
        raise MessageError(
            f"the body unpacks to more than {MAX_PLAIN_BYTES:,} bytes", hint="send fewer datums"
        )
    return plain


def parse_request(body: bytes) -> Any:
    """Return the protobuf message of a body; raises MessageError for what is none."""
    try:
        return schema.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise MessageError(
            f"the body of {len(body):,} bytes is no ForwardBackwardRequest",
            hint="send protobuf, as SDKs from 0.25 do",
        ) from error


def read_request(body: bytes) -> ForwardBackward:
    """Return what a body asks for.

    Raises MessageError for what is no such request, DataError naming the datum and the input that
    cannot be read.
    """
    return request_of(parse_request(body))


def request_of(message: Any) -> ForwardBackward:
    """Return what a message asks for; raises DataError naming the datum and the input."""
    newer = {name: _value(one) for name, one in message.loss_fn_config_v2.items()}
    return ForwardBackward(
        model=message.model_id,
        seq=message.seq_id,
        data=[_datum(one, number) for number, one in enumerate(message.data)],
        loss_fn=message.loss_fn,
        config=newer or dict(message.loss_fn_config),
        forward_only=message.forward_only,
    )


def write_result(result: LossResult) -> bytes:
    """Return a result as clients read it."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type=_RECORD)
    record = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(result.logprobs))
    write_batch(record.fields["logprobs"], result.logprobs)
    for name, value in result.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)


def _value(one: Any) -> float | str:
    return one.text if one.WhichOneof("value") == "text" else one.number


def _datum(message: Any, number: int) -> Datum:
    what = f"datum {number}"
    tokens = [_tokens(chunk, what) for chunk in message.model_input]
    inputs = {
        name: read_tensor(one, what=f"{what}: {name}")
        for name, one in message.loss_fn_inputs.items()
        if name not in _IGNORED_INPUTS
    }
    joined = np.concatenate(tokens) if tokens else np.zeros(0, np.int32)
    return Datum(tokens=joined, inputs=inputs)


def _tokens(chunk: Any, what: str) -> NDArray[np.int32]:
    which = chunk.WhichOneof("chunk")
    if which != "encoded_text":
        raise DataError(
            f"{what} holds a chunk of type {which or 'none'}", hint="this service trains on text"
        )
    raw = chunk.encoded_text.tokens
    if len(raw) % 4:
        raise DataError(f"{what} has {len(raw)} bytes of tokens, which are no int32")
    return np.frombuffer(raw, "<i4")
