"""Caches of conversations between two turns: kept while there is room, oldest given up first."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from ..engine import IntVector


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """What the cache of one conversation was computed from, and its keys and values."""

    tokens: IntVector
    states: torch.Tensor
    images: bytes | None = None
    """Digest of the images, if the conversation has some."""
    serial: int = 0
    """Of the adapter's weights; 0: it has none."""


class PrefixCache:
    """The caches of conversations, at most `max_tokens` tokens in all.

    A conversation that does not fit, or was given up for room, is only computed again.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0
        """Memory of all keys and values."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def keep(self, conversation: str, prefix: CachedPrefix) -> None:
        """Keep a cache; the oldest ones give way."""
        self.drop(conversation)
        if len(prefix.tokens) > self._max_tokens:
            return
        self._prefixes[conversation] = prefix
        self._num_tokens += len(prefix.tokens)
        self.num_bytes += prefix.states.nbytes
        while self._num_tokens > self._max_tokens:
            self.drop(next(iter(self._prefixes)))

    def resume(
        self, conversation: str, prompt: IntVector, images: bytes | None = None, serial: int = 0
    ) -> CachedPrefix | None:
        """Take a conversation's cache out; return it if `prompt` continues it.

        At least one token of the prompt is left to compute.
        """
        prefix = self.drop(conversation)
        if prefix is None or (prefix.images, prefix.serial) != (images, serial):
            return None
        cached = len(prefix.tokens)
        if cached < len(prompt) and np.array_equal(prompt[:cached], prefix.tokens):
            return prefix
        return None

    def drop(self, conversation: str) -> CachedPrefix | None:
        """Forget a conversation; return its cache if there is one."""
        prefix = self._prefixes.pop(conversation, None)
        if prefix is not None:
            self._num_tokens -= len(prefix.tokens)
            self.num_bytes -= prefix.states.nbytes
        return prefix

    def clear(self) -> None:
        """Forget all."""
        self._prefixes.clear()
        self._num_tokens = self.num_bytes = 0
