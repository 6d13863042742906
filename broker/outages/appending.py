"""Appends a message under a subject that must have none, however long its stream is full."""

import asyncio
from collections.abc import Callable

from nats.js.errors import APIError

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.trace import TRACEPARENT
from ..client.connection import Broker
from ..client.faults import STORE_FAILED, WRONG_SEQUENCE
from .availability import Unanswered

_FULL_PAUSE_S = 0.2


async def append_once(
    broker: Broker,
    subject: str,
    payload: bytes,
    *,
    traceparent: str,
    deadline_s: float,
    waiting_for: str,
    full_hint: str,
    refused: Callable[[APIError], BrokerError],
) -> bool:
    """Append a message; return False if its subject has one already.

    Waits while the stream is full, on a patient connection for as long as it is, and says so with
    `full_hint`. Raises DeadlineError, what `refused` makes of the server's refusal, NoResponders.
    """
    headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
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
            except APIError as error:
                if _is_there(error):
                    return False
                late = not broker.is_patient and broker.clock() > deadline - _FULL_PAUSE_S
                if error.err_code != STORE_FAILED or late:
                    raise refused(error) from error
                unanswered.note(full_hint)
            await asyncio.sleep(_FULL_PAUSE_S)


def _is_there(error: APIError) -> bool:
    # one message per subject is refused by the code of a full stream: only the words differ
    return error.err_code in WRONG_SEQUENCE or "per subject" in (error.description or "")
