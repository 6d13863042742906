"""Images of requests: who cannot see them, and reading each once, in a thread."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from ....schemas.wire.errors import ModelError
from ...models.vision import ImageReader

T = TypeVar("T")
Key: TypeAlias = bytes | tuple[bytes, ...]


class ImageReads(Generic[T]):
    """What is being read; all who ask for the same images at a time go on together."""

    def __init__(self) -> None:
        self._reading: dict[Key, asyncio.Future[T]] = {}

    async def share(self, key: Key, read: Callable[[], T]) -> T:
        """Return what `read` returns, or what it returns to another who asks with this key."""
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.ensure_future(asyncio.to_thread(read))
            reading.add_done_callback(partial(self._read, key))
        return await asyncio.shield(reading)

    def _read(self, key: Key, reading: "asyncio.Future[T]") -> None:
        del self._reading[key]
        if not reading.cancelled():
            reading.exception()  # whoever asked may be gone


def require_reader(reader: ImageReader | None) -> ImageReader:
    """Return what reads a model's images; ModelError for a model that sees none."""
    if reader is None:
        raise ModelError(
            "the model reads text alone, and a prompt holds images",
            hint="train a vision-language model of the Qwen2-VL or Qwen2.5-VL class",
        )
    return reader
