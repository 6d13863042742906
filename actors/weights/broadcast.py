"""The transport `nccl`: the learner sends versions in rounds to requesting receivers.

A receiver requests a place in a round from the learner, joins the group, and receives. It is any
process that opens the weights of a job: generators, evaluators, inference servers. It stays in its
group until the learner assigns another.

The learner holds the published versions. The newest two are in memory, and a third while it is
published. Older needed versions, and versions that must outlive this process, are files in the run
folder; a restarted learner publishes the others again as it trains from its checkpoint on. No
sending thread runs between rounds. During a round a thread sends, and requests wait for the next
round.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from ...broker.client.connection import Broker
from ...broker.client.rpc import Service, call
from ...schemas.local.process import in_daemon_thread
from ...schemas.plan.memory import VERSIONS_IN_MEMORY
from ...schemas.weights import JoinRound, Manifest, Round, TensorEntry
from ...schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from ...schemas.wire.subjects import JobScope
from ..addresses import own_address, server_of
from ..policy.devices import gpu_of
from .broadcast_group import (
    FORM_S,
    MEET_S,
    Group,
    LocalMember,
    Member,
    ProcessGroupFailed,
    Store,
    meet_group,
    open_store,
)
from .payloads import (
    TRANSFER_DEADLINE_S,
    read_file,
    remove_file,
    write_file,
)
from .tensors import Payload, fingerprint

# -- receiver --------------------------------------------------------------------------------------

_JOIN_S = 60.0
"""Time for which a receiver waits for its place; during a round, the learner answers later."""
_TRIES = 4
_PAUSE_S = 0.5
_log = structlog.get_logger()


class BroadcastReceiver:
    """Receives payloads from the learner of a job, one at a time."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        device: torch.device | None = None,
        *,
        member: Member | None = None,
        patience_s: float = TRANSFER_DEADLINE_S,
        meet_s: float = MEET_S,
    ) -> None:
        """Receive into the memory of `device` (default: the CPU), or with another `member`.

        `patience_s` limits the wait for a learner that is absent, or has not reached the version
        again.
        """
        self._broker = broker
        self.scope = scope
        """The job whose weights are received."""
        self._member: Member = member or LocalMember(device or torch.device("cpu"), meet_s)
        self._patience_s = patience_s
        self._name = uuid.uuid4().hex
        self._receiving = asyncio.Lock()
        self._port = 0

    async def get(self, manifest: Manifest) -> Payload:
        """Return the payload of a version: a memoryview, or on a GPU a tensor of uint8[N].

        Raises NotFoundError if it was removed, DigestMismatch, DeadlineError if the learner stays
        absent, BrokerError if no round succeeds.
        """
        payload = await self.receive(manifest)
        assert payload is not None  # the member is this process
        return payload

    async def receive(
        self, manifest: Manifest, ready: Callable[[], Awaitable[None]] | None = None
    ) -> Payload | None:
        """Receive a version with the member; return the member's result.

        `ready` is awaited after a group is formed, before the first byte arrives. Raises what `get`
        raises.
        """
        async with self._receiving:
            failure: BrokerError | None = None
            for _ in range(_TRIES):
                try:
                    await self._member.join(await self._place(manifest))
                    if ready is not None:
                        await ready()
                    return await self._member.receive(manifest)
                except ProcessGroupFailed as error:
                    _log.info("weights_round_failed", version=manifest.version, error=str(error))
                    self._forget()
                    failure = error
        raise BrokerError(
            f"version {manifest.version} did not come in {_TRIES} rounds: "
            f"{failure.message if failure else ''}",
            hint=failure.hint if failure else "",
        ) from failure

    async def _place(self, manifest: Manifest) -> Round:
        """Request a place until the learner has one: it may be absent or not at the version."""
        deadline = self._broker.clock() + self._patience_s
        waits_for = "the learner"
        while self._broker.clock() < deadline:
            try:
                place = await self._request_round(manifest)
            except (NotFoundError, DeadlineError) as error:  # not from the learner
                waits_for = error.message
                await asyncio.sleep(_PAUSE_S)
                continue
            if place.answer == "place":
                return place
            if place.answer == "removed":
                raise NotFoundError(
                    f"version {manifest.version} is not in the learner's memory any more",
                    hint="take the newest version",
                )
            if place.answer == "connect":
                self._forget()
                await self._member.connect(place.address, place.port)
                self._port = place.port
            else:
                waits_for = f"the learner to train version {manifest.version} again"
                await asyncio.sleep(_PAUSE_S)
        raise DeadlineError(
            f"version {manifest.version} was waited for for {self._patience_s:g} s: {waits_for}",
            hint="see whether the learner runs, and what it does: `tinkermq logs`",
        )

    async def _request_round(self, manifest: Manifest) -> Round:
        request = JoinRound(
            receiver=self._name,
            version=manifest.version,
            location=manifest.location,
            num_bytes=manifest.num_bytes,
            device=self._member.device,
            num_ranks=self._member.num_ranks,
            gpus=self._member.gpus,
            port=self._port,
            group=self._member.group,
        )
        return await call(
            self._broker,
            self.scope.weights_join,
            request,
            Round,
            timeout_s=_JOIN_S,
            waiting_for="the learner's next round of weights",
            idempotent=True,
        )

    def close(self) -> None:
        """Leave the group, without notice to the learner."""
        self._forget()

    def _forget(self) -> None:
        self._member.leave()
        self._port = 0


# -- sender ----------------------------------------------------------------------------------------

_WINDOW_S = 0.2
"""Time for which a round waits for further requests, unless all known receivers have asked."""
_LATE_S = 2.0
"""Time for which it waits for known receivers: they generate meanwhile, and one that comes later
needs a group of its own, and the next version a group again."""
_CONNECTED_S = 60.0
_GROUPS_PER_STORE = 1000
"""A TCPStore keeps all groups that met in it, so it is replaced after this number."""


class _Held(NamedTuple):
    entries: list[TensorEntry]
    payload: Tensor
    """uint8[N] in host memory."""


@dataclass(frozen=True)
class _Asker:
    request: JoinRound
    place: asyncio.Future[Round]
    until: float
    """Time at which the request expires, by the event loop's clock."""


Route = Literal["cpu", "cuda", "ipc"]


class _Target(NamedTuple):
    location: str
    num_bytes: int
    device: Route


@dataclass
class _Last:
    """The group of the last round for a kind of device."""

    group: Group
    members: list[str]


class Sender:
    """Holds payloads, and sends each to the receivers that request it."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        folder: Path,
        device: torch.device | None = None,
        *,
        num_receivers: int = 0,
        window_s: float = _WINDOW_S,
        late_s: float = _LATE_S,
        meet_s: float = MEET_S,
    ) -> None:
        """Send from `device` (default: the CPU); `folder` stores what must outlive this process.

        `num_receivers` are expected in the first round.
        """
        self._broker = broker
        self._scope = scope
        self._folder = folder
        self._device = device or torch.device("cpu")
        self._gpu = gpu_of(self._device)
        self._num_receivers = num_receivers
        self._window_s = window_s
        self._late_s = late_s
        self._meet_s = meet_s
        self._newest = -1
        self._newest_location = ""
        self._received: dict[str, _Target] = {}
        """What each receiver of the newest versions took last."""
        self._held: dict[str, _Held] = {}
        self._waiting: dict[_Target, dict[str, _Asker]] = {}
        self._requested = asyncio.Event()
        self._address = ""
        self._store: Store | None = None
        self._num_groups = 0
        self._last: dict[str, _Last] = {}

    # Held payloads ----------------------------------------------------------------------------

    async def put(
        self,
        version: int,
        entries: list[TensorEntry],
        views: Sequence[memoryview],
        digest: str = "",
    ) -> tuple[str, str]:
        """Hold a payload; return its location and digest, which may be known. Raises StorageError.

        Views of one complete, read-only array are kept, others are copied.
        """
        pinned = self._device.type == "cuda"  # copies to the GPU then run at bus speed
        payload = await asyncio.to_thread(_held_or_copied, views, pinned=pinned)
        digest = digest or await asyncio.to_thread(fingerprint, payload)
        older = list(self._held)[: 1 - VERSIONS_IN_MEMORY]
        await self.secure(older)
        for location in older:
            self._held.pop(location, None)
        location = f"v{version}-{uuid.uuid4().hex[:8]}"
        self._held[location] = _Held(entries, payload)
        self._newest, self._newest_location = max(self._newest, version), location
        return location, digest

    async def holds(self, location: str) -> bool:
        """Return whether a payload is in memory or in a file."""
        return location in self._held or await asyncio.to_thread(self._file(location).is_file)

    async def secure(self, locations: Iterable[str]) -> None:
        """Write payloads that are only in memory into files. Raises StorageError."""
        for location in locations:
            held, file = self._held.get(location), self._file(location)
            if held is not None and not await asyncio.to_thread(file.is_file):
                await asyncio.to_thread(write_file, file, held.entries, [_view_of(held.payload)])

    async def remove(self, location: str) -> None:
        """Remove a payload; harmless if it is gone."""
        self._held.pop(location, None)
        await asyncio.to_thread(remove_file, self._file(location))

    def _file(self, location: str) -> Path:
        return self._folder / f"{location}.safetensors"

    async def _payload(self, target: _Target) -> Tensor:
        """Return uint8[N] in host memory. Raises NotFoundError, StorageError."""
        held = self._held.get(target.location)
        if held is not None:
            return held.payload
        file = self._file(target.location)
        _, payload = await asyncio.to_thread(read_file, file, target.num_bytes)
        return torch.as_tensor(np.frombuffer(payload, np.uint8))

    # Rounds -----------------------------------------------------------------------------------

    async def open(self, service: Service) -> None:
        """Start answering receivers; `serve` sends to them. Raises DeadlineError."""
        deadline = self._broker.clock() + _CONNECTED_S
        await self._broker.wait_connected(deadline, waiting_for="the broker")
        self._address = await asyncio.to_thread(own_address, *server_of(self._broker))
        self._store = await asyncio.to_thread(open_store, self._address)
        await service.endpoint("weights", self._scope.weights_join, JoinRound, self._join)

    async def serve(self) -> None:
        """Answer requests, one round after another, forever."""
        assert self._store is not None  # set by `open`
        try:
            while True:
                await self._wait_for_requests()
                target = next(iter(self._waiting))
                await self._window(target)
                await self._round(target, self._waiting.pop(target), self._store)
                if self._num_groups >= _GROUPS_PER_STORE:
                    await self._replace_store()
        finally:
            for device in list(self._last):
                self._leave(device)

    async def _replace_store(self) -> None:
        """Open another TCPStore; receivers connect to it as if to a new learner."""
        self._store = await asyncio.to_thread(open_store, self._address)
        self._num_groups = 0
        waiting, self._waiting = self._waiting, {}
        for asker in [asker for askers in waiting.values() for asker in askers.values()]:
            asker.place.set_result(self._answer("connect", self._store))

    async def _join(self, request: JoinRound) -> Round:
        """Give a receiver a place in the next round of the version that it requests."""
        assert self._store is not None  # requests are served only afterwards
        if request.port != self._store.port:
            return self._answer("connect", self._store)
        if not await self.holds(request.location):
            is_past = request.version <= self._newest
            return self._answer("removed" if is_past else "later", self._store)
        device = route(self._gpu, request.gpus) if request.device == "cuda" else "cpu"
        loop = asyncio.get_running_loop()
        asker = _Asker(request, loop.create_future(), loop.time() + _JOIN_S)
        target = _Target(request.location, request.num_bytes, device)
        askers = self._waiting.setdefault(target, {})
        if request.receiver in askers:  # its previous request has expired
            askers[request.receiver].place.set_result(self._answer("later", self._store))
        askers[request.receiver] = asker
        self._requested.set()
        return await asker.place

    def _answer(self, answer: Literal["connect", "later", "removed"], store: Store) -> Round:
        return Round(answer=answer, address=self._address, port=store.port)

    async def _wait_for_requests(self) -> None:
        while not self._waiting:
            self._requested.clear()
            await self._requested.wait()

    async def _window(self, target: _Target) -> None:
        """Wait for the known receivers, or briefly for any; forget those that do not come."""
        loop = asyncio.get_running_loop()
        opened = loop.time()
        while absent := self._absent(target):
            wait_s = self._window_s if absent == {""} else self._late_s
            if (left_s := opened + wait_s - loop.time()) <= 0:
                break
            self._requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._requested.wait()
        for name in absent:
            self._received.pop(name, None)

    def _absent(self, target: _Target) -> set[str]:
        """Return the receivers that are known to take the target but have not asked for it.

        {""} stands for receivers that are not known; of the first round their number is expected.
        """
        if target.location != self._newest_location:
            return {""}
        alike = {name for name, last in self._received.items() if last.device == target.device}
        if alike:
            asking = self._waiting[target].keys()
            return {name for name in alike - asking if self._received[name] != target}
        if self._received or not self._num_receivers:
            return {""}
        here = (askers for other, askers in self._waiting.items() if other[:2] == target[:2])
        num_here = sum(map(len, here))
        return {f"receiver {number}" for number in range(num_here, self._num_receivers)}

    async def _round(self, target: _Target, waiting: Mapping[str, _Asker], store: Store) -> None:
        """Send a version to the receivers; a receiver that it does not reach requests it again."""
        now = asyncio.get_running_loop().time()
        askers = {name: entry for name, entry in waiting.items() if entry.until > now}
        for late in waiting.keys() - askers.keys():
            waiting[late].place.set_result(self._answer("later", store))
        if target.device == "cuda":
            askers, others = _apart(askers)
            if others:
                self._waiting.setdefault(target, {}).update(others)
        if not askers:
            return
        try:
            payload = await self._payload(target)
        except NotFoundError:  # removed since the request
            for asker in askers.values():
                asker.place.set_result(self._answer("removed", store))
            return
        try:
            group = await self._group(askers, target.device, store)
            await in_daemon_thread(lambda: group.send(payload), f"weights {target.location}")
            if target.location == self._newest_location:
                self._received.update(dict.fromkeys(askers, target))
        except (ProcessGroupFailed, TimeoutError) as error:
            _log.warning("weights_round_failed", members=len(askers), error=str(error))
            self._leave(target.device)

    async def _group(self, askers: Mapping[str, _Asker], device: Route, store: Store) -> Group:
        """Assign places and return the group: the group of the last round, or a new one."""
        last = self._last.get(device)
        again = last is not None and _are_all_of(last, askers)
        members = last.members if last and again else list(askers)
        name = last.group.name if last and again else uuid.uuid4().hex
        size = 1 + sum(askers[member].request.num_ranks for member in members)
        rank = 1
        for member in members:
            place = Round(
                answer="place",
                address=self._address,
                port=store.port,
                group=name,
                device=device,
                rank=rank,
                size=size,
            )
            askers[member].place.set_result(place)
            rank += askers[member].request.num_ranks
        if last and again:
            return last.group
        self._leave(device)
        self._num_groups += 1
        own = self._device if device != "cpu" else torch.device("cpu")
        meet = partial(meet_group, device, store, name, 0, size, own, self._address, self._meet_s)
        async with asyncio.timeout(FORM_S):
            group = await in_daemon_thread(meet, f"group {name}")
        self._last[device] = _Last(group, members)
        return group

    def _leave(self, device: str) -> None:
        last = self._last.pop(device, None)
        if last is not None:
            last.group.leave()


def _are_all_of(last: _Last, askers: Mapping[str, _Asker]) -> bool:
    """Return whether exactly the members of a group ask, and none has left it."""
    stayed = {name for name, asker in askers.items() if asker.request.group == last.group.name}
    return stayed == set(askers) == set(last.members)


def route(own: str, gpus: Sequence[str]) -> Route:
    """Return how a receiver on `gpus` is reached from the GPU `own`, all given by UUID.

    NCCL refuses two ranks on one GPU. So a receiver on only the learner's GPU maps the learner's
    memory, and a receiver on that GPU and others receives in host memory.
    """
    if not own or not gpus:
        return "cpu"
    if own not in gpus:
        return "cuda"
    return "ipc" if set(gpus) == {own} else "cpu"


def _apart(askers: Mapping[str, _Asker]) -> tuple[dict[str, _Asker], dict[str, _Asker]]:
    """Divide receivers into those that share no GPU with each other, and the rest."""
    used: set[str] = set()
    now: dict[str, _Asker] = {}
    for name, asker in askers.items():
        gpus = set(asker.request.gpus)
        if not gpus & used:
            now[name] = asker
            used |= gpus
    return now, {name: asker for name, asker in askers.items() if name not in now}


def _held_or_copied(views: Sequence[memoryview], *, pinned: bool) -> Tensor:
    """Return the bytes of views: their array if they cover it, else a copy."""
    size = sum(len(view) for view in views)
    whole = views[0].obj if views else None
    is_whole = all(view.obj is whole and view.readonly for view in views)
    if isinstance(whole, np.ndarray) and whole.nbytes == size and is_whole:
        return torch.as_tensor(whole.view(np.uint8).reshape(-1))
    payload = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    place = 0
    for view in views:
        if len(view):
            payload[place : place + len(view)].numpy()[:] = np.frombuffer(view, np.uint8)
        place += len(view)
    return payload


def _view_of(payload: Tensor) -> memoryview:
    return payload.numpy().data
