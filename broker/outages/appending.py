"""Appends a message under a subject that must have none, however long its stream is full."""

import asyncio

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.trace import TRACEPARENT
from ..client.connection import Broker
from ..client.faults import Refused
from ..client.headers import EXPECTED_SEQ
from .availability import Unanswered

_FULL_PAUSE_S = 0.2


async def append_once(
    broker: Broker,
    subject: str,
    payload: bytes,
    *,
    traceparent: str,
    deadline_s: float,
    what: str,
    place: str,
    full_hint: str,
) -> bool:
    """Append `what` to its `place`; return False if its subject has a message already.

    Waits while the stream is full, on a patient connection for as long as it is, and says so with
    `full_hint`. Raises BrokerError when it stays full, DeadlineError, NotFoundError.
    """
    waiting_for = f"{what} to be stored in {place}"
    headers = {EXPECTED_SEQ: "0"}
    if traceparent:
        headers[TRACEPARENT] = traceparent
    deadline = broker.clock() + deadline_s
    with Unanswered(broker.availability, waiting_for) as unanswered:
        while True:
            try:
                await broker.append(
                    subject,
                    payload,
                    headers=headers,
                    deadline_s=deadline - broker.clock(),
                    waiting_for=waiting_for,
                )
                return True
            except Refused as error:
                if _is_there(error):
                    return False
                if not error.is_full:
                    raise
                if not broker.is_patient and broker.clock() > deadline - _FULL_PAUSE_S:
                    raise BrokerError(
                        f"{what} waited {deadline_s:g} s for room in {place}: {error.description}",
                        hint=full_hint,
                    ) from error
                unanswered.note(f"it is full ({full_hint})")
            await asyncio.sleep(_FULL_PAUSE_S)


def _is_there(error: Refused) -> bool:
    # one message per subject is refused by the code of a full stream: only the words differ
    return error.is_overtaken or "per subject" in error.description
