"""The images in packed rows: their columns, and the rotary positions that they bend.

Shapes: Q image tokens, B rows, T columns. An image stands in the prompt of its sequences and is
there once where the prompt is; what follows an image goes on from its largest rotary position, so
these lie beside the places in the sequence.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..policy.vision import Images, SeenImages

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch, in the order of their columns."""

    images: tuple[Images, ...]
    """What the vision tower reads."""
    column_Q: Tensor
    """int64: column of each image token, counted through the rows one after the other."""
    rope_3BT: Tensor
    """int64: rotary positions of all columns, in time, height and width."""

    def to(self, device: torch.device | str) -> "PackedImages":
        """Copy the tensors of all columns to a device."""
        return PackedImages(self.images, self.column_Q.to(device), self.rope_3BT.to(device))


@dataclass
class RowImages:
    """The images of one row as it is filled."""

    rope_3T: IntArray
    images: list[Images] = field(default_factory=list[Images])
    columns: list[IntArray] = field(default_factory=list[IntArray])

    @classmethod
    def empty(cls, num_columns: int) -> "RowImages":
        """Begin a row."""
        return cls(np.zeros((3, num_columns), dtype=np.int64))

    def write(self, first: int, places: NDArray[Any], seen: SeenImages | None) -> None:
        """Note what begins at a column: tokens at these places, and the images of their prompt."""
        columns = slice(first, first + len(places))
        if seen is None:
            self.rope_3T[:, columns] = places
            return
        self.rope_3T[:, columns] = seen.positions(places)
        self.images.append(seen.images)
        self.columns.append(first + seen.places_Q)


def pack_images(rows: Sequence[RowImages]) -> PackedImages | None:
    """Put the images of a micro-batch's rows together; None where there are none."""
    images = tuple(image for row in rows for image in row.images)
    if not images:
        return None
    columns = [
        number * row.rope_3T.shape[1] + columns
        for number, row in enumerate(rows)
        for columns in row.columns
    ]
    rope_3BT = np.stack([row.rope_3T for row in rows], axis=1)
    return PackedImages(
        images, torch.from_numpy(np.concatenate(columns)), torch.from_numpy(rope_3BT)
    )


def unseen(images: Images, position_ids_BT: Tensor) -> PackedImages:
    """Return images that stand in no column: the vision tower runs, and nothing comes of it."""
    nowhere_Q = position_ids_BT.new_empty(0)
    return PackedImages((images,), nowhere_Q, position_ids_BT.expand(3, -1, -1))
