"""What learner and receivers keep in memory of 16-bit weights, so that differences suffice.

Both keep the newest version and its anchor, the whole version of which it was made, if that is
another. Bytes only: nothing here sends or stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...schemas.weights import Difference, Manifest, TensorEntry
from ...schemas.wire.errors import MessageError
from ..jetstream.digests import digest_of
from ..jetstream.objects import DigestMismatch
from .differences import apply, encode

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Whole:
    """A version in memory."""

    version: int
    """The policy's number."""
    tensors: list[TensorEntry]
    """Layout of the payload."""
    digest: str
    """SHA-256 of the payload, hexadecimal."""
    payload: memoryview
    """All tensors, one after the other; never written to."""


@dataclass(frozen=True, slots=True)
class Step:
    """How a version is made by one difference."""

    difference: Difference
    base: Whole | None
    """What it changes; None: the anchor, which must be fetched."""
    anchor: Whole | None
    """The anchor of the version that is made, if it is held and another."""


class WeightHistory:
    """The newest version and its anchor."""

    def __init__(self, *, enabled: bool, whole_every: int) -> None:
        """Hold nothing yet, and without `enabled` never anything."""
        self._enabled = enabled
        self._whole_every = whole_every
        self.held: list[Whole] = []
        """Newest first; its anchor is the last, which may be itself."""

    def keeps(self, tensors: Sequence[TensorEntry]) -> bool:
        """Whether versions of this layout are held: those of 16 bits throughout."""
        return self._enabled and all(ITEM_BYTES[entry.dtype] == 2 for entry in tensors)

    def hold(self, whole: Whole, anchor: Whole | None = None) -> None:
        """Hold a version, unless a newer one is: receivers fetch others of the past, too."""
        is_past = self.held and self.held[0].version > whole.version
        if self.keeps(whole.tensors) and not is_past:
            self.held = [whole] if anchor is None else [whole, anchor]

    def restart(self, whole: Whole) -> None:
        """Hold a new anchor and nothing else."""
        self.held = [whole]

    def encode(
        self, version: int, tensors: Sequence[TensorEntry], payload: memoryview
    ) -> list[tuple[Whole, bytes]]:
        """Return the differences that make a new version, each with its base.

        Of the next anchor only that from the version before; none for a version of another layout,
        or where they would be no smaller. Runs in a thread.
        """
        if not self.held or self.held[0].tensors != tensors or self.held[0].version >= version:
            return []
        bases = self.held[:1] if self.is_anchor(version) else self.held
        made = [(base, encode(base.payload, payload)) for base in bases]
        return made if sum(len(text) for _, text in made) < len(payload) else []

    def is_anchor(self, version: int) -> bool:
        """Whether a new version is to be a whole one for those who come to later ones."""
        return not self.held or version >= self.held[-1].version + self._whole_every

    def step_to(self, manifest: Manifest) -> Step | None:
        """Return how to make a version by a difference; None if it is to be fetched whole."""
        held = {(one.version, one.digest): one for one in self.held}
        steps = [(one, held.get((one.base, one.base_digest))) for one in manifest.differences]
        found = next((step for step in steps if step[1]), None)
        if manifest.kind != "delta":
            return Step(*found, anchor=None) if found else None
        difference, base = found or steps[-1]
        return Step(difference, base, steps[-1][1])


def make(base: Whole, difference: memoryview, manifest: Manifest, buffer: memoryview) -> None:
    """Make the version that a difference makes of a base, in `buffer`. Runs in a thread.

    Raises DigestMismatch if it is not what the manifest tells.
    """
    np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(base.payload, np.uint8))
    try:
        apply(difference, buffer)
    except MessageError as error:
        raise DigestMismatch(error.message) from error
    if (found := digest_of([buffer])) != manifest.digest:
        raise DigestMismatch(f"a difference made {found}, told was {manifest.digest}")


def joined(views: Sequence[memoryview]) -> memoryview:
    """Copy views into one buffer."""
    return np.concatenate([np.frombuffer(view, np.uint8) for view in [*views, b""]]).data
