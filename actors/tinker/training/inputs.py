"""Data of clients, checked as a whole before anything is computed.

Shape letters: D datums, P positions of all datums one after the other, E their targets in the same
order: one for each position, or K of a datum whose `target_tokens` are [T, K].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....schemas.tinker.datum import Datum
from ....schemas.wire.errors import DataError
from .losses import LossFunction

MAX_TARGETS = 2_000_000
"""Of one call: its result has a log-prob of each, in one message of the broker."""
TARGETS = "target_tokens"
WEIGHTS = "weights"
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class DatumBatch:
    """The data of one call."""

    tokens: list[IntArray]
    """Tokens of each datum."""
    shapes: list[Shape]
    """Shapes of the targets of each datum."""
    count_P: IntArray
    """Targets of each position."""
    targets_E: IntArray
    datum_E: IntArray
    """The datum of each target."""
    weights_E: FloatArray
    inputs: dict[str, FloatArray]
    """Other inputs of the loss, float32[E] by name."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each datum."""
        return [len(tokens) for tokens in self.tokens]

    def by_datum(self, values_E: FloatArray) -> list[FloatArray]:
        """Return values of all targets as one array for each datum, in the shape of its targets."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = np.split(values_E, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class DataReader:
    """Reads the data of calls for one model."""

    def __init__(self, *, vocab: int, max_tokens: int | None) -> None:
        """`vocab`: tokens of the model; `max_tokens`: bound of a datum."""
        self._vocab = vocab
        self._max_tokens = max_tokens

    def read(
        self, data: Sequence[Datum], name: str, loss: LossFunction, *, backward: bool
    ) -> DatumBatch:
        """Check data for the loss called `name`, and concatenate it.

        Without `backward` weights may be missing, and unknown inputs are ignored. Raises DataError
        that names the datum, the field and the value.
        """
        if not data:
            raise DataError("the call has no data", hint="send at least one datum")
        read = [
            self._read_datum(number, datum, name, loss, backward)
            for number, datum in enumerate(data)
        ]
        shapes = [item[TARGETS].shape for item in read]
        _check_num(shapes)
        inputs = {key: np.concatenate([item[key].ravel() for item in read]) for key in read[0]}
        sizes = np.array([int(np.prod(shape)) for shape in shapes], dtype=np.int64)
        tokens = [np.asarray(item.tokens, dtype=np.int64) for item in data]
        self._check_ids("tokens", np.concatenate(tokens), [token.shape for token in tokens])
        self._check_ids(TARGETS, inputs[TARGETS], shapes)
        floats = {key: _floats(key, inputs[key], shapes) for key in inputs if key != TARGETS}
        lengths = np.array([len(token) for token in tokens])
        return DatumBatch(
            tokens=tokens,
            shapes=shapes,
            count_P=np.repeat(sizes // lengths, lengths),
            targets_E=inputs[TARGETS].astype(np.int64),
            datum_E=np.repeat(np.arange(len(data)), sizes),
            weights_E=floats.pop(WEIGHTS),
            inputs=floats,
        )

    def _read_datum(
        self, number: int, datum: Datum, name: str, loss: LossFunction, backward: bool
    ) -> dict[str, NDArray[Any]]:
        """Return the inputs of a datum by name, in one shape, with defaults for missing ones."""
        self._check_tokens(number, datum.tokens)
        may_lack = set(loss.may_have) if backward else {*loss.may_have, WEIGHTS}
        known = {TARGETS, *loss.needs, *loss.may_have}
        missing = sorted(known - may_lack - datum.inputs.keys())
        if missing:
            raise DataError(
                f"datum {number} has no {missing[0]}, which loss_fn {name} needs",
                hint=f"it needs {', '.join(sorted(known - may_lack))}",
            )
        unknown = sorted(datum.inputs.keys() - known)
        if unknown and backward:
            raise DataError(
                f"datum {number} has an input {unknown[0]!r}, which loss_fn {name} does not read",
                hint=f"it reads {', '.join(sorted(known))}",
            )
        inputs = {key: datum.inputs[key] for key in sorted(known & datum.inputs.keys())}
        _check_shapes(number, len(datum.tokens), inputs, name, loss)
        for key in (WEIGHTS, *loss.may_have):
            if key not in inputs:
                inputs[key] = _default(key, inputs)
        return inputs

    def _check_tokens(self, number: int, tokens: NDArray[Any]) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens of datum {number} are {tokens.dtype} of shape {list(tokens.shape)}",
                hint="send a list of token ids",
            )
        if not len(tokens):
            raise DataError(f"datum {number} has no tokens", hint="leave it out")
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise DataError(
                f"datum {number} has {len(tokens)} tokens, more than the model's "
                f"{self._max_tokens}",
                hint="cut it",
            )

    def _check_ids(self, field: str, ids: NDArray[Any], shapes: Sequence[Shape]) -> None:
        """Raise DataError for ids outside the vocabulary."""
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab))
        if len(wrong):
            raise DataError(
                f"{_place(field, int(wrong[0]), shapes)} is {ids[wrong[0]]}, but the model has "
                f"tokens 0 to {self._vocab - 1}",
                hint="use the model's own tokenizer",
            )


def _check_shapes(
    number: int,
    num_tokens: int,
    inputs: Mapping[str, NDArray[Any]],
    name: str,
    loss: LossFunction,
) -> None:
    """Raise DataError for inputs that do not fit the tokens of their datum."""
    targets = inputs[TARGETS]
    if targets.dtype.kind not in "iu":
        raise DataError(
            f"{TARGETS} of datum {number} are {targets.dtype}",
            hint="send token ids, which are integers",
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != num_tokens or not targets.size:
        raise DataError(
            f"{TARGETS} of datum {number} have the shape {list(targets.shape)}, its tokens are "
            f"{num_tokens}",
            hint="give one target for each token, or a row of them",
        )
    if targets.ndim == 2 and not loss.takes_many:
        raise DataError(
            f"{TARGETS} of datum {number} have the shape {list(targets.shape)}, and loss_fn {name} "
            "takes one target for each token",
            hint="use cross_entropy for several",
        )
    for key, value in inputs.items():
        if value.shape != targets.shape:
            raise DataError(
                f"{key} of datum {number} have the shape {list(value.shape)}, its {TARGETS} "
                f"{list(targets.shape)}",
                hint="give one number for each target",
            )
        if value.dtype.kind not in "biuf":
            raise DataError(f"{key} of datum {number} are {value.dtype}", hint="send numbers")


def _check_num(shapes: Sequence[Shape]) -> None:
    """Raise DataError for data whose result would be too large."""
    num = sum(int(np.prod(shape)) for shape in shapes)
    if num > MAX_TARGETS:
        widest = max(shapes, key=len)
        raise DataError(
            f"{len(shapes)} datums have {num:,} {TARGETS} together, those of weight 0 included; "
            f"the shape of one is {list(widest)}",
            hint=f"send at most {MAX_TARGETS:,} in one call: fewer datums, or fewer targets for "
            "each token",
        )


def _default(key: str, inputs: Mapping[str, NDArray[Any]]) -> FloatArray:
    """Return a missing input: weights are 1, a mask marks targets with an effect."""
    if key == WEIGHTS:
        return np.ones(inputs[TARGETS].shape, dtype=np.float32)
    return (inputs["advantages"] * inputs[WEIGHTS] != 0).astype(np.float32)


def _floats(field: str, values: NDArray[Any], shapes: Sequence[Shape]) -> FloatArray:
    """Return float32; raises DataError for values that are not finite in it."""
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(result))
    if len(wrong):
        raise DataError(
            f"{_place(field, int(wrong[0]), shapes)} is {values[wrong[0]]}",
            hint="send finite numbers; NaN is often a mean or deviation of no values",
        )
    return result


def _place(field: str, at: int, shapes: Sequence[Shape]) -> str:
    """Return the name of one value among those of all data."""
    for number, shape in enumerate(shapes):
        size = int(np.prod(shape))
        if at < size:
            index = ", ".join(str(item) for item in np.unravel_index(at, shape))
            return f"{field}[{index}] of datum {number}"
        at -= size
    raise IndexError(at)


# -- gradients since the last optim_step, and failures ---------------------------------------------


class PendingWindow:
    """The forward_backward calls that one optim_step will apply.

    If one failed, so does the optim_step: a program that ignores results would train on a part of
    its batch otherwise.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls since the last optim_step."""
        self._open: list[str] = []
        self._failed: tuple[str, str] | None = None

    def to_map(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"num_calls": self.num_calls, "open": self._open, "failed": self._failed}

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> "PendingWindow":
        """Restore what `to_map` returned."""
        window = cls()
        window.num_calls, window._open = int(values["num_calls"]), list(values["open"])
        window._failed = tuple(values["failed"]) if values["failed"] else None
        return window

    def begin(self, operation: str) -> str:
        """Record the start of a call; return its name, by default its number in the window."""
        self.num_calls += 1
        name = operation or f"forward_backward {self.num_calls} of this window"
        self._open.append(name)
        return name

    def end(self, name: str) -> None:
        """Record that a call added all of its gradients."""
        self._open.remove(name)

    def fail(self, name: str, reason: str) -> None:
        """Record that a call failed; `close` reports the first one."""
        if name in self._open:
            self._open.remove(name)
        self._failed = self._failed or (name, reason)

    def close(self) -> None:
        """Begin a new window; raises DataError if a call of this one failed."""
        failed = self._failed
        if failed is None and self._open:
            failed = (self._open[0], "it was not finished")
        self.num_calls, self._open, self._failed = 0, [], None
        if failed is not None:
            raise DataError(
                f"this optim_step has no effect, since {failed[0]} failed: {failed[1]}",
                hint="the gradients since the last optim_step are cleared: send the whole batch "
                "again",
            )
