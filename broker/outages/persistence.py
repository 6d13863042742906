"""Doing something idempotent until the broker answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.subjects import stream_of
from ..client.faults import TRANSIENT, ConnectionLost, NoResponders, Refused, missing
from ..client.replies import checked
from .availability import Unanswered

if TYPE_CHECKING:
    from ..client.connection import Broker
    from ..client.store_subjects import StoreSubjects

T = TypeVar("T")

RETRY_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LOOK_S = 2.0


async def persist(
    broker: "Broker", attempt: Callable[[], Awaitable[T]], deadline_s: float, waiting_for: str
) -> T:
    """Attempt it again and again; see `Broker.retry`."""
    deadline, missed = broker.clock() + deadline_s, float("inf")
    pause_s = RETRY_PAUSE_S
    with Unanswered(broker.availability, waiting_for) as unanswered:
        while True:
            await broker.wait_connected(deadline, waiting_for=waiting_for)
            try:
                return await attempt()
            except NoResponders as error:
                missed = min(missed, broker.clock())
                if not _is_absent(broker, missed, deadline):
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                if not broker.is_patient or await _has_jetstream(broker):
                    if error.stream:
                        raise missing(error.stream) from error
                    raise
                unanswered.note("its JetStream is off")
            except Refused as error:
                waits = broker.is_patient and error.is_passing
                if not waits and (not error.is_unsettled or _is_over(broker, deadline)):
                    raise
                unanswered.note(f"{error.description}: is the storage of nats-server full?")
            except (ConnectionLost, TimeoutError, *TRANSIENT) as error:
                if not broker.is_patient and _is_over(broker, deadline):
                    raise broker.late(waiting_for) from error
                unanswered.note("no answer; is the disk of nats-server full?")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) if broker.is_patient else pause_s


async def look_for_stream(broker: "Broker", store: "StoreSubjects", subject: str) -> None:
    """Raise NoResponders if the stream is gone that was to store a message on `subject`.

    The server says so by itself unless somebody listens there, as all do who mirror a bucket or
    follow a run: then the message has arrived, and nobody ever confirms it. For guests the store
    proxy looks. Log lines are left out: nothing waits for them, and the nodes, which write those of
    all jobs, have no right to look.
    """
    stream = stream_of(subject)
    if not store.asks_jetstream or stream == subject or stream.endswith("-log"):
        return
    try:
        if store.passes(stream):
            await broker.request(f"{store.direct_get(stream)}.{subject}", timeout_s=_LOOK_S)
        else:
            place = store.api(f"STREAM.INFO.{stream}")
            checked((await broker.request(place, timeout_s=_LOOK_S)).data, place)
    except NoResponders:
        raise
    except (BrokerError, TimeoutError) as error:
        if isinstance(error, Refused) and error.is_absent:
            raise NoResponders(f"no stream stores {subject}") from error
        return  # the broker is slow, or away: the same is asked again


def _is_over(broker: "Broker", deadline: float) -> bool:
    return broker.clock() + RETRY_PAUSE_S >= deadline


def _is_absent(broker: "Broker", missed: float, deadline: float) -> bool:
    """Whether whoever reconnects or is elected has had the time to answer."""
    return broker.settled and broker.clock() >= min(missed + broker.absent_s, deadline)


async def _has_jetstream(broker: "Broker") -> bool:
    """Whether the server stores messages at all; a guest cannot know, and takes it for true."""
    if broker.is_guest:
        return True
    try:
        await broker.api("INFO")
    except NoResponders:
        return False
    except (BrokerError, TimeoutError):
        return True
    return True
