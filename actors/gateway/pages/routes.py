"""The pages of the dashboard: whole on the server, so that they work without scripts."""

import asyncio
import contextlib
import hashlib
import json
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ....broker.calls.scheduler import new_request_id
from ....broker.client.connection import Broker
from ....broker.presence import list_presences
from ....schemas.job import JobRecord
from ....schemas.wire.errors import MessageError, TinkermqError
from ..data.records import ARCHIVED, GROUPS, row, select_rows
from ..operations import (
    BODIES,
    SubmitBody,
    act,
    body_of,
    checked_config,
    submit,
    to_yaml,
)
from ..queries import (
    query_of,
    queue_of,
)
from ..rest.openapi import description
from ..scheduler import Scheduler
from ..sessions import COOKIE, SESSION_S, LogInError
from ..tinker.sessions import curves_of, services_of
from ..web import form_of, gateway_of, number_in, visitor_of
from . import job_pages, model_pages, removal_pages
from .render import VERSION, render


async def home(_: Request) -> Response:
    """Lead to the jobs."""
    return RedirectResponse("/jobs", status_code=303)


async def log_in_page(request: Request) -> Response:
    """Ask for a key."""
    if not gateway_of(request).sessions.with_keys:
        return RedirectResponse("/jobs", status_code=303)
    return render(request, "login.html", {"error": None})


async def log_in(request: Request) -> Response:
    """Begin a session and lead to where the visitor wanted to go."""
    gateway = gateway_of(request)
    if not gateway.sessions.with_keys:
        return RedirectResponse("/jobs", status_code=303)
    try:
        session = await gateway.sessions.log_in((await form_of(request)).get("key", "").strip())
    except LogInError as error:
        return render(request, "login.html", {"error": error}, status=401)
    reply = RedirectResponse(_next(request), status_code=303)
    reply.set_cookie(
        COOKIE,
        session,
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        secure=gateway.secure,
    )
    return reply


def _next(request: Request) -> str:
    """Return the page asked for before the log-in; only one of ours."""
    place = request.query_params.get("next", "/jobs")
    inside = place.startswith("/") and not place.startswith(("//", "/\\"))
    return place if inside and place.isprintable() else "/jobs"


async def log_out(request: Request) -> Response:
    """End the session."""
    await gateway_of(request).sessions.log_out(request.cookies.get(COOKIE, ""))
    reply = RedirectResponse("/login", status_code=303)
    reply.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return reply


async def jobs(request: Request) -> Response:
    """Show the table of jobs; `?part=rows` only what changes."""
    visitor, query = await visitor_of(request), replace(query_of(request), folded=True)
    records = await Scheduler(visitor).list_jobs(archived=query.state == ARCHIVED)
    page, rows = await select_rows(gateway_of(request).figures, visitor.broker, records, query)

    def link(**changes: Any) -> str:
        return "/jobs?" + urlencode(_query({**vars(query), **changes}))

    shown: dict[str, Any] = {
        "user": visitor.user,
        "rows": rows,
        "page": page,
        "query": query,
        "groups": ["all", *GROUPS],
        "several_users": len({one["user"] for one in rows}) > 1,
        "link": link,
    }
    part = request.query_params.get("part") == "rows"
    return render(request, "jobs_table.html" if part else "jobs.html", shown)


def _query(fields: dict[str, Any]) -> dict[str, Any]:
    plain = {"state": "", "search": "", "offset": 0, "limit": 50, "sort": "", "folded": True}
    return {name: value for name, value in fields.items() if value != plain.get(name)}


async def submit_page(request: Request) -> Response:
    """Show the form of a new job; `?like=JOB` fills it, `&at=STEP` forks from a checkpoint."""
    visitor = await visitor_of(request)
    text, fork_of, like = "", "", request.query_params.get("like", "")
    if like:
        record = await Scheduler(visitor).get(like)
        text = to_yaml({key: value for key, value in record.config.items() if key != "name"})
        at = number_in(request, "at")
        fork_of = "" if at is None else f"{record.job}@{at}"
    shown = {"config": text, "overrides": "", "fork_of": fork_of, "priority": "0"}
    more = {"user": visitor.user, "error": None, "checked": None, "request_id": new_request_id()}
    return render(request, "submit.html", {**shown, **more})


async def submit_form(request: Request) -> Response:
    """Check or submit what stands in the form; an error is shown above it."""
    visitor, form = await visitor_of(request), await form_of(request)
    shown: dict[str, Any] = {
        "user": visitor.user,
        "config": form.get("config", ""),
        "overrides": form.get("overrides", ""),
        "fork_of": form.get("fork_of", ""),
        "priority": form.get("priority", "0"),
        "request_id": form.get("request_id", ""),
        "error": None,
        "checked": None,
    }
    try:
        body = SubmitBody(
            config=shown["config"],
            overrides=shown["overrides"].splitlines(),
            fork_of=shown["fork_of"].strip() or None,
            priority=int(shown["priority"] or 0),
            request_id=_request_id(shown),
        )
        if form.get("do") == "check":
            _, full = await checked_config(visitor.share, body)
            shown["checked"] = to_yaml(full)
            return render(request, "submit.html", shown)
        record = await submit(Scheduler(visitor), body)
    except (TinkermqError, ValueError) as error:
        shown["error"] = error if isinstance(error, TinkermqError) else MessageError(str(error))
        return render(request, "submit.html", shown, status=400)
    return RedirectResponse(f"/jobs/{quote(record.job)}", status_code=303)


def _request_id(form: dict[str, Any]) -> str | None:
    """Return the id of a submission: a form sent twice is one job, a changed one another."""
    if not form["request_id"]:
        return None
    names = ("request_id", "config", "overrides", "fork_of", "priority")
    return hashlib.sha256(json.dumps([form[name] for name in names]).encode()).hexdigest()


async def act_form(request: Request) -> Response:
    """Do what a button says, and show the job's page; an admin who did it to another the pool's."""
    visitor, form = await visitor_of(request), await form_of(request)
    job, action = request.path_params["job"], request.path_params["action"]
    if action not in BODIES:
        raise MessageError(f"{action!r} cannot be done to a job")
    record = await act(Scheduler(visitor), job, action, body_of(BODIES[action], form))
    own = "/jobs" if action == "delete" else f"/jobs/{quote(record.job)}"
    place = own if record.user == visitor.user else "/pool"
    return RedirectResponse(place, status_code=303)


async def pool(request: Request) -> Response:
    """Show nodes, slots, what runs where, and who waits for what; `?part=rows` only that."""
    visitor = await visitor_of(request)
    scheduler = Scheduler(visitor)
    nodes, records = await asyncio.gather(scheduler.nodes(), scheduler.told_jobs(widest=True))
    services = await _services(visitor.broker)
    shown = {
        "user": visitor.user,
        "nodes": nodes,
        "names": _names(records),
        "queue": [row(record, {}) for record in queue_of(records)],
        "services": services,
        "slots": sum(node.slots for node in nodes),
        "used": sum(actor.slots for node in nodes for actor in node.actors),
    }
    part = request.query_params.get("part") == "rows"
    return render(request, "pool_tables.html" if part else "pool.html", shown)


async def _services(broker: Broker) -> list[Any]:
    try:
        return [entry.value for entry in await list_presences(broker, "pool")]
    except TinkermqError:
        return []


def _names(records: list[JobRecord]) -> dict[str, str]:
    return {record.job: record.name for record in records}


async def tinker(request: Request) -> Response:
    """Show one's models under the Tinker API; `?part=rows` only what changes."""
    visitor = await visitor_of(request)
    shown = {"user": visitor.user, "services": await services_of(request, visitor)}
    part = request.query_params.get("part") == "rows"
    return render(request, "tinker_tables.html" if part else "tinker.html", shown)


async def tinker_model(request: Request) -> Response:
    """Show the curves of one of these models."""
    visitor = await visitor_of(request)
    found = await curves_of(request, visitor)
    job, model = request.path_params["job"], found.shown.info.model
    url = f"/api/v1/tinker/{quote(job)}/{quote(model)}/metrics"
    runs = [{"job": job, "name": model, "url": url, "whole": True}]
    return render(
        request, "tinker_model.html", {"user": visitor.user, "model": found.shown, "runs": runs}
    )


async def api_page(request: Request) -> Response:
    """Show the operations of the REST interface."""
    gateway = gateway_of(request)
    user = ""
    with contextlib.suppress(LogInError):
        user = (await visitor_of(request)).user
    shown = {"user": user, "spec": description(VERSION), "with_keys": gateway.sessions.with_keys}
    return render(request, "api.html", shown)


def error_page(request: Request, error: TinkermqError, status: int) -> HTMLResponse:
    """Show an error with its hint."""
    return render(request, "error.html", {"user": "", "error": error, "status": status}, status)


def routes() -> list[Route]:
    """Return the routes of the pages."""
    get: list[tuple[str, Any]] = [
        ("/", home),
        ("/login", log_in_page),
        ("/jobs", jobs),
        ("/compare", job_pages.compare),
        ("/submit", submit_page),
        ("/pool", pool),
        ("/tinker", tinker),
        ("/tinker/models/{job}/{model}", tinker_model),
        ("/api", api_page),
        ("/jobs/{job}", job_pages.job),
        ("/jobs/{job}/rollouts", job_pages.job_rollouts),
        ("/jobs/{job}/rollouts/{seq:int}/{episode:int}", job_pages.job_episode),
        ("/jobs/{job}/logs", job_pages.job_logs),
        ("/jobs/{job}/events", job_pages.job_events),
        ("/jobs/{job}/config", job_pages.job_config),
        ("/jobs/{job}/checkpoints", model_pages.job_checkpoints),
        ("/playground", model_pages.playground),
        ("/remove", removal_pages.ask),
    ]
    post: list[tuple[str, Any]] = [
        ("/login", log_in),
        ("/logout", log_out),
        ("/submit", submit_form),
        ("/remove", removal_pages.remove),
        ("/jobs/{job}/checkpoints/{step:int}/serve", model_pages.serve),
        ("/jobs/{job}/checkpoints/{step:int}/evaluate", model_pages.evaluate),
        ("/jobs/{job}/{action}", act_form),
    ]
    return [
        *(Route(path, handler) for path, handler in get),
        *(Route(path, handler, methods=["POST"]) for path, handler in post),
    ]
