"""What the REST interface answers: everything that the pages show and do, as JSON."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....schemas.job import JobRecord
from ...storage.opening import Stores
from ..data import checkpoints, logs
from ..data.exact_metrics import exact_lines
from ..data.overview import actors_of, glance
from ..data.records import ARCHIVED, row, select_rows
from ..operations import (
    BODIES,
    SubmitBody,
    act,
    body_of,
    checked_config,
    effective,
    submit,
)
from ..queries import (
    MAX_LIMIT,
    actor_in,
    episode_in,
    job_of,
    page_of_rollouts,
    query_of,
    queue_of,
    read_episode,
)
from ..scheduler import Scheduler
from ..web import (
    Json,
    gateway_of,
    json_of,
    names_in,
    number_in,
    scheduler_of,
    visitor_of,
)


async def list_jobs(request: Request) -> Response:
    """Answer with a page of the table of jobs."""
    visitor = await visitor_of(request)
    query = query_of(request)
    records = await Scheduler(visitor).list_jobs(archived=query.state == ARCHIVED)
    page, rows = await select_rows(gateway_of(request).figures, visitor.broker, records, query)
    return Json({"jobs": rows, "total": page.total, "counts": page.counts})


async def submit_job(request: Request) -> Response:
    """Submit a job; answers with its record."""
    scheduler = await scheduler_of(request)
    record = await submit(scheduler, body_of(SubmitBody, await json_of(request)))
    return Json(_record(record), status_code=201)


async def check_config(request: Request) -> Response:
    """Check a configuration without submitting it; answers with the effective one."""
    visitor = await visitor_of(request)
    _, full = await checked_config(visitor.share, body_of(SubmitBody, await json_of(request)))
    return Json({"config": full})


async def get_job(request: Request) -> Response:
    """Answer with a job's record, its newest figures and its actors."""
    visitor, record = await job_of(request)
    seen = await glance(gateway_of(request), visitor, record)
    return Json({**_record(record), **seen["job"], "bottleneck": seen["bottleneck"]})


async def act_on_job(request: Request) -> Response:
    """Do what the end of the path says to a job; answers with its record."""
    scheduler = await scheduler_of(request)
    action = "delete" if request.method == "DELETE" else request.url.path.rpartition("/")[2]
    body = body_of(BODIES[action], await json_of(request))
    return Json(_record(await act(scheduler, request.path_params["job"], action, body)))


async def get_config(request: Request) -> Response:
    """Answer with a job's configuration, as given and with its defaults."""
    _, record = await job_of(request)
    config = record.config
    return Json({"config": config, "effective": effective(config)})


async def get_metrics(request: Request) -> Response:
    """Answer with the curves of a job, down-sampled: some by name, or all."""
    visitor, record = await job_of(request)
    points = await gateway_of(request).histories.points(
        visitor.broker,
        record.scope,
        names_in(request),
        first=number_in(request, "from", 0) or 0,
        last=number_in(request, "to"),
    )
    return Json(points)


async def get_exact_metrics(request: Request) -> Response:
    """Answer with what each step told, a line of JSON for each; see `history.exact_lines`."""
    visitor, record = await job_of(request)
    lines = exact_lines(
        visitor.broker,
        record.scope,
        names_in(request),
        first=number_in(request, "from", 0) or 0,
        last=number_in(request, "to"),
    )
    return StreamingResponse(lines, media_type="application/jsonl")


async def get_events(request: Request) -> Response:
    """Answer with a job's last events, newest first."""
    visitor, record = await job_of(request)
    limit = _limit(request, 200)
    events = await logs.tail_of_events(visitor.broker, record, limit=limit, quiet=False)
    return Json({"events": events})


async def get_logs(request: Request) -> Response:
    """Answer with the last lines that a job's actors wrote."""
    visitor, record = await job_of(request)
    lines = await logs.tail_of_log(
        visitor.broker, record.scope, actor=actor_in(request), limit=_limit(request, 500)
    )
    return Json({"lines": lines})


async def get_actors(request: Request) -> Response:
    """Answer with a job's actors, what each does and whom it waits for."""
    visitor, record = await job_of(request)
    return Json({"actors": await actors_of(visitor, record)})


async def get_rollouts(request: Request) -> Response:
    """Answer with a page of a job's groups."""
    visitor, record = await job_of(request)
    page = await page_of_rollouts(request, visitor, record)
    return Json({"groups": page.groups, "older": page.older, "entries": page.num_entries})


async def get_episode(request: Request) -> Response:
    """Answer with one episode: messages, turns, tokens."""
    visitor, record = await job_of(request)
    return Json(await read_episode(visitor, record, *episode_in(request)))


async def get_checkpoints(request: Request) -> Response:
    """Answer with a job's checkpoints."""
    visitor, record = await job_of(request)
    return Json({"checkpoints": await checkpoints.scored_checkpoints(visitor.broker, record)})


async def get_checkpoint(request: Request) -> Response:
    """Answer with a checkpoint as a tar archive."""
    visitor, record = await job_of(request)
    step, stores = int(request.path_params["step"]), Stores(visitor.broker)
    await asyncio.to_thread(checkpoints.check_here, record, step, stores)
    name = f"{record.name}-step_{step:06d}"
    safe = "".join(char for char in name if char.isalnum() or char in "-_") or "checkpoint"
    return StreamingResponse(
        checkpoints.pack(record.run_dir, step, safe),
        media_type="application/x-tar",
        headers={"content-disposition": f'attachment; filename="{safe}.tar"'},
    )


async def list_nodes(request: Request) -> Response:
    """Answer with the nodes of the pool."""
    return Json({"nodes": await (await scheduler_of(request)).nodes()})


async def list_queue(request: Request) -> Response:
    """Answer with the jobs that wait and the reason of each, an admin's with everybody's."""
    records = await (await scheduler_of(request)).told_jobs(widest=True)
    return Json({"queue": [row(record, {}) for record in queue_of(records)]})


async def who_am_i(request: Request) -> Response:
    """Answer with the user whose key was sent."""
    return Json({"user": (await visitor_of(request)).user})


def _record(record: JobRecord) -> dict[str, Any]:
    return record.model_dump(exclude={"config", "fork_dir"})


def _limit(request: Request, default: int) -> int:
    return min(number_in(request, "limit", default, least=1) or default, MAX_LIMIT)
