"""Caches of conversations between two turns: kept while there is room, oldest given up first."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from ..engine import IntVector


@dataclass(frozen=True, slots=True)
class Parked:
    """What the cache of one conversation was computed from, and its keys and values."""

    tokens: IntVector
    states: torch.Tensor
    images: bytes | None = None
    """Digest of the images, if the conversation has some."""


class ParkingLot:
    """Parked conversations, at most `max_tokens` tokens in all.

    A conversation that does not fit, or was given up for room, is only computed again.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._parked: OrderedDict[str, Parked] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0
        """Memory of all parked keys and values."""

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, conversation: str, parked: Parked) -> None:
        """Keep a cache; the least recently parked ones give way."""
        self.drop(conversation)
        if len(parked.tokens) > self._max_tokens:
            return
        self._parked[conversation] = parked
        self._num_tokens += len(parked.tokens)
        self.num_bytes += parked.states.nbytes
        while self._num_tokens > self._max_tokens:
            self.drop(next(iter(self._parked)))

    def resume(
        self, conversation: str, prompt: IntVector, images: bytes | None = None
    ) -> Parked | None:
        """Take out a conversation's cache if `prompt` continues it; it leaves the lot either way.

        At least one token of the prompt is left to compute.
        """
        parked = self.drop(conversation)
        if parked is None or parked.images != images:
            return None
        cached = len(parked.tokens)
        if cached < len(prompt) and np.array_equal(prompt[:cached], parked.tokens):
            return parked
        return None

    def drop(self, conversation: str) -> Parked | None:
        """Forget a conversation, if it is parked."""
        parked = self._parked.pop(conversation, None)
        if parked is not None:
            self._num_tokens -= len(parked.tokens)
            self.num_bytes -= parked.states.nbytes
        return parked

    def clear(self) -> None:
        """Forget all."""
        self._parked.clear()
        self._num_tokens = self.num_bytes = 0
