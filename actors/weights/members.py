"""Who takes a receiver's places in a group: this process, or the workers of its engine."""

from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ...broker.jetstream.objects import DigestMismatch
from ...broker.weights.payloads import Payload
from ...schemas.weights import Manifest, Round
from ..policy.devices import gpu_of
from .broadcast_group import (
    FORM_S,
    MEET_S,
    ProcessGroup,
    Store,
    no_route,
    off_loop,
    own_address,
    reach_store,
)
from .shared_buffer import SharedBufferGroup
from .tensors import fingerprint

Group: TypeAlias = ProcessGroup | SharedBufferGroup
"""A group of the learner and its receivers, whatever it sends by."""


def meet_group(
    route: Literal["cpu", "cuda", "ipc"],
    store: Store,
    name: str,
    rank: int,
    size: int,
    device: torch.device,
    address: str,
    meet_s: float = MEET_S,
) -> Group:
    """Form a group with the others whose list bears this name; it blocks.

    Raises ProcessGroupFailed when somebody does not come within `meet_s`.
    """
    if route == "ipc":
        return SharedBufferGroup.meet(store, name, rank, size, device, meet_s)
    own = device if route == "cuda" else torch.device("cpu")
    return ProcessGroup.meet(store, name, rank, size, own, address, meet_s)


class Member(Protocol):
    """Takes the places of a receiver."""

    device: Literal["cpu", "cuda"]
    """Where it wants weights."""
    num_ranks: int
    """Places that it takes."""
    gpus: list[str]
    """UUIDs of its GPUs."""

    @property
    def group(self) -> str:
        """The group that it is in; empty: none."""
        ...

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore, before any place is asked for: who cannot would hold
        up the others of a group. Raises ProcessGroupFailed."""
        ...

    async def join(self, place: Round) -> None:
        """Form the group of a place, unless it is in it. Raises ProcessGroupFailed."""
        ...

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version in the group; return its payload, or None where it is loaded at once.

        Raises ProcessGroupFailed, DigestMismatch.
        """
        ...

    def leave(self) -> None:
        """Leave the group; nobody need be told."""
        ...


class LocalMember:
    """This process: receives the whole payload into the memory of its device."""

    num_ranks = 1

    def __init__(self, device: torch.device, meet_s: float = MEET_S) -> None:
        """Be in no group."""
        self.device: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        self.gpus = [gpu] if (gpu := gpu_of(device)) else []
        self._device = device
        self._meet_s = meet_s
        self._store: Store | None = None
        self._group: Group | None = None

    @property
    def group(self) -> str:
        """The group that it is in; empty: none."""
        return "" if self._group is None else self._group.name

    async def connect(self, address: str, port: int) -> None:
        """Connect to the learner's TCPStore; see `Member.connect`."""
        reach = partial(reach_store, address, port, INSTEAD)
        self._store = await off_loop(reach, "weights store")

    async def join(self, place: Round) -> None:
        """Form the group of a place; see `Member.join`."""
        if self.group == place.group:
            return
        self.leave()
        try:
            self._group = await off_loop(partial(self._meet, place), "weights group", FORM_S)
        except TimeoutError as error:  # NCCL waits for ever
            address = own_address(place.address, place.port)
            late = f"nothing came in {FORM_S:g} s"
            who = f"member {place.rank} of group {place.group}"
            raise no_route(who, address, late) from error

    async def receive(self, manifest: Manifest) -> Payload | None:
        """Receive a version; see `Member.receive`."""
        group = self._group
        assert group is not None  # it was joined
        payload = await off_loop(lambda: group.receive(manifest.num_bytes), "weights")
        digest = await off_loop(lambda: fingerprint(payload), "weights digest")
        if digest != manifest.digest:
            raise DigestMismatch(f"it has digest {digest}, told was {manifest.digest}")
        return _as_payload(payload)

    def leave(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _meet(self, place: Round) -> Group:
        assert self._store is not None  # else the learner would not have given a place
        return meet_group(
            place.device,
            self._store,
            place.group,
            place.rank,
            place.size,
            self._device,
            own_address(place.address, place.port),
            self._meet_s,
        )


INSTEAD = "; or set weights.transport=object"
"""What else can be done where the learner cannot be reached."""


def _as_payload(payload: Tensor) -> Payload:
    return cast("Any", payload) if payload.is_cuda else payload.numpy().data
