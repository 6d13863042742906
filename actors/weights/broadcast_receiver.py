"""A receiver's side: asks the learner for a place in a round, joins the group, receives.

A receiver is any process that opens the weights of a job: generators, evaluators, inference
servers. It stays in its group until the learner names another.
"""

import asyncio
import uuid
from functools import partial
from typing import cast

import structlog
import torch
from torch import Tensor

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...broker.jetstream.objects import DigestMismatch
from ...broker.weights.payloads import TRANSFER_DEADLINE_S, Payload
from ...schemas.weights import JoinRound, Manifest, Round
from ...schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from ...schemas.wire.subjects import JobScope
from .broadcast_group import (
    FORM_S,
    MEET_S,
    ProcessGroup,
    ProcessGroupFailed,
    Store,
    off_loop,
    own_address,
    reach_store,
)
from .tensors import fingerprint

JOIN_S = 60.0
"""How long a receiver waits for its place; a learner in the middle of a round lets it wait."""
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
        patience_s: float = TRANSFER_DEADLINE_S,
        meet_s: float = MEET_S,
    ) -> None:
        """Receive into the memory of `device`, by default the CPU.

        A learner that is away, or has not trained so far again, is waited for for `patience_s`.
        """
        self._broker = broker
        self._scope = scope
        self._device = device or torch.device("cpu")
        self._patience_s = patience_s
        self._meet_s = meet_s
        self._name = uuid.uuid4().hex
        self._receiving = asyncio.Lock()
        self._store: Store | None = None
        self._group: ProcessGroup | None = None

    async def get(self, manifest: Manifest) -> Payload:
        """Return the payload of a version: a memoryview, or on a GPU a tensor of uint8[N].

        Raises NotFoundError when it was removed, DigestMismatch, DeadlineError when the learner
        stays away, BrokerError when no round succeeds.
        """
        async with self._receiving:
            failure: BrokerError | None = None
            for _ in range(_TRIES):
                try:
                    place = await self._place(manifest)
                    payload = await self._receive(place, manifest.num_bytes)
                except ProcessGroupFailed as error:
                    _log.info("weights_round_failed", version=manifest.version, error=str(error))
                    self._forget()
                    failure = error
                    continue
                if (digest := await asyncio.to_thread(fingerprint, payload)) != manifest.digest:
                    raise DigestMismatch(f"it has digest {digest}, told was {manifest.digest}")
                return _as_payload(payload)
        raise BrokerError(
            f"version {manifest.version} did not come in {_TRIES} rounds: "
            f"{failure.message if failure else ''}",
            hint=failure.hint if failure else "",
        ) from failure

    async def _place(self, manifest: Manifest) -> Round:
        """Ask for a place until the learner has one: it may be away, or not so far again."""
        deadline = self._broker.clock() + self._patience_s
        waits_for = "the learner"
        while self._broker.clock() < deadline:
            try:
                place = await self._request_round(manifest)
            except (NotFoundError, DeadlineError) as error:  # it was not the learner who said so
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
                instead = "; or set weights.transport=object"
                reach = partial(reach_store, place.address, place.port, instead)
                self._store = await off_loop(reach, "weights store")
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
            device="cuda" if self._device.type == "cuda" else "cpu",
            port=0 if self._store is None else self._store.port,
            group="" if self._group is None else self._group.name,
        )
        return await call(
            self._broker,
            self._scope.weights_join,
            request,
            Round,
            timeout_s=JOIN_S,
            waiting_for="the learner's next round of weights",
            idempotent=True,
        )

    async def _receive(self, place: Round, num_bytes: int) -> Tensor:
        """Join the group, unless this is the one that was joined last, and receive.

        Raises ProcessGroupFailed.
        """
        if self._group is None or self._group.name != place.group:
            self._leave()
            try:
                self._group = await off_loop(partial(self._meet, place), "weights group", FORM_S)
            except TimeoutError as error:
                raise ProcessGroupFailed(
                    f"group {place.group} did not form in {FORM_S:g} s"
                ) from error
        group = self._group
        return await off_loop(lambda: group.receive(num_bytes), "weights")

    def _meet(self, place: Round) -> ProcessGroup:
        assert self._store is not None  # else the learner would not have given a place
        device = self._device if place.device == "cuda" else torch.device("cpu")
        address = own_address(place.address, place.port)
        return ProcessGroup.meet(
            self._store, place.group, place.rank, place.size, device, address, self._meet_s
        )

    def close(self) -> None:
        """Leave the group; the learner need not be told."""
        self._forget()

    def _forget(self) -> None:
        self._leave()
        self._store = None

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()


def _as_payload(payload: Tensor) -> Payload:
    return cast("Payload", payload) if payload.is_cuda else payload.numpy().data
