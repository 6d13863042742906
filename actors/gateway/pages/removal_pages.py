"""The page that asks before runs are archived or deleted, and tells what that frees."""

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ....broker.disk.run_folder import Folder
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.wire.errors import MessageError, StorageError, TinkermqError
from ..operations import BODIES, act
from ..scheduler import Scheduler
from ..web import visitor_of
from .render import render

MAX_RUNS = 200
_COUNTING_S = 2.0
"""How long files are counted; what was not reached by then is not told."""
_HOW = ("archive", "delete")


async def ask(request: Request) -> Response:
    """Show what would be archived or deleted, and what that frees."""
    return await _page(request, await _records(request), {})


async def remove(request: Request) -> Response:
    """Archive or delete the runs; what could not be is told with its reason."""
    visitor, how = await visitor_of(request), _how(request)
    scheduler, problems = Scheduler(visitor), dict[str, TinkermqError]()
    for record in (records := await _records(request)):
        try:
            await act(scheduler, record.job, how, BODIES[how]())
        except TinkermqError as error:
            problems[record.job] = error
    if not problems:
        return RedirectResponse("/jobs", status_code=303)
    left = [record for record in records if record.job in problems]
    return await _page(request, left, problems, done=len(records) - len(left))


async def _page(
    request: Request,
    records: list[JobRecord],
    problems: dict[str, TinkermqError],
    *,
    done: int = 0,
) -> Response:
    until = time.monotonic() + _COUNTING_S
    shown: dict[str, Any] = {
        "user": (await visitor_of(request)).user,
        "how": _how(request),
        "rows": await asyncio.to_thread(lambda: [_row(one, until) for one in records]),
        "problems": problems,
        "done": done,
        "query": request.url.query,
    }
    return render(request, "remove.html", shown, 400 if problems else 200)


def _how(request: Request) -> str:
    how = request.query_params.get("how", "")
    if how not in _HOW:
        raise MessageError(f"runs are archived or deleted, not {how[:20]!r}", hint="how=delete")
    return how


async def _records(request: Request) -> list[JobRecord]:
    jobs = list(dict.fromkeys(request.query_params.getlist("run")))
    if not jobs or len(jobs) > MAX_RUNS:
        raise MessageError(
            f"{len(jobs) or 'no'} runs were chosen; choose from 1 to {MAX_RUNS}",
            hint="tick them in the table of jobs",
        )
    scheduler = Scheduler(await visitor_of(request))
    return [await scheduler.get(one) for one in jobs]


def _row(record: JobRecord, until: float) -> dict[str, Any]:
    return {
        "record": record,
        "ended": record.state in FINAL_STATES,
        "streams": record.stored_bytes if record.archived is None else 0,
        "folder": folder_bytes(record.run_dir, until) if record.run_dir else None,
    }


def folder_bytes(place: str, until: float) -> int | None:
    """Return what the files below a folder hold; None where it is not here, or takes too long."""
    total = 0
    try:
        with Folder(place) as folder:
            for entry in folder.files():
                if time.monotonic() > until:
                    return None
                total += entry.num_bytes
    except (OSError, StorageError):
        return None
    return total
