"""A receiver's side: asks the learner for a place in a round, joins the group, receives.

A receiver is any process that opens the weights of a job: generators, evaluators, inference
servers. It stays in its group until the learner names another.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import structlog
import torch

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...broker.weights.payloads import TRANSFER_DEADLINE_S, Payload
from ...schemas.weights import JoinRound, Manifest, Round
from ...schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from ...schemas.wire.subjects import JobScope
from .broadcast_group import MEET_S, ProcessGroupFailed
from .members import LocalMember, Member

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
        member: Member | None = None,
        patience_s: float = TRANSFER_DEADLINE_S,
        meet_s: float = MEET_S,
    ) -> None:
        """Receive into the memory of `device`, by default the CPU, or by another `member`.

        A learner that is away, or has not trained so far again, is waited for for `patience_s`.
        """
        self._broker = broker
        self.scope = scope
        """The job whose weights it receives."""
        self._member: Member = member or LocalMember(device or torch.device("cpu"), meet_s)
        self._patience_s = patience_s
        self._name = uuid.uuid4().hex
        self._receiving = asyncio.Lock()
        self._port = 0

    async def get(self, manifest: Manifest) -> Payload:
        """Return the payload of a version: a memoryview, or on a GPU a tensor of uint8[N].

        Raises NotFoundError when it was removed, DigestMismatch, DeadlineError when the learner
        stays away, BrokerError when no round succeeds.
        """
        payload = await self.receive(manifest)
        assert payload is not None  # this process is the member
        return payload

    async def receive(
        self, manifest: Manifest, ready: Callable[[], Awaitable[None]] | None = None
    ) -> Payload | None:
        """Have the member receive a version; return what it returns.

        `ready` is awaited each time that a group stands, before the first byte comes. Raises what
        `get` raises.
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
            timeout_s=JOIN_S,
            waiting_for="the learner's next round of weights",
            idempotent=True,
        )

    def close(self) -> None:
        """Leave the group; the learner need not be told."""
        self._forget()

    def _forget(self) -> None:
        self._member.leave()
        self._port = 0
