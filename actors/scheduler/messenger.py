"""Passes on to learners that they shall stop, pause, or leave their job to another.

What a learner shall do is in its job's record; here is only remembered which process has heard
it. A learner that was started again, or did not listen yet, is told anew.
"""

import asyncio
from typing import Literal

import structlog

from ...broker.client.connection import Broker
from ...broker.client.rpc import call
from ...schemas.control import ControlReply, ControlRequest
from ...schemas.job import JobRecord
from ...schemas.node import ActorStatus
from ...schemas.wire.errors import TinkermqError
from .jobs.actors import main_actor
from .jobs.states import ACTIVE

_CONTROL_TIMEOUT_S = 5.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Messenger:
    """Tells each start of a learner once."""

    def __init__(self, broker: Broker) -> None:
        """Have told nobody."""
        self._broker = broker
        self._told: dict[str, tuple[str, int | None]] = {}
        self._telling: set[str] = set()

    def pass_on(
        self,
        key: str,
        record: JobRecord,
        learner: ActorStatus | None,
        group: asyncio.TaskGroup,
    ) -> None:
        """Tell the learner to stop or pause, in a task of `group`, unless it knows."""
        verb = _verb_for(record)
        if verb is None:
            self._told.pop(key, None)
            return
        if learner is None or learner.state != "running" or key in self._telling:
            return
        if self._told.get(key) != (verb, learner.pid):
            self._telling.add(key)
            group.create_task(self._tell(key, record, verb, learner.pid), name=f"{verb} {key}")

    def hand_over(self, record: JobRecord, group: asyncio.TaskGroup) -> None:
        """Tell the learner of a silent node to end, in case that it is the node alone that hangs.

        It could go on training beside its successor otherwise: each would find that the other has
        written to the batch log, and whichever starts again loses to the one that runs. A learner
        that does not hear it cannot write there either.
        """
        group.create_task(self._hand_over(record), name=f"hand over {record.job}")

    async def _hand_over(self, record: JobRecord) -> None:
        try:
            await tell_learner(self._broker, record, "hand_over")
            _log.info("learner_told_to_end", job=record.job)
        except TinkermqError as error:
            _log.debug("learner_not_told", job=record.job, verb="hand_over", error=error.message)

    def forget(self, key: str) -> None:
        """Drop what is known of a job that has ended."""
        self._told.pop(key, None)

    async def _tell(
        self, key: str, record: JobRecord, verb: Literal["stop", "pause"], pid: int | None
    ) -> None:
        try:
            await tell_learner(self._broker, record, verb)
            self._told[key] = (verb, pid)
        except TinkermqError as error:  # it may not listen yet: again next turn
            _log.debug("learner_not_told", job=record.job, verb=verb, error=error.message)
        finally:
            self._telling.discard(key)


async def tell_learner(
    broker: Broker, record: JobRecord, verb: Literal["stop", "pause", "resume", "hand_over"]
) -> ControlReply:
    """Send a control request to the learner of a job."""
    return await call(
        broker,
        record.scope.control(main_actor(record.actors).name),
        ControlRequest(verb=verb, reason=f"{verb} of the job"),
        ControlReply,
        timeout_s=_CONTROL_TIMEOUT_S,
        waiting_for=f"the {main_actor(record.actors).role} of {record.name}",
        idempotent=True,
    )


def _verb_for(record: JobRecord) -> Literal["stop", "pause"] | None:
    if record.state in ACTIVE and record.stop == "drain":
        return "stop"
    return "pause" if record.state == "PAUSED" else None
