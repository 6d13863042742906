"""What the actors of a run wrote."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ...broker.feed import follow
from ...broker.jetstream.streams import stream_info
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.metric import LogLines
from ...schemas.wire.errors import NotFoundError
from ...schemas.wire.subjects import JobScope
from ..pool import Pool
from ..validation.names import did_you_mean

_START_POLL_S = 1.0


def check_actor(record: JobRecord, actor: str | None) -> None:
    """Raise NotFoundError for an actor that the run does not have."""
    known = [one.name for one in record.actors]
    if actor is not None and actor not in known:
        raise NotFoundError(
            f"run {record.name} has no actor {actor!r}", hint=did_you_mean(actor, known)
        )


async def log_lines(
    pool: Pool, record: JobRecord, *, follow_on: bool
) -> AsyncGenerator[LogLines, None]:
    """Yield the stored lines, and then new ones for ever if `follow_on`."""
    scope = record.scope
    left = await _num_stored(pool, scope)
    while left is None and follow_on and record.state not in FINAL_STATES:
        await asyncio.sleep(_START_POLL_S)
        record, left = await pool.find(record.job), await _num_stored(pool, scope)
    if left is None:
        return
    if not left and not follow_on:
        return
    pool.broker.availability.set_patient(follow_on)
    async with aclosing(follow(pool.broker, scope, ("log",))) as messages:
        async for message in messages:
            left -= 1
            if isinstance(message, LogLines):
                yield message
            if left <= 0 and not follow_on:
                return


async def _num_stored(pool: Pool, scope: JobScope) -> int | None:
    """Return how many batches of lines are stored, None while there is no stream for them."""
    try:
        return int((await stream_info(pool.broker, scope.stream_log))["state"]["messages"])
    except NotFoundError:
        return None
