from collections.abc import Sequence
from enum import Enum

from vllm import SamplingParams

class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 1
    SWAP = 2

class BatchUpdate:
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]

class LogitsProcessor: ...
