"""One row of a micro-batch as it is filled."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.vision import SeenImages
from .layout import IntArray, ranges
from .packed_images import RowImages


class RowWriter:
    """Fills one row: segments of tokens, each with its positions and with who sees it."""

    def __init__(self, num_columns: int) -> None:
        self.ids, self.positions, self.segments = np.zeros((3, num_columns), dtype=np.int64)
        self.seen_until = np.full(num_columns, num_columns, dtype=np.int64)
        self.images = RowImages.empty(num_columns)
        self.experts: NDArray[np.uint8] | None = None
        """uint8[T, L, K]: experts that read each token, where they are replayed."""
        self.num_used = 0
        """Columns that hold a token."""
        self._num_segments = 0

    def append(
        self,
        ids: list[NDArray[Any]],
        first_position: int,
        lengths: IntArray,
        seen_until: int | None = None,
    ) -> IntArray:
        """Append segments that begin at the same position; return their first columns.

        They are seen up to the column `seen_until`, by default each by itself alone.
        """
        starts = self.num_used + np.cumsum(lengths) - lengths
        columns = slice(self.num_used, self.num_used + int(lengths.sum()))
        self.ids[columns] = np.concatenate(ids)
        self.positions[columns] = ranges(np.full_like(lengths, first_position), lengths)
        segments = self._num_segments + 1 + np.arange(len(lengths))
        self.segments[columns] = np.repeat(segments, lengths)
        ends = np.repeat(starts + lengths, lengths)
        self.seen_until[columns] = ends if seen_until is None else seen_until
        self.num_used = columns.stop
        self._num_segments += len(lengths)
        return starts

    def replay(self, starts: IntArray, experts: Sequence[NDArray[np.uint8] | None]) -> None:
        """Note the experts of the tokens of segments that begin at these columns."""
        for start, of_segment in zip(starts.tolist(), experts, strict=True):
            if of_segment is None:
                continue
            if self.experts is None:
                self.experts = np.zeros((len(self.ids), *of_segment.shape[1:]), np.uint8)
                self.experts[:] = np.arange(of_segment.shape[2])  # padding has some, too
            self.experts[start : start + len(of_segment)] = of_segment

    def show(self, first: int, seen: SeenImages | None) -> None:
        """Note the images in what was written from the column `first` on."""
        self.images.write(first, self.positions[first : self.num_used], seen)
