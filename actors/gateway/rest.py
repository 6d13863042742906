"""The operations of the REST interface: the table that the routes and `openapi` are made from."""

import asyncio
import difflib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...schemas.job import JobRecord
from ...schemas.wire.errors import MessageError
from ..storage.stores import Stores
from . import users
from .data import checkpoints, jobs
from .data.jobs import ARCHIVED, FIGURES, GROUPS, SORTS, row, select_rows
from .data.live import job_stream
from .data.metrics import exact_lines
from .data.overview import actors_of, glance
from .operations import (
    BODIES,
    Scheduler,
    SubmitBody,
    act,
    body_of,
    checked_config,
    effective,
    submit,
)
from .queries import (
    MAX_LIMIT,
    actor_in,
    episode_in,
    job_of,
    page_of_rollouts,
    query_of,
    queue_of,
    read_episode,
)
from .tinker import sessions
from .web import Json, gateway_of, json_of, names_in, number_in, scheduler_of, visitor_of

# What the REST interface answers: everything that the pages show and do, as JSON.


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
    events = await jobs.tail_of_events(visitor.broker, record, limit=limit, quiet=False)
    return Json({"events": events})


async def get_logs(request: Request) -> Response:
    """Answer with the last lines that a job's actors wrote."""
    visitor, record = await job_of(request)
    lines = await jobs.tail_of_log(
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


_SHOWN = 80

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """One operation of the interface; `openapi` tells of it."""

    method: str
    path: str
    handler: Handler
    summary: str
    query: tuple[tuple[str, str, str], ...] = ()
    """Name, type and meaning of each parameter of the query."""
    body: type[BaseModel] | None = None
    reply: str = "application/json"


_LIMIT = ("limit", "integer", "at most so many")
_METRICS = (
    (
        "names",
        "string",
        "names or patterns, with commas: `critic/*,val/mean_score`; none: all",
    ),
    ("from", "integer", "first step"),
    ("to", "integer", "last step"),
)
_JOBS = "/api/v1/jobs"
_JOB = f"{_JOBS}/{{job}}"
OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/api/v1/whoami", who_am_i, "The user whose key was sent"),
    Operation(
        "GET",
        _JOBS,
        list_jobs,
        "Jobs, newest first",
        (
            ("state", "string", f"a state, or one of {', '.join(GROUPS)}, archived"),
            ("search", "string", "words that name, id, game, model or reason must contain"),
            ("offset", "integer", "leave out so many"),
            _LIMIT,
            ("sort", "string", f"{', '.join((*SORTS, *FIGURES))}; -reward: greatest first"),
        ),
    ),
    Operation("POST", _JOBS, submit_job, "Submit a job", body=SubmitBody),
    Operation("POST", "/api/v1/check", check_config, "Check a configuration", body=SubmitBody),
    Operation("DELETE", _JOB, act_on_job, "The same as `delete`", body=BODIES["delete"]),
    Operation("GET", _JOB, get_job, "One job with its newest figures"),
    *(
        Operation("POST", f"{_JOB}/{name}", act_on_job, text, body=BODIES[name])
        for name, text in (
            ("stop", "Stop a job, with a checkpoint unless `now`"),
            ("checkpoint", "Have a training job write a checkpoint now"),
            ("pause", "Let a running job stand still"),
            ("resume", "Let a job go on: after a pause, or from its last checkpoint"),
            ("scale", "Change the number of generators, environment hosts or servers"),
            ("priority", "Change a job's place in the queue"),
            ("label", "Change a job's tags, group and notes"),
            ("archive", "Put what is stored of a job that has ended into its run folder"),
            ("unarchive", "Bring back what an archived job has stored"),
            ("delete", "Remove a job that has ended, with all that is stored of it"),
        )
    ),
    Operation("GET", f"{_JOB}/config", get_config, "Configuration, as given and effective"),
    Operation("GET", f"{_JOB}/metrics", get_metrics, "Curves, at most 1,000 points each", _METRICS),
    Operation(
        "GET",
        f"{_JOB}/metrics/exact",
        get_exact_metrics,
        "What each step told, a line of JSON for each",
        _METRICS,
        reply="application/jsonl",
    ),
    Operation("GET", f"{_JOB}/events", get_events, "Last events, newest first", (_LIMIT,)),
    Operation(
        "GET",
        f"{_JOB}/logs",
        get_logs,
        "Last lines of the actors",
        (("actor", "string", "only this actor's"), _LIMIT),
    ),
    Operation("GET", f"{_JOB}/actors", get_actors, "Actors, and what each waits for"),
    Operation(
        "GET",
        f"{_JOB}/stream",
        job_stream,
        "What is new, as server-sent events",
        (("of", "string", "feed or log"), ("from", "integer", "first sequence; none: from now")),
        reply="text/event-stream",
    ),
    Operation(
        "GET",
        f"{_JOB}/rollouts",
        get_rollouts,
        "Groups of the rollout log",
        (
            ("before", "integer", "entries before this sequence"),
            ("step", "integer", "only those that this step trained"),
            ("sort", "string", "log or reward"),
            ("errors", "boolean", "only what failed"),
            ("q", "string", "words that must all stand in an episode's messages"),
            ("reward_from", "number", "episodes with at least this reward"),
            ("reward_to", "number", "episodes with at most this reward"),
            ("version", "integer", "episodes of this policy version"),
            ("tokens_from", "integer", "episodes of at least so many generated tokens"),
            ("sample", "integer", "row of the data, or seed"),
        ),
    ),
    Operation(
        "GET",
        f"{_JOB}/rollouts/{{seq:int}}/{{episode:int}}",
        get_episode,
        "One episode: messages, rewards, tokens",
    ),
    Operation("GET", f"{_JOB}/checkpoints", get_checkpoints, "Checkpoints, newest first"),
    Operation(
        "GET",
        f"{_JOB}/checkpoints/{{step:int}}",
        get_checkpoint,
        "A checkpoint as a tar archive",
        reply="application/x-tar",
    ),
    Operation("GET", "/api/v1/tinker", sessions.get_sessions, "One's models under the Tinker API"),
    Operation(
        "GET",
        "/api/v1/tinker/{job}/{model}/metrics",
        sessions.get_metrics,
        "Curves of such a model, at most 256 points each",
    ),
    Operation("GET", "/api/v1/nodes", list_nodes, "Nodes of the pool"),
    Operation("GET", "/api/v1/queue", list_queue, "Jobs that wait, and why"),
    Operation("GET", "/api/v1/users", users.list_users, "Users, for admins"),
    *(
        Operation(
            "POST", f"/api/v1/users/{name}", users.change_user, text, body=users.REQUESTS[name][0]
        )
        for name, text in (
            ("add", "Make a user; the key is told once, for admins"),
            ("rotate", "Replace a key, one's own or as an admin"),
            ("revoke", "Shut a user out for good, for admins"),
            ("quota", "Change a user's share of the pool, for admins"),
        )
    ),
    Operation("GET", "/api/v1/audit", users.read_audit, "What touched security", (_LIMIT,)),
)
"""Every operation, in the order in which the page lists them."""


def routes() -> list[Route]:
    """Return the routes of the interface."""
    return [Route(one.path, _checked(one), methods=[one.method]) for one in OPERATIONS]


def _checked(operation: Operation) -> Handler:
    """Return the handler of an operation; it refuses query keys that the operation ignores."""
    known = [name for name, _, _ in operation.query]

    async def answer(request: Request) -> Response:
        for given in request.query_params:
            if given not in known:
                raise _unknown(operation, given[:_SHOWN], known)
        return await operation.handler(request)

    return answer


def _unknown(operation: Operation, given: str, known: list[str]) -> MessageError:
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    if near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"it knows {', '.join(known)}" if known else "it takes none"
    return MessageError(
        f"{operation.method} {operation.path} has no query key {given!r}", hint=hint
    )
