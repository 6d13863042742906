"""`tinkermq logs`: what the actors of a run wrote."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from cyclopts import Parameter

from ....broker.feed import follow
from ....broker.jetstream.streams import stream_info
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.metric import LogLines, readable
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import JobScope
from ...pool import Pool
from ...validation.names import did_you_mean
from ..options import COMMON, Common
from ..output import note, print_json_line, say_plain
from ..session import with_pool

_START_POLL_S = 1.0


def logs(
    run: str,
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    actor: str | None = None,
    attempt: int | None = None,
    common: Common = COMMON,
) -> int:
    """Print what the actors of a run wrote, oldest first.

    Parameters
    ----------
    run
        Name or job id.
    follow
        Go on with new lines until Ctrl-C.
    actor
        Only this actor's lines: learner, generator-0, evaluator-0 …
    attempt
        Only those of one attempt of the run: 1, 2 …
    """

    async def work(pool: Pool) -> int:
        record = await pool.find(run)
        _check_actor(record, actor)
        async with aclosing(_lines(pool, record, follow_on=follow)) as batches:
            async for batch in batches:
                if actor in (None, batch.actor) and attempt in (None, batch.attempt):
                    _print(batch, as_json=common.json)
        return 0

    return with_pool(common.nats_url, work)


def _check_actor(record: JobRecord, actor: str | None) -> None:
    known = [one.name for one in record.actors]
    if actor is not None and actor not in known:
        raise NotFoundError(
            f"run {record.name} has no actor {actor!r}", hint=did_you_mean(actor, known)
        )


async def _lines(
    pool: Pool, record: JobRecord, *, follow_on: bool
) -> AsyncGenerator[LogLines, None]:
    """Yield the stored lines, and then new ones for ever if `follow_on`."""
    scope = record.scope
    left = await _num_stored(pool, scope)
    while left is None and follow_on and record.state not in FINAL_STATES:
        await asyncio.sleep(_START_POLL_S)
        record, left = await pool.find(record.job), await _num_stored(pool, scope)
    if left is None:
        if not follow_on and record.state not in FINAL_STATES:
            note(f"{record.name} has not started: {record.reason}")
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


def _print(batch: LogLines, *, as_json: bool) -> None:
    if as_json:
        print_json_line(batch.model_dump())
        return
    for line in batch.lines:
        say_plain(f"{batch.actor} | {readable(line)}")
