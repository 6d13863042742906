"""Array fields of messages: dtype and number of dimensions are validated, elements are not."""

from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


def _checker(dtype: str, ndim: int) -> PlainValidator:
    target = np.dtype(dtype)

    def check(value: Any) -> NDArray[Any]:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"must be an array of {target}, is a {type(value).__name__}")
        array = cast("NDArray[Any]", value)
        if array.dtype != target:
            raise ValueError(f"must be an array of {target}, is one of {array.dtype}")
        if array.ndim != ndim:
            raise ValueError(f"must have {ndim} dimension(s), has {array.ndim}")
        return array

    return PlainValidator(check)


def _same(value: NDArray[Any]) -> NDArray[Any]:
    return value


def _schema(dtype: str, ndim: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "array", "description": f"{dtype}[{', '.join('n' * ndim)}]"})


IntVector = Annotated[
    NDArray[np.int32], _checker("int32", 1), PlainSerializer(_same), _schema("int32", 1)
]
FloatVector = Annotated[
    NDArray[np.float32], _checker("float32", 1), PlainSerializer(_same), _schema("float32", 1)
]
IntMatrix = Annotated[
    NDArray[np.int32], _checker("int32", 2), PlainSerializer(_same), _schema("int32", 2)
]
FloatMatrix = Annotated[
    NDArray[np.float32], _checker("float32", 2), PlainSerializer(_same), _schema("float32", 2)
]
ExpertArray = Annotated[
    NDArray[np.uint8], _checker("uint8", 3), PlainSerializer(_same), _schema("uint8", 3)
]
MaskVector = Annotated[
    NDArray[np.uint8], _checker("uint8", 1), PlainSerializer(_same), _schema("uint8", 1)
]
