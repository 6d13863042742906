"""Engines for whatever adapters are sampled from, on one base model in memory.

An engine has one adapter at a time. A request for one that no engine has takes an engine that is
idle: of the same shape, whose adapter is exchanged in memory, or a new one in the place of that
which was idle for longest. Where all of them work it waits.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers import PreTrainedModel

from ....schemas.config.job import JobConfig
from ....schemas.config.lora import LoraConfig
from ....schemas.wire.errors import ModelError
from ...generator.engine.engine import Engine
from ...generator.engine.transformers.transformers_engine import TransformersEngine
from ...models.devices import own_device
from ...models.lora import config_of

_Shape = tuple[int, tuple[str, ...]]
_WEIGHTS = "adapter_model.safetensors"


@dataclass
class _Place:
    """One engine and the adapter that it has."""

    engine: Engine
    shape: _Shape
    folder: Path | None
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    version: int = 0


class SampledAdapters:
    """A bounded number of engines, and which adapter each of them has."""

    def __init__(self, config: JobConfig, base: PreTrainedModel, max_context: int) -> None:
        """Start none yet."""
        self._config = config
        self._base = base
        self._max_context = max_context
        self._most = config.tinker.sampled_at_once
        self._places: list[_Place] = []
        self._changed = asyncio.Condition()

    @property
    def num_engines(self) -> int:
        """Engines that there are."""
        return len(self._places)

    @contextlib.asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncIterator[Engine]:
        """Give an engine with the adapter of a folder, None for the base, while the block runs.

        Raises ModelError for a folder that holds none, or one of another base.
        """
        place = await self._take(folder)
        try:
            yield place.engine
        finally:
            place.users -= 1
            place.used = time.monotonic()
            async with self._changed:
                self._changed.notify_all()

    async def close(self) -> None:
        """End all engines."""
        for place in self._places:
            await place.engine.close()

    async def _take(self, folder: Path | None) -> _Place:
        config = LoraConfig() if folder is None else await asyncio.to_thread(config_of, folder)
        shape = (config.rank, tuple(sorted(config.targets)))
        async with self._changed:
            while True:
                place = self._having(folder) or await self._exchanged(folder, shape)
                if place is None:
                    place = await self._started(folder, config, shape)
                if place is not None:
                    place.users += 1
                    return place
                await self._changed.wait()

    def _having(self, folder: Path | None) -> _Place | None:
        return next((one for one in self._places if one.folder == folder), None)

    async def _exchanged(self, folder: Path | None, shape: _Shape) -> _Place | None:
        """Return an idle engine of the same shape with another adapter in it."""
        idle = [one for one in self._places if one.users == 0 and one.shape == shape]
        if folder is None or not idle or len(self._places) < self._most:
            return None
        place = min(idle, key=lambda one: one.used)
        tensors = await asyncio.to_thread(_tensors, folder)
        place.folder, place.version = None, place.version + 1
        await place.engine.load_weights(place.version, tensors, "keep")
        place.folder = folder
        return place

    async def _started(
        self, folder: Path | None, config: LoraConfig, shape: _Shape
    ) -> _Place | None:
        """Return a new engine, maybe in the place of an idle one; None if all of them work."""
        if len(self._places) >= self._most:
            idle = [one for one in self._places if one.users == 0]
            if not idle:
                return None
            oldest = min(idle, key=lambda one: one.used)
            self._places.remove(oldest)
            await oldest.engine.close()
        engine = await TransformersEngine.start(
            str(folder or self._config.model.path),
            max_slots=self._config.generator.max_requests,
            max_context=self._max_context,
            dtype=self._config.generator.dtype,
            device=str(own_device()),
            trust_remote_code=self._config.model.trust_remote_code,
            lora=config,
            base=self._base,
        )
        place = _Place(engine, shape, folder)
        self._places.append(place)
        return place


def _tensors(folder: Path) -> dict[str, Any]:
    """Return the tensors of an adapter; raises ModelError."""
    try:
        return cast("dict[str, Any]", load_file(folder / _WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in {folder} cannot be read: {error}") from error
