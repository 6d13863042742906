"""Messages between a learner and the process of its owner's functions, and the functions' inputs.

A message is a map in msgpack, after its length in four bytes, and then the bytes of its arrays,
whose names, dtypes and shapes are in the map. The receiver bounds both before it allocates
anything. Nothing is pickled: each side may read what a hostile other side writes.

Shape letters: E episodes, I tasks.
"""

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....schemas.wire.array_codec import ARRAY_DTYPES
from ....schemas.wire.codec import MAX_MESSAGE_BYTES, pack, unpack
from ....schemas.wire.errors import MessageError
from ....schemas.wire.foreign import shown
from ..advantages import AdvantageInputs
from ..batch import BatchCalls
from ..losses import LossInputs
from ..off_policy import CorrectionInputs

Kind = Literal["advantage", "loss", "correction", "mask", "filter", "curriculum"]
STEP_KINDS: tuple[Kind, ...] = ("advantage", "loss", "correction", "mask")
"""Functions that a step calls; the decisions of the others are in the log."""
KINDS: tuple[Kind, ...] = (*STEP_KINDS, "filter", "curriculum")
Arrays = dict[str, NDArray[Any]]
MAX_REQUEST_BYTES = 1 << 34
"""Bound on the arrays of one request."""
_LENGTH_BYTES = 4
_MAX_DIMS = 2


@dataclass(frozen=True)
class FilterInputs:
    """The inputs of a filter for one group."""

    rewards_E: NDArray[np.float64]
    """Return of each episode."""
    lengths_E: NDArray[np.int64]
    """Generated tokens of each episode."""
    truncated_E: NDArray[np.bool_]
    """Whether a token limit ended each episode."""
    infos: list[dict[str, Any]]
    """`info` of the game at the end of each episode."""
    data_source: str
    """Data source of the row; empty if it has none."""
    sample: int | None
    """The row of the data; None for a game that generates its states."""


@dataclass(frozen=True)
class CurriculumInputs:
    """Statistics of I tasks, newer episodes counting more; the arrays are read-only."""

    tries_I: NDArray[np.float64]
    """Number of episodes; 0: the task is unseen."""
    solved_I: NDArray[np.float64]
    """Number of solved episodes."""

    @property
    def rates_I(self) -> NDArray[np.float64]:
        """Share of solved episodes; 0.5 for tasks without episodes."""
        half = np.full_like(self.tries_I, 0.5)
        return np.divide(self.solved_I, self.tries_I, out=half, where=self.tries_I > 0)


_INPUTS: Mapping[Kind, type[Any]] = {
    "advantage": AdvantageInputs,
    "loss": LossInputs,
    "correction": CorrectionInputs,
    "mask": CorrectionInputs,
    "filter": FilterInputs,
    "curriculum": CurriculumInputs,
}
_CALLS = "calls"
"""Field of `AdvantageInputs` whose own fields are sent as `calls.<field>`."""


def split_inputs(inputs: Any) -> tuple[dict[str, Any], Arrays]:
    """Return the plain values and the arrays of a function's inputs, by field."""
    values: dict[str, Any] = {}
    arrays: Arrays = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if is_dataclass(value):
            _, inner = split_inputs(value)
            arrays |= {f"{field.name}.{name}": array for name, array in inner.items()}
        elif isinstance(value, Tensor):
            arrays[field.name] = to_array(value)
        elif isinstance(value, np.ndarray):
            arrays[field.name] = np.ascontiguousarray(cast("NDArray[Any]", value))
        else:
            values[field.name] = value
    return values, arrays


def join_inputs(kind: Kind, values: Mapping[str, Any], arrays: Arrays) -> Any:
    """Return the inputs of a function from their plain values and arrays."""
    if kind in ("filter", "curriculum"):
        for array in arrays.values():
            array.flags.writeable = kind == "filter"
        return _INPUTS[kind](**values, **arrays)
    tensors: dict[str, Any] = {name: to_tensor(array) for name, array in arrays.items()}
    inner = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{_CALLS}.")}
    if inner:
        tensors[_CALLS] = BatchCalls(
            **{name.removeprefix(f"{_CALLS}."): value for name, value in inner.items()}
        )
    return _INPUTS[kind](**values, **tensors)


def to_tensor(array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor of the same memory."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's values as a contiguous array in host memory, perhaps the same."""
    return tensor.detach().cpu().contiguous().numpy()


def send(
    connection: socket.socket,
    message: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]] | None = None,
    deadline: float | None = None,
) -> None:
    """Send one message until `deadline`, on the monotonic clock.

    Raises TimeoutError, and OSError if the other side has closed.
    """
    arrays = arrays or {}
    listed = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    head = pack({"message": message, "arrays": listed})
    _wait(connection, deadline)
    connection.sendall(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
    for array in arrays.values():
        if array.nbytes:
            _wait(connection, deadline)
            connection.sendall(array.data.cast("B"))


def receive(
    connection: socket.socket,
    *,
    max_array_bytes: int,
    max_head_bytes: int = 2 * MAX_MESSAGE_BYTES,
    deadline: float | None = None,
) -> tuple[dict[str, Any], Arrays]:
    """Wait for one message until `deadline`; return its map and its arrays.

    Raises TimeoutError, EOFError or OSError if the other side has closed, and MessageError for a
    message that is malformed or too large.
    """
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES, deadline), "little")
    if length > max_head_bytes:
        raise MessageError(f"a message of {length:,} bytes, more than {max_head_bytes:,}")
    head = cast("object", unpack(_exactly(connection, length, deadline), max_bytes=max_head_bytes))
    fields = cast("dict[str, Any]", head) if isinstance(head, dict) else {}
    message, listed = fields.get("message"), fields.get("arrays")
    if not isinstance(message, dict) or not isinstance(listed, list):
        raise MessageError("a message without its map, or without the list of its arrays")
    arrays = _described(cast("list[Any]", listed), max_array_bytes)
    for array in arrays.values():
        if array.nbytes:
            _fill(connection, array.data.cast("B"), deadline)
    return cast("dict[str, Any]", message), arrays


def _described(listed: list[Any], max_bytes: int) -> Arrays:
    """Return arrays, not yet filled, as a message describes them; raises MessageError."""
    arrays: Arrays = {}
    for item in listed:
        name, dtype, sizes = _description(item)
        if name in arrays:
            raise MessageError(f"two arrays of the name {shown(name)}")
        max_bytes -= math.prod(sizes) * np.dtype(dtype).itemsize
        if max_bytes < 0:
            raise MessageError("arrays of more bytes than the inputs allow")
        arrays[name] = np.empty(sizes, dtype)
    return arrays


def _description(item: Any) -> tuple[str, str, list[int]]:
    """Return name, dtype and shape of an array; raises MessageError."""
    try:
        name, dtype, sizes = item
        is_known = type(name) is str and dtype in ARRAY_DTYPES and len(sizes) <= _MAX_DIMS
        if is_known and all(type(size) is int and size >= 0 for size in sizes):
            return name, dtype, sizes
    except (TypeError, ValueError):
        pass
    raise MessageError("an array whose name, dtype or shape cannot be read")


def _exactly(connection: socket.socket, length: int, deadline: float | None) -> memoryview:
    received = memoryview(bytearray(length))
    _fill(connection, received, deadline)
    return received


def _fill(connection: socket.socket, view: memoryview, deadline: float | None) -> None:
    while len(view):
        _wait(connection, deadline)
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _wait(connection: socket.socket, deadline: float | None) -> None:
    """Bound the next operation of a connection by a deadline; TimeoutError once it has passed."""
    if deadline is None:
        return
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)
