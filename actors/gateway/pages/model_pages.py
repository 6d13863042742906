"""A run's checkpoints, what is done with them, and the page that talks with a served model."""

import asyncio
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ....schemas.job import JobRecord
from ..data.checkpoints import scored_checkpoints
from ..operations import evaluate_checkpoint, serve_checkpoint
from ..queries import job_of
from ..scheduler import Scheduler
from ..sessions import Visitor
from ..web import gateway_of, visitor_of
from .job_pages import job_page
from .render import render


async def job_checkpoints(request: Request) -> Response:
    """Show a job's checkpoints with their validation, and which jobs serve or evaluate each."""
    visitor, record = await job_of(request)
    found, helpers = await asyncio.gather(
        scored_checkpoints(visitor.broker, record), _helpers(request, visitor, record)
    )
    rows = [{**one, "helpers": helpers.get(one["step"], [])} for one in found]
    more = {"checkpoints": rows}
    return await job_page(request, visitor, record, "checkpoints", more)


async def _helpers(
    request: Request, visitor: Visitor, record: JobRecord
) -> dict[int, list[dict[str, Any]]]:
    """Return, by step, the jobs that serve or evaluate it, with the score of an evaluation."""
    those = [
        (one, step)
        for one in await Scheduler(visitor).list_jobs()
        if (step := _step_of(one, record)) is not None
    ]
    rows = await gateway_of(request).figures.rows(visitor.broker, [one for one, _ in those])
    found: dict[int, list[dict[str, Any]]] = {}
    for row, (_, step) in zip(rows, those, strict=True):
        found.setdefault(step, []).append(row)
    return found


def _step_of(record: JobRecord, run: JobRecord) -> int | None:
    """Return which checkpoint of a run a job serves or evaluates."""
    source = record.serves if record.kind == "infer" else record.fork_of
    name, _, step = (source or "").rpartition("@")
    helps = record.kind in ("infer", "eval") and name in (run.name, run.job)
    return int(step) if helps and step.isascii() and step.isdigit() else None


async def serve(request: Request) -> Response:
    """Have a checkpoint served, and lead to where one talks with it."""
    visitor, record = await job_of(request)
    job = await serve_checkpoint(Scheduler(visitor), record, int(request.path_params["step"]))
    where = urlencode({"model": job.serves, "job": job.job})
    return RedirectResponse(f"/playground?{where}", status_code=303)


async def evaluate(request: Request) -> Response:
    """Have a checkpoint evaluated, and lead to the job that does it."""
    visitor, record = await job_of(request)
    job = await evaluate_checkpoint(Scheduler(visitor), record, int(request.path_params["step"]))
    return RedirectResponse(f"/jobs/{quote(job.job)}", status_code=303)


async def playground(request: Request) -> Response:
    """Show the page that talks with a served model; its script does the rest."""
    visitor = await visitor_of(request)
    asked = {name: request.query_params.get(name, "")[:200] for name in ("model", "job")}
    return render(request, "playground.html", {"user": visitor.user, **asked})
