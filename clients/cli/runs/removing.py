"""`tinkermq archive` and `tinkermq delete`."""

import sys
from typing import Annotated

from cyclopts import Parameter

from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json, say
from ..session import with_pool


def delete(
    runs: list[str],
    /,
    *,
    yes: Annotated[bool, Parameter(alias="-y")] = False,
    common: Common = COMMON,
) -> int:
    """Delete runs that have ended, with all that is stored of them; nothing of it comes back.

    Their record, streams and weights, evaluations, secrets, and their run folders with the
    checkpoints.

    Parameters
    ----------
    runs
        Names or job ids.
    yes
        Do not ask.
    """
    if not yes and sys.stdin.isatty():
        note(f"{', '.join(runs)}: records, checkpoints and all else will be gone for good")
        if input("delete? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1

    async def work(pool: Pool) -> list[str]:
        return [(await pool.delete_run(run)).name for run in runs]

    names = with_pool(common.nats_url, work)
    if common.json:
        print_json({"deleted": names})
    else:
        say(f"deleted {', '.join(names)}")
    return 0


def archive(run: str, /, *, undo: bool = False, common: Common = COMMON) -> int:
    """Put a run that has ended away: what the broker stores of it goes into its run folder.

    It can still be forked, served and evaluated from its checkpoints, and is listed by
    `tinkermq ps --archived` only.

    Parameters
    ----------
    run
        Name or job id.
    undo
        Bring it back, so that it can be looked into and resumed.
    """

    async def work(pool: Pool) -> str:
        return (await pool.archive_run(run, undo=undo)).name

    name = with_pool(common.nats_url, work)
    if common.json:
        print_json({"unarchived" if undo else "archived": name})
    else:
        say(f"{name} is {'back' if undo else 'archived'}")
    return 0
