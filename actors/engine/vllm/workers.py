"""vLLM's worker processes as receivers of weights, seen from the generator's process."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ....broker.jetstream.objects import DigestMismatch
from ....broker.weights.shared_memory import place_of
from ....schemas.weights import Manifest, Round
from ...weights.broadcast_group import FORM_S, ProcessGroupFailed, no_route, own_address
from ...weights.tensors import TensorSource, dtype_of, shape_of
from .model import VllmModel


class Workers:
    """Takes the places of a generator in a group of the learner's; see `weights.members.Member`."""

    def __init__(self, model: VllmModel, gpus: list[str]) -> None:
        """`gpus` are the UUIDs of the workers' GPUs, empty for one on a CPU."""
        self.gpus = [gpu for gpu in gpus if gpu]
        self.device: Literal["cpu", "cuda"] = "cuda" if self.gpus else "cpu"
        self.num_ranks = len(gpus)
        self._model = model
        self._group = ""
        self._where: dict[str, Any] = {}

    @property
    def group(self) -> str:
        """The group that all workers are in; empty: none."""
        return self._group

    async def connect(self, address: str, port: int) -> None:
        """Have each worker connect to the learner's TCPStore. Raises ProcessGroupFailed."""
        self._where = {"address": address, "port": port}
        await self._join(self._where)

    async def join(self, place: Round) -> None:
        """Have the workers form the group of a place. Raises ProcessGroupFailed."""
        if self._group == place.group:
            return
        self._group = ""
        joined = {
            "group": place.group,
            "rank": place.rank,
            "size": place.size,
            "route": place.device,
        }
        await self._join(self._where | joined)
        self._group = place.group

    async def receive(self, manifest: Manifest) -> None:
        """Have the workers take a version into the model, which stands still.

        Raises ProcessGroupFailed, DigestMismatch.
        """
        await self._model.take_weights(update_of(manifest))
        kind, why = await self._model.transfer_outcome()
        if kind == "damaged":
            raise DigestMismatch(why)
        if kind != "done":
            raise ProcessGroupFailed(why)

    def leave(self) -> None:
        """Be in no group; the workers leave the old one when they form another."""
        self._group = ""

    async def _join(self, joined: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(FORM_S):
                kind, why = await self._model.join_learner(joined)
        except TimeoutError as error:
            address = own_address(joined["address"], joined["port"])
            raise no_route("vLLM's workers", address, f"nothing came in {FORM_S:g} s") from error
        if kind != "done":
            raise ProcessGroupFailed(why)


def update_of(manifest: Manifest) -> dict[str, Any]:
    """Return what workers take a version from the learner by; see `TakeVersion`."""
    entries = sorted(manifest.tensors, key=lambda entry: entry.offset)
    return {
        "names": [entry.name for entry in entries],
        "dtype_names": [entry.dtype for entry in entries],
        "shapes": [entry.shape for entry in entries],
        "offsets": [entry.offset for entry in entries],
        "num_bytes": manifest.num_bytes,
        "digest": manifest.digest,
    }


def update_of_mapped(tensors: Mapping[str, TensorSource]) -> dict[str, Any] | None:
    """Return what workers take tensors by that lie in one mapped file; None: they do not."""
    places: dict[str, tuple[Path, int]] = {}
    for name, source in tensors.items():
        data = None if not isinstance(source, tuple) else source[2]
        place = place_of(data) if isinstance(data, memoryview) else None
        if place is None:
            return None
        places[name] = place
    paths = {path for path, _ in places.values()}
    if len(paths) != 1:
        return None
    return update_of_file(paths.pop(), {name: at for name, (_, at) in places.items()}, tensors)


def update_of_file(
    path: Path, offsets: Mapping[str, int], tensors: Mapping[str, TensorSource]
) -> dict[str, Any]:
    """Return what workers take tensors by that lie in a file, each at its place."""
    names = sorted(tensors, key=lambda name: offsets[name])
    return {
        "names": names,
        "dtype_names": [str(dtype_of(tensors[name])).removeprefix("torch.") for name in names],
        "shapes": [list(shape_of(tensors[name])) for name in names],
        "offsets": [offsets[name] for name in names],
        "num_bytes": path.stat().st_size,
        "path": str(path),
    }
