"""Appends that the server accepts only if the stream is in the state that the writer expects."""

import asyncio
import uuid
from collections.abc import Mapping

from ...schemas.wire.errors import BrokerError, ConflictError, DeadlineError
from ...schemas.wire.trace import TRACEPARENT
from ..client.availability import UnansweredRequest
from ..client.connection import Broker
from ..client.faults import Refused
from ..client.nats_internals import EXPECTED_SEQ, EXPECTED_STREAM_SEQ, WRITE_ID
from .direct_get import StoredMessage, get_last, get_last_behind

_FULL_PAUSE_S = 0.2


class Overtaken(ConflictError):
    """Another writer has written to the subject; `last` is its last sequence, None for none."""

    def __init__(self, message: str, *, hint: str = "", last: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.last = last


async def append_behind(
    broker: Broker,
    stream: str,
    subject: str,
    payload: bytes,
    seq: int,
    *,
    headers: Mapping[str, str] | None = None,
    deadline_s: float,
    waiting_for: str,
) -> int:
    """Append a message if its subject's last sequence is `seq` (0: none); return its sequence.

    A random id shows whether an earlier attempt was stored and its answer lost. Raises Overtaken,
    BrokerError, DeadlineError, NotFoundError.
    """
    write_id = uuid.uuid4().hex
    expecting = {**(headers or {}), EXPECTED_SEQ: str(seq), WRITE_ID: write_id}
    try:
        return await broker.append(
            subject, payload, headers=expecting, deadline_s=deadline_s, waiting_for=waiting_for
        )
    except Refused as error:
        last = await broker.retry(
            lambda: get_last_behind(broker, stream, subject, seq),
            deadline_s=deadline_s,
            waiting_for=waiting_for,
        )
        if last is not None and last.headers.get(WRITE_ID) == write_id:
            return last.seq
        if error.is_overtaken:
            last_seq = None if last is None else last.seq
            raise Overtaken(f"another writer has appended on {subject}", last=last_seq) from error
        raise


async def append_as_owner(
    broker: Broker,
    stream: str,
    subject: str,
    payload: bytes,
    seq: int,
    *,
    is_first: bool = True,
    deadline_s: float,
    waiting_for: str,
) -> int | None:
    """Append if the stream's last sequence is `seq` and, with `is_first`, its subject is empty.

    Returns its sequence; None if the subject has a message already. Raises Overtaken when another
    writer has appended to the stream, BrokerError, DeadlineError, NotFoundError.
    """
    write_id = uuid.uuid4().hex
    expecting = {EXPECTED_STREAM_SEQ: str(seq), WRITE_ID: write_id}
    if is_first:
        expecting[EXPECTED_SEQ] = "0"
    try:
        return await broker.append(
            subject, payload, headers=expecting, deadline_s=deadline_s, waiting_for=waiting_for
        )
    except Refused as error:
        if not _is_there(error):
            raise

        async def stored() -> StoredMessage | None:
            newest = await get_last(broker, stream, subject)
            return newest or await get_last_behind(broker, stream, subject, seq)

        last = await broker.retry(stored, deadline_s=deadline_s, waiting_for=waiting_for)
        if last is not None and last.headers.get(WRITE_ID) == write_id:
            return last.seq
        if is_first and last is not None and last.seq <= seq:
            return None
        last_seq = None if last is None else last.seq
        raise Overtaken(f"another writer has appended to {stream}", last=last_seq) from error


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

    Waits while the stream is full (without a bound on a patient connection), and reports so with
    `full_hint`. Raises BrokerError if it stays full, also if the last attempt was not answered in
    time, DeadlineError, NotFoundError.
    """
    full: Refused | None = None

    def stays_full(refusal: Refused) -> BrokerError:
        waited = f"{what} waited {deadline_s:g} s for room in {place}: {refusal.description}"
        return BrokerError(waited, hint=full_hint)

    waiting_for = f"{what} to be stored in {place}"
    headers = {EXPECTED_SEQ: "0"}
    if traceparent:
        headers[TRACEPARENT] = traceparent
    deadline = broker.clock() + deadline_s
    with UnansweredRequest(broker.availability, waiting_for) as unanswered:
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
            except DeadlineError as error:
                if full is None:
                    raise
                raise stays_full(full) from error
            except Refused as error:
                if _is_there(error):
                    return False
                if not error.is_full:
                    raise
                full = error
                if not broker.is_patient and broker.clock() > deadline - _FULL_PAUSE_S:
                    raise stays_full(error) from error
                unanswered.note(f"it is full ({full_hint})")
            await asyncio.sleep(_FULL_PAUSE_S)


def _is_there(error: Refused) -> bool:
    # a second message of a subject is refused with the code of a full stream: only the text differs
    return error.is_overtaken or "per subject" in error.description
