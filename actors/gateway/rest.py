"""The REST interface: the table of operations, their handlers, and their OpenAPI description."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...broker.calls import all_users, ask_users
from ...broker.feed import read_failed
from ...schemas.job import JobRecord
from ...schemas.profile import spans_of, trace_file
from ...schemas.user import (
    AddUser,
    AuditList,
    AuditRequest,
    NameUser,
    NewKey,
    RotateKey,
    SetQuota,
    UserList,
    UserReply,
)
from ...schemas.wire.errors import MessageError, NotFoundError, StateError, did_you_mean
from ...schemas.wire.message import Empty, Message
from ..storage.stores import Stores
from . import operations
from .data import jobs, rollouts
from .data.jobs import ARCHIVED, FIGURES, SORTS, STATES, row, select_rows
from .data.metrics import exact_lines
from .data.overview import actors_of, job_stream, summarize_run
from .data.timeline import MAX_STEPS, traces_of
from .pages.render import render
from .sessions import Visitor
from .tinker import rest
from .web import (
    Json,
    form_of,
    gateway_of,
    json_of,
    names_in,
    number_in,
    scheduler_of,
    visitor_of,
)

# -- users: administration, and one's own account --------------------------------------------------

_AUDIT_SHOWN = 500


REQUESTS: dict[str, tuple[type[Message], type[Message]]] = {
    "add": (AddUser, NewKey),
    "rotate": (RotateKey, NewKey),
    "revoke": (NameUser, UserReply),
    "quota": (SetQuota, UserReply),
}
"""Operations by name, with the types of request and answer."""


async def change(visitor: Visitor, action: str, fields: dict[str, Any]) -> Message:
    """Perform one of `REQUESTS`; raises MessageError for a malformed request."""
    if action not in REQUESTS:
        known = ", ".join(REQUESTS)
        raise NotFoundError(f"{action!r} is not an operation on users", hint=f"there are {known}")
    request, reply = REQUESTS[action]
    return await ask_users(visitor.broker, action, operations.body_of(request, fields), reply)


async def _visitor(request: Request) -> Visitor:
    """Return the visitor; raises StateError in a pool without users."""
    if not gateway_of(request).sessions.with_keys:
        raise StateError(
            "this pool has no users: its broker requires no keys",
            hint="set up users with `tinkermq init`",
        )
    return await visitor_of(request)


async def page(request: Request) -> Response:
    """Show the visitor's own record; to an admin all users and the last audit entries."""
    return await _page(request, await _visitor(request), None)


async def _page(request: Request, visitor: Visitor, made: NewKey | None) -> Response:
    me = (await ask_users(visitor.broker, "me", Empty(), UserReply)).user
    shown: dict[str, Any] = {"user": visitor.user, "me": me, "made": made}
    shown |= {"users": [], "audit": []}
    if me.role == "admin":
        shown["users"] = await all_users(visitor.broker)
        audit = AuditRequest(limit=_AUDIT_SHOWN)
        records = (await ask_users(visitor.broker, "audit", audit, AuditList)).records
        looks = ("users.list", "users.audit")  # they only record a look at this list
        shown["audit"] = [
            item for item in records if item.what not in looks or item.outcome != "done"
        ]
    return render(request, "users.html", shown)


async def form(request: Request) -> Response:
    """Perform the operation of a form; a new key is shown once, on the next page."""
    visitor, fields = await _visitor(request), await form_of(request)
    filled: dict[str, Any] = {name: value for name, value in fields.items() if value != ""}
    reply = await change(visitor, request.path_params["action"], filled)
    made = reply if isinstance(reply, NewKey) else None
    if made is not None and made.user == visitor.user:
        return render(request, "users.html", {"user": visitor.user, "me": None, "made": made})
    return await _page(request, visitor, made)


async def list_users(request: Request) -> Response:
    """Answer with all users."""
    visitor = await _visitor(request)
    return Json(UserList(users=await all_users(visitor.broker)))


async def change_user(request: Request) -> Response:
    """Perform the operation in the path; answers with the user, or the new key."""
    visitor, action = await _visitor(request), request.url.path.rpartition("/")[2]
    return Json(await change(visitor, action, await json_of(request)))


async def read_audit(request: Request) -> Response:
    """Answer with the last audit entries."""
    visitor, limit = await _visitor(request), number_in(request, "limit", 200, least=1) or 200
    request_body = AuditRequest(limit=min(limit, 2000))
    return Json(await ask_users(visitor.broker, "audit", request_body, AuditList))


def user_routes() -> list[Route]:
    """Return the routes of the page."""
    return [Route("/users", page), Route("/users/{action}", form, methods=["POST"])]


# -- jobs, rollouts, checkpoints and nodes as JSON -------------------------------------------------


async def list_jobs(request: Request) -> Response:
    """Answer with a page of the table of jobs."""
    visitor = await visitor_of(request)
    query = rollouts.query_of(request)
    records = await operations.Scheduler(visitor).list_jobs(archived=query.state == ARCHIVED)
    page, rows = await select_rows(gateway_of(request).figures, visitor.broker, records, query)
    return Json({"jobs": rows, "total": page.total, "counts": page.counts})


async def submit_job(request: Request) -> Response:
    """Submit a job; answers with its record."""
    scheduler = await scheduler_of(request)
    record = await operations.submit(
        scheduler, operations.body_of(operations.SubmitBody, await json_of(request))
    )
    return Json(_record(record), status_code=201)


async def check_config(request: Request) -> Response:
    """Check a configuration without submitting it; answers with the effective one."""
    visitor = await visitor_of(request)
    _, full = await operations.checked_config(
        visitor.share, operations.body_of(operations.SubmitBody, await json_of(request))
    )
    return Json({"config": full})


async def get_job(request: Request) -> Response:
    """Answer with a job's record, its newest figures and its actors."""
    visitor, record = await rollouts.job_of(request)
    seen = await summarize_run(gateway_of(request), visitor, record)
    limit = {name: seen[name] for name in ("bottleneck", "change")}
    return Json({**_record(record), **seen["job"], **limit})


async def act_on_job(request: Request) -> Response:
    """Perform the operation in the path on a job; answers with its record."""
    scheduler = await scheduler_of(request)
    action = "delete" if request.method == "DELETE" else request.url.path.rpartition("/")[2]
    body = operations.body_of(operations.BODIES[action], await json_of(request))
    return Json(_record(await operations.act(scheduler, request.path_params["job"], action, body)))


async def get_config(request: Request) -> Response:
    """Answer with a job's configuration, as given and with its defaults."""
    _, record = await rollouts.job_of(request)
    config = record.config
    return Json({"config": config, "effective": operations.effective(config)})


async def get_metrics(request: Request) -> Response:
    """Answer with the down-sampled curves of a job: some by name, or all."""
    visitor, record = await rollouts.job_of(request)
    histories, curves = gateway_of(request).histories, _curves_in(request)
    return Json(await histories.points(visitor.broker, record.scope, **curves))


async def get_exact_metrics(request: Request) -> Response:
    """Answer with the metrics of each step, one line of JSON each; see `history.exact_lines`."""
    visitor, record = await rollouts.job_of(request)
    lines = exact_lines(visitor.broker, record.scope, **_curves_in(request))
    return StreamingResponse(lines, media_type="application/jsonl")


def _curves_in(request: Request) -> dict[str, Any]:
    """Return the metrics and the steps that a query names."""
    first, last = number_in(request, "from", 0) or 0, number_in(request, "to")
    return {"names": names_in(request), "first": first, "last": last}


async def get_events(request: Request) -> Response:
    """Answer with a job's last events, newest first."""
    visitor, record = await rollouts.job_of(request)
    limit = _limit(request, 200)
    events = await jobs.tail_of_events(visitor.broker, record, limit=limit, quiet=False)
    return Json({"events": events})


async def get_logs(request: Request) -> Response:
    """Answer with the last lines that a job's actors wrote."""
    visitor, record = await rollouts.job_of(request)
    lines = await jobs.tail_of_log(
        visitor.broker, record.scope, actor=rollouts.actor_in(request), limit=_limit(request, 500)
    )
    return Json({"lines": lines})


async def get_actors(request: Request) -> Response:
    """Answer with a job's actors, their states and their waits."""
    visitor, record = await rollouts.job_of(request)
    return Json({"actors": await actors_of(visitor, record)})


async def get_rollouts(request: Request) -> Response:
    """Answer with a page of a job's groups."""
    visitor, record = await rollouts.job_of(request)
    page = await rollouts.page_of_rollouts(request, visitor, record)
    return Json({"groups": page.groups, "older": page.older, "entries": page.num_entries})


async def get_episode(request: Request) -> Response:
    """Answer with one episode: messages, turns, tokens."""
    visitor, record = await rollouts.job_of(request)
    return Json(await rollouts.read_episode(visitor, record, *rollouts.episode_in(request)))


async def get_timeline(request: Request) -> Response:
    """Answer with the spans of some steps as a trace file, for Perfetto."""
    visitor, record = await rollouts.job_of(request)
    first, last = number_in(request, "from", least=1), number_in(request, "to", least=1)
    if first is not None and last is None:
        last = first + MAX_STEPS - 1
    num = MAX_STEPS if last is None else last - (first or 1) + 1
    traces = await traces_of(visitor.broker, record.scope, num, last)
    return Json(trace_file(span for trace in traces for span in spans_of(trace)))


async def get_failed(request: Request) -> Response:
    """Answer with the tasks that failed for good and about which nothing was decided."""
    visitor, record = await rollouts.job_of(request)
    return Json({"failed": await read_failed(visitor.broker, record.scope)})


async def get_checkpoints(request: Request) -> Response:
    """Answer with a job's checkpoints."""
    visitor, record = await rollouts.job_of(request)
    return Json({"checkpoints": await jobs.scored_checkpoints(visitor.broker, record)})


async def get_checkpoint(request: Request) -> Response:
    """Answer with a checkpoint as a tar archive."""
    visitor, record = await rollouts.job_of(request)
    step, stores = int(request.path_params["step"]), Stores(visitor.broker)
    await asyncio.to_thread(jobs.check_here, record, step, stores)
    name = f"{record.name}-step_{step:06d}"
    safe = "".join(char for char in name if char.isalnum() or char in "-_") or "checkpoint"
    return StreamingResponse(
        jobs.pack(record.run_dir, step, safe),
        media_type="application/x-tar",
        headers={"content-disposition": f'attachment; filename="{safe}.tar"'},
    )


async def list_nodes(request: Request) -> Response:
    """Answer with the nodes of the pool."""
    return Json({"nodes": await (await scheduler_of(request)).nodes()})


async def list_queue(request: Request) -> Response:
    """Answer with the queued jobs and their reasons; for admins those of all users."""
    records = await (await scheduler_of(request)).all_jobs(widest=True)
    return Json({"queue": [row(record, {}) for record in rollouts.queue_of(records)]})


async def who_am_i(request: Request) -> Response:
    """Answer with the user whose key was sent."""
    return Json({"user": (await visitor_of(request)).user})


def _record(record: JobRecord) -> dict[str, Any]:
    return record.model_dump(exclude={"config", "fork_dir"})


def _limit(request: Request, default: int) -> int:
    return min(number_in(request, "limit", default, least=1) or default, rollouts.MAX_LIMIT)


_SHOWN = 80

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """One operation of the interface, described by `openapi`."""

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
            ("state", "string", f"one of {', '.join(STATES)}"),
            ("search", "string", "words that name, id, game, model or reason must contain"),
            ("offset", "integer", "skip so many"),
            _LIMIT,
            ("sort", "string", f"{', '.join((*SORTS, *FIGURES))}; -reward: greatest first"),
        ),
    ),
    Operation("POST", _JOBS, submit_job, "Submit a job", body=operations.SubmitBody),
    Operation(
        "POST", "/api/v1/check", check_config, "Check a configuration", body=operations.SubmitBody
    ),
    Operation("DELETE", _JOB, act_on_job, "The same as `delete`", body=operations.BODIES["delete"]),
    Operation("GET", _JOB, get_job, "One job with its newest figures"),
    *(
        Operation("POST", f"{_JOB}/{name}", act_on_job, text, body=operations.BODIES[name])
        for name, text in (
            ("stop", "Stop a job, with a checkpoint unless `now`"),
            ("checkpoint", "Write a checkpoint of a training job now"),
            ("pause", "Pause a running job"),
            ("resume", "Resume a job after a pause, or from its last checkpoint"),
            ("scale", "Change the number of generators, environment hosts or servers"),
            ("priority", "Change a job's place in the queue"),
            ("label", "Change a job's tags, group and notes"),
            ("failed", "Repeat failed tasks, or drop them from the list"),
            ("archive", "Move an ended job's stored data into its run folder"),
            ("unarchive", "Restore an archived job's stored data"),
            ("delete", "Remove an ended job with all its stored data"),
        )
    ),
    Operation("GET", f"{_JOB}/config", get_config, "Configuration, as given and effective"),
    Operation("GET", f"{_JOB}/metrics", get_metrics, "Curves, at most 1,000 points each", _METRICS),
    Operation(
        "GET",
        f"{_JOB}/metrics/exact",
        get_exact_metrics,
        "The metrics of each step, as lines of JSON",
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
    Operation("GET", f"{_JOB}/actors", get_actors, "Actors, and what they wait for"),
    Operation(
        "GET",
        f"{_JOB}/stream",
        job_stream,
        "News of the job, as server-sent events",
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
            ("step", "integer", "groups that this step trained"),
            ("sort", "string", "log or reward"),
            ("errors", "boolean", "failures only"),
            ("q", "string", "words that an episode's messages must contain"),
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
    Operation(
        "GET",
        f"{_JOB}/timeline",
        get_timeline,
        "Who computed and who waited in some steps, as a trace file for Perfetto",
        (
            ("from", "integer", "first step; none: of the newest 100"),
            ("to", "integer", "last step"),
        ),
    ),
    Operation("GET", f"{_JOB}/failed", get_failed, "Tasks that failed for good, with reasons"),
    Operation("GET", f"{_JOB}/checkpoints", get_checkpoints, "Checkpoints, newest first"),
    Operation(
        "GET",
        f"{_JOB}/checkpoints/{{step:int}}",
        get_checkpoint,
        "A checkpoint as a tar archive",
        reply="application/x-tar",
    ),
    Operation("GET", "/api/v1/tinker", rest.get_sessions, "Your models under the Tinker API"),
    Operation(
        "GET",
        "/api/v1/tinker/{job}/{model}/metrics",
        rest.get_metrics,
        "Curves of such a model, at most 256 points each",
    ),
    Operation("GET", "/api/v1/nodes", list_nodes, "Nodes of the pool"),
    Operation("GET", "/api/v1/queue", list_queue, "Queued jobs, with reasons"),
    Operation("GET", "/api/v1/users", list_users, "Users, for admins"),
    *(
        Operation("POST", f"/api/v1/users/{name}", change_user, text, body=REQUESTS[name][0])
        for name, text in (
            ("add", "Make a user; the key is shown once, for admins"),
            ("rotate", "Replace a key: your own, or any as an admin"),
            ("revoke", "Revoke a user, for admins"),
            ("quota", "Change a user's share of the pool, for admins"),
        )
    ),
    Operation("GET", "/api/v1/audit", read_audit, "The audit log", (_LIMIT,)),
)
"""Every operation, in the order in which the page lists them."""


def routes() -> list[Route]:
    """Return the routes of the interface."""
    return [Route(item.path, _checked(item), methods=[item.method]) for item in OPERATIONS]


def _checked(operation: Operation) -> Handler:
    """Return the handler of an operation; it refuses unknown query keys."""
    known = [name for name, _, _ in operation.query]

    async def answer(request: Request) -> Response:
        for name in request.query_params:
            if name not in known:
                takes = f"it takes {', '.join(known)}" if known else "it has none"
                raise MessageError(
                    f"{operation.method} {operation.path} has no query key {name[:_SHOWN]!r}",
                    hint=did_you_mean(name, known, otherwise=takes),
                )
            if len(request.query_params.getlist(name)) > 1:
                raise MessageError(
                    f"the query key {name!r} is given more than once", hint="give it once"
                )
        return await operation.handler(request)

    return answer


# -- the OpenAPI description -----------------------------------------------------------------------

_TYPED = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "hint"],
            "properties": {
                "code": {"type": "string", "description": "stable and machine-readable"},
                "message": {"type": "string", "description": "what happened, with which value"},
                "hint": {"type": "string", "description": "what to do next"},
            },
        }
    },
}


def description(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Error": _ERROR}
    for item in OPERATIONS:
        path = _TYPED.sub(r"{\1}", item.path)
        paths.setdefault(path, {})[item.method.lower()] = _operation(item, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkermq",
            "version": version,
            "description": "Jobs, their curves, rollouts and logs. Send your key as "
            "`Authorization: Bearer <key>`; a pool without keys asks for none.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if kind == "int" else "string"},
        }
        for name, kind in _TYPED.findall(operation.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": about, "schema": {"type": kind}}
        for name, kind, about in operation.query
    ]
    place = re.sub(r"[^a-z]+", "_", operation.path[7:])
    fields: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}{place}".rstrip("_"),
        "parameters": parameters,
        "responses": {
            "201" if operation.path.endswith("/jobs") and operation.method == "POST" else "200": {
                "description": operation.summary,
                "content": {operation.reply: {}},
            },
            "default": {
                "description": "an error",
                "content": {"application/json": {"schema": _ref("Error")}},
            },
        },
    }
    if operation.body is not None:
        schema = operation.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[operation.body.__name__] = schema
        fields["requestBody"] = {
            "content": {"application/json": {"schema": _ref(operation.body.__name__)}}
        }
    return fields


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
