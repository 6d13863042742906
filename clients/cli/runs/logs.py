"""`tinkermq logs`: what the actors of a run wrote."""

from contextlib import aclosing
from typing import Annotated

from cyclopts import Parameter

from ....schemas.job import FINAL_STATES
from ....schemas.metric import LogLines, readable
from ...pool import Pool
from ...runs.log_lines import check_actor, log_lines
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
        check_actor(record, actor)
        num_batches = 0
        async with aclosing(log_lines(pool, record, follow_on=follow)) as batches:
            async for batch in batches:
                num_batches += 1
                if actor in (None, batch.actor) and attempt in (None, batch.attempt):
                    _print(batch, as_json=common.json)
        if not num_batches and record.state not in FINAL_STATES:
            note(f"{record.name} has written nothing yet: {record.reason}")
        return 0

    return with_pool(common.nats_url, work)


def _print(batch: LogLines, *, as_json: bool) -> None:
    if as_json:
        print_json_line(batch.model_dump())
        return
    for line in batch.lines:
        say_plain(f"{batch.actor} | {readable(line)}")
