"""A request that is sent again until it is answered, for a flood of somebody else may cost it.

It is dropped with the connection that a flood has filled (`request_connection`), or waits behind
it. So whoever asks such a service sends a request that may be sent twice. While nobody answers,
another service may be about to take over.
"""

import asyncio
import time
from typing import TypeVar

from ...schemas.wire.errors import BrokerError, NobodyAnswersError
from ...schemas.wire.message import Message
from ..client.connection import Broker
from ..client.rpc import call

R = TypeVar("R", bound=Message)

ATTEMPT_S = 5.0
"""After which a request is sent again; a late reply to the one before counts as well."""
_LEAST_S = 0.1
_PAUSE_S = 0.1


async def call_service(
    broker: Broker,
    subject: str,
    request: Message,
    reply_model: type[R],
    *,
    timeout_s: float,
    absent_s: float,
    absent: BrokerError,
    waiting_for: str,
) -> R:
    """Ask a service of the pool; raises `absent` when nobody answers for `absent_s`."""
    patience, deadline = (time.monotonic() + seconds for seconds in (absent_s, timeout_s))
    while True:
        try:
            return await repeated_call(
                broker, subject, request, reply_model, deadline=deadline, waiting_for=waiting_for
            )
        except NobodyAnswersError as error:
            if time.monotonic() >= patience:
                raise absent from error
            await asyncio.sleep(_PAUSE_S)


async def repeated_call(
    broker: Broker,
    subject: str,
    request: Message,
    reply_model: type[R],
    *,
    deadline: float,
    waiting_for: str,
    attempt_s: float = ATTEMPT_S,
) -> R:
    """Return the first reply to a request that is sent every `attempt_s`.

    `deadline` is one of `time.monotonic`. Raises what `call` raises.
    """
    sent: set[asyncio.Task[R]] = set()
    try:
        while True:
            asking = call(
                broker,
                subject,
                request,
                reply_model,
                timeout_s=max(deadline - time.monotonic(), _LEAST_S),
                waiting_for=waiting_for,
                idempotent=True,
            )
            sent.add(asyncio.create_task(asking, name=subject))
            answered, _ = await asyncio.wait(
                sent, timeout=attempt_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answered:
                return answered.pop().result()
    finally:
        for one in sent:
            one.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
