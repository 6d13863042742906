"""The pages of the dashboard, rendered on the server; they work without scripts."""

import asyncio
import contextlib
import hashlib
import json
import math
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from ....broker.calls import new_request_id
from ....broker.client.connection import Broker
from ....broker.feed import read_failed
from ....broker.jetstream.streams import stream_info
from ....broker.presence import list_presences
from ....schemas.config.load_config import write_yaml
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.local.folder import Folder
from ....schemas.task import DeadLetter
from ....schemas.version import VERSION
from ....schemas.wire.errors import MessageError, NotFoundError, StorageError, TinkermqError
from ...storage.run_folders import checkpoint_folders
from .. import operations
from ..data import jobs as logs
from ..data import rollouts
from ..data.jobs import (
    ARCHIVED,
    GROUPS,
    MAX_RUNS,
    Query,
    differences,
    row,
    scored_checkpoints,
    seed_groups,
    select,
    select_rows,
)
from ..data.metrics import CHARTS
from ..data.overview import summarize_run
from ..data.timeline import LANE, WIDTH, show_timeline, traces_of
from ..rest import description
from ..sessions import COOKIE, SESSION_S, LogInError, Visitor
from ..tinker.rest import curves_of, services_of
from ..web import form_of, gateway_of, number_in, visitor_of
from .render import render

# -- one run, and several compared -----------------------------------------------------------------

_EVENTS, _ALL_EVENTS, _FAILED = 12, 500, 200
_ROLLOUT_QUERY = (
    *("step", "sort", "errors", "q", "reward_from", "reward_to", "version", "tokens_from"),
    *("sample", "beside"),
)
_NAMES = quote(",".join(line.name for chart in CHARTS for line in chart.lines), safe="")
_CHARTS = [chart._asdict() for chart in CHARTS]


async def job_page(
    request: Request, visitor: Visitor, record: JobRecord, tab: str, more: dict[str, Any]
) -> Response:
    """Show a tab of a job's page, with the common head."""
    seen = await summarize_run(gateway_of(request), visitor, record)
    runs = [_curves_of(record)]
    shown = {"user": visitor.user, "record": record, "tab": tab, "runs": runs, **seen, **more}
    return render(request, f"job_{tab}.html", shown)


async def _last_seq(broker: Broker, stream: str) -> int:
    """Return the sequence from which live updates start."""
    try:
        return int((await stream_info(broker, stream))["state"]["last_seq"])
    except NotFoundError:  # the job's streams were removed: there is nothing to follow
        return 0


async def job(request: Request) -> Response:
    """Show a job's curves, its actors and its last events."""
    return await _page_with_events(request, "curves", _EVENTS, charts=_CHARTS)


async def compare(request: Request) -> Response:
    """Show the curves of several runs in one chart, and the differences of their configurations.

    The runs are named, or found by a search: by tag, by group.
    """
    visitor = await visitor_of(request)
    search, records, num_found = await _compared(request, operations.Scheduler(visitor))
    rows = await gateway_of(request).figures.rows(visitor.broker, records)
    configs = await asyncio.to_thread(
        lambda: [operations.effective(record.config) for record in records]
    )
    jobs = [record.job for record in records]
    parameters = request.query_params.multi_items()
    other_parameters = [(key, value) for key, value in parameters if key not in ("run", "search")]
    shown: dict[str, Any] = {
        "user": visitor.user,
        "rows": rows,
        "runs": [
            {**_curves_of(record), "seeds": seeds}
            for record, seeds in zip(records, seed_groups(configs), strict=True)
        ],
        "charts": _CHARTS,
        "search": search,
        "num_found": num_found,
        "differences": differences(configs),
        "without": {
            record.job: "/compare?"
            + urlencode([*(("run", o) for o in jobs if o != record.job), *other_parameters])
            for record in records
        },
    }
    return render(request, "compare.html", shown)


async def _compared(
    request: Request, scheduler: operations.Scheduler
) -> tuple[str, list[JobRecord], int]:
    """Return the search, the runs to compare, and the number of all matching runs."""
    jobs = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(jobs) > MAX_RUNS:
        raise MessageError(f"{len(jobs)} runs were named; a page compares at most {MAX_RUNS}")
    search = "" if jobs else request.query_params.get("search", "")[:200]
    if not search:
        return "", [await scheduler.get(item) for item in jobs], len(jobs)
    reply = await scheduler.list_jobs()
    result = select(reply, Query(search=search, limit=len(reply))).records
    result = [item for item in result if item.trains]
    return search, result[:MAX_RUNS], len(result)


def _curves_of(record: JobRecord) -> dict[str, str]:
    """Return the URL of a run's curves; with `first`, of the first part."""
    url = f"/api/v1/jobs/{quote(record.job)}/metrics"
    return {"job": record.job, "name": record.name, "url": url, "first": f"{url}?names={_NAMES}"}


async def job_events(request: Request) -> Response:
    """Show a job's events."""
    return await _page_with_events(request, "events", _ALL_EVENTS)


async def _page_with_events(request: Request, tab: str, limit: int, **more: Any) -> Response:
    visitor, record = await rollouts.job_of(request)
    seq = await _last_seq(visitor.broker, record.scope.stream_feed)
    events = await logs.tail_of_events(visitor.broker, record, limit=limit)
    return await job_page(request, visitor, record, tab, {"events": events, "seq": seq, **more})


async def job_logs(request: Request) -> Response:
    """Show the last log lines of a job's actors."""
    visitor, record = await rollouts.job_of(request)
    actor = rollouts.actor_in(request)
    seq = await _last_seq(visitor.broker, record.scope.stream_log)
    lines = await logs.tail_of_log(visitor.broker, record.scope, actor=actor)
    more = {"lines": lines, "actor": actor, "seq": seq}
    return await job_page(request, visitor, record, "logs", more)


async def job_rollouts(request: Request) -> Response:
    """Show a page of a job's groups."""
    visitor, record = await rollouts.job_of(request)
    page = await rollouts.page_of_rollouts(request, visitor, record)
    parameters = {name: request.query_params.get(name, "") for name in _ROLLOUT_QUERY}
    rewards = [item["reward"] for group in page.groups for item in group["episodes"]]
    rewards = [reward for reward in rewards if math.isfinite(reward)] or [0.0]
    low, high = min(rewards), max(rewards)
    set_parameters = {name: value for name, value in parameters.items() if value}
    fields = {name: value for name, value in set_parameters.items() if name != "beside"}
    links = {"query": urlencode(set_parameters), "query_json": urlencode(fields)}
    shown = {"page": page, "asked": parameters, "low": low, "high": high, **links}
    return await job_page(request, visitor, record, "rollouts", shown)


async def job_episode(request: Request) -> Response:
    """Show one episode, step by step; `?at=` names a step."""
    visitor, record = await rollouts.job_of(request)
    at = number_in(request, "at", 1, least=1) or 1
    episode = await rollouts.read_episode(visitor, record, *rollouts.episode_in(request), at)
    named = rollouts.beside_in(request)
    beside = None if named is None else await rollouts.read_episode(visitor, record, *named, at)
    query = {"beside": f"{named[0]}/{named[1]}"} if named else {}
    shown = {"episode": episode, "beside": beside, "at": request.query_params.get("at", "")}
    shown["query"] = urlencode(query)
    return await job_page(request, visitor, record, "episode", shown)


async def job_timeline(request: Request) -> Response:
    """Show who computed and who waited for whom in a step; by default the newest."""
    visitor, record = await rollouts.job_of(request)
    step, shown, problem = number_in(request, "step", least=1), None, ""
    try:
        [trace] = await traces_of(visitor.broker, record.scope, 1, step)
        shown = show_timeline(trace)
    except NotFoundError as error:
        problem = f"{error.message}: {error.hint}"
    more = {"timeline": shown, "problem": problem, "lane": LANE, "width": WIDTH}
    return await job_page(request, visitor, record, "timeline", more)


async def job_failed(request: Request) -> Response:
    """Show the tasks that failed for good, the newest first."""
    visitor, record = await rollouts.job_of(request)
    failed, problem = list[DeadLetter](), ""
    try:
        failed = (await read_failed(visitor.broker, record.scope))[::-1]
    except NotFoundError:
        problem = "The streams of this run were removed, or do not exist yet."
    more = {"failed": failed[:_FAILED], "num_failed": len(failed), "problem": problem}
    return await job_page(request, visitor, record, "failed", more)


async def job_config(request: Request) -> Response:
    """Show a job's configuration."""
    visitor, record = await rollouts.job_of(request)
    texts = {
        "given": write_yaml(record.config),
        "effective": write_yaml(operations.effective(record.config)),
    }
    return await job_page(request, visitor, record, "config", texts)


# -- checkpoints, and chat with a served model -----------------------------------------------------


async def job_checkpoints(request: Request) -> Response:
    """Show a job's checkpoints with their validation, and the jobs that serve or evaluate them."""
    visitor, record = await rollouts.job_of(request)
    listed, helpers = await asyncio.gather(
        scored_checkpoints(visitor.broker, record), _helpers(request, visitor, record)
    )
    rows = [{**item, "helpers": helpers.get(item["step"], [])} for item in listed]
    more = {"checkpoints": rows}
    return await job_page(request, visitor, record, "checkpoints", more)


async def _helpers(
    request: Request, visitor: Visitor, record: JobRecord
) -> dict[int, list[dict[str, Any]]]:
    """Return, by step, the jobs that serve or evaluate it, with the score of an evaluation."""
    those = [
        (item, step)
        for item in await operations.Scheduler(visitor).list_jobs()
        if (step := _step_of(item, record)) is not None
    ]
    rows = await gateway_of(request).figures.rows(visitor.broker, [job for job, _ in those])
    collected: dict[int, list[dict[str, Any]]] = {}
    for row_of_job, (_, step) in zip(rows, those, strict=True):
        collected.setdefault(step, []).append(row_of_job)
    return collected


def _step_of(record: JobRecord, run: JobRecord) -> int | None:
    """Return the checkpoint that a job serves or evaluates."""
    source = record.serves if record.kind == "infer" else record.fork_of
    name, _, step = (source or "").rpartition("@")
    helps = record.kind in ("infer", "eval") and name in (run.name, run.job)
    return int(step) if helps and step.isascii() and step.isdigit() else None


async def serve(request: Request) -> Response:
    """Serve a checkpoint, and redirect to the playground."""
    visitor, record = await rollouts.job_of(request)
    job = await operations.serve_checkpoint(
        operations.Scheduler(visitor), record, int(request.path_params["step"])
    )
    where = urlencode({"model": job.serves, "job": job.job})
    return RedirectResponse(f"/playground?{where}", status_code=303)


async def evaluate(request: Request) -> Response:
    """Evaluate a checkpoint, and redirect to the evaluating job."""
    visitor, record = await rollouts.job_of(request)
    job = await operations.evaluate_checkpoint(
        operations.Scheduler(visitor), record, int(request.path_params["step"])
    )
    return RedirectResponse(f"/jobs/{quote(job.job)}", status_code=303)


async def playground(request: Request) -> Response:
    """Show the playground for a served model, which works by a script; offer checkpoints."""
    visitor = await visitor_of(request)
    parameters = {name: request.query_params.get(name, "")[:200] for name in ("model", "job")}
    offers: list[tuple[JobRecord, list[int]]] = []
    with contextlib.suppress(TinkermqError, TimeoutError):  # what is served answers all the same
        async with asyncio.timeout(_OFFERS_S):
            jobs = await operations.Scheduler(visitor).list_jobs()
        runs = [run for run in jobs if run.trains and run.run_dir][:_OFFERED_RUNS]
        offers = await asyncio.to_thread(lambda: [(run, _newest(run)) for run in runs])
    shown = {"user": visitor.user, **parameters, "offers": [offer for offer in offers if offer[1]]}
    return render(request, "playground.html", shown)


_OFFERED_RUNS, _OFFERED_STEPS, _OFFERS_S = 10, 3, 2.0


def _newest(record: JobRecord) -> list[int]:
    """Return the newest checkpoints in a run's folder."""
    return sorted(checkpoint_folders(record.run_dir), reverse=True)[:_OFFERED_STEPS]


# -- archiving and deleting ------------------------------------------------------------------------

MAX_REMOVED_RUNS = 200
_COUNTING_S = 2.0
"""Seconds for counting files; the rest is skipped."""
_HOW = ("archive", "delete")


async def ask(request: Request) -> Response:
    """Show the runs to archive or delete, and the space that this frees."""
    return await _page(request, await _records(request), {})


async def remove(request: Request) -> Response:
    """Archive or delete the runs; report failures with their reasons."""
    visitor, how = await visitor_of(request), _how(request)
    scheduler, problems = operations.Scheduler(visitor), dict[str, TinkermqError]()
    for record in (records := await _records(request)):
        try:
            await operations.act(scheduler, record.job, how, operations.BODIES[how]())
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
        "rows": await asyncio.to_thread(lambda: [_row(record, until) for record in records]),
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
    if not jobs or len(jobs) > MAX_REMOVED_RUNS:
        raise MessageError(
            f"{len(jobs) or 'no'} runs were chosen; choose from 1 to {MAX_REMOVED_RUNS}",
            hint="tick them in the table of runs",
        )
    scheduler = operations.Scheduler(await visitor_of(request))
    return [await scheduler.get(item) for item in jobs]


def _row(record: JobRecord, until: float) -> dict[str, Any]:
    return {
        "record": record,
        "ended": record.state in FINAL_STATES,
        "streams": record.stored_bytes if record.archived is None else 0,
        "folder": folder_bytes(record.run_dir, until) if record.run_dir else None,
    }


def folder_bytes(place: str, until: float) -> int | None:
    """Return the bytes of the files below a folder; None if it is absent or takes too long."""
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


async def home(_: Request) -> Response:
    """Redirect to the jobs."""
    return RedirectResponse("/jobs", status_code=303)


async def log_in_page(request: Request) -> Response:
    """Show the form for a key."""
    if not gateway_of(request).sessions.with_keys:
        return RedirectResponse("/jobs", status_code=303)
    return render(request, "login.html", {"error": None})


async def log_in(request: Request) -> Response:
    """Start a session and redirect to the page that the visitor wanted."""
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
    """Return the path requested before the log-in, if it is a path of the gateway."""
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
    """Show the table of jobs; with `?part=rows` only the rows."""
    visitor, query = await visitor_of(request), replace(rollouts.query_of(request), folded=True)
    records = await operations.Scheduler(visitor).list_jobs(archived=query.state == ARCHIVED)
    page, rows = await select_rows(gateway_of(request).figures, visitor.broker, records, query)

    def link(**changes: Any) -> str:
        return "/jobs?" + urlencode(_query({**vars(query), **changes}))

    shown: dict[str, Any] = {
        "user": visitor.user,
        "rows": rows,
        "page": page,
        "query": query,
        "groups": ["all", *GROUPS],
        "several_users": len({item["user"] for item in rows}) > 1,
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
        record = await operations.Scheduler(visitor).get(like)
        text = write_yaml({key: value for key, value in record.config.items() if key != "name"})
        at = number_in(request, "at")
        fork_of = "" if at is None else f"{record.job}@{at}"
    shown = {"config": text, "overrides": "", "fork_of": fork_of, "priority": "0"}
    more = {"user": visitor.user, "error": None, "checked": None, "request_id": new_request_id()}
    return render(request, "submit.html", {**shown, **more})


async def submit_form(request: Request) -> Response:
    """Check or submit the form; an error is shown above it."""
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
        body = operations.SubmitBody(
            config=shown["config"],
            overrides=shown["overrides"].splitlines(),
            fork_of=shown["fork_of"].strip() or None,
            priority=int(shown["priority"] or 0),
            request_id=_request_id(shown),
        )
        if form.get("do") == "check":
            _, full = await operations.checked_config(visitor.share, body)
            shown["checked"] = write_yaml(full)
            return render(request, "submit.html", shown)
        record = await operations.submit(operations.Scheduler(visitor), body)
    except (TinkermqError, ValueError) as error:
        shown["error"] = error if isinstance(error, TinkermqError) else MessageError(str(error))
        return render(request, "submit.html", shown, status=400)
    return RedirectResponse(f"/jobs/{quote(record.job)}", status_code=303)


def _request_id(form: dict[str, Any]) -> str | None:
    """Return the id of a submission: an equal form is the same job, a changed form another one."""
    if not form["request_id"]:
        return None
    names = ("request_id", "config", "overrides", "fork_of", "priority")
    return hashlib.sha256(json.dumps([form[name] for name in names]).encode()).hexdigest()


async def act_form(request: Request) -> Response:
    """Perform a button's operation, and show the page of the job or, for an admin, of the pool."""
    visitor, form = await visitor_of(request), await form_of(request)
    job, action = request.path_params["job"], request.path_params["action"]
    if action not in operations.BODIES:
        raise MessageError(f"{action!r} is not an operation on runs")
    record = await operations.act(
        operations.Scheduler(visitor),
        job,
        action,
        operations.body_of(operations.BODIES[action], form),
    )
    tab = "/failed" if action == "failed" else ""
    own = "/jobs" if action == "delete" else f"/jobs/{quote(record.job)}{tab}"
    place = own if record.user == visitor.user else "/pool"
    return RedirectResponse(place, status_code=303)


async def pool(request: Request) -> Response:
    """Show nodes, slots, running and queued jobs; with `?part=rows` only the tables."""
    visitor = await visitor_of(request)
    scheduler = operations.Scheduler(visitor)
    nodes, records = await asyncio.gather(scheduler.nodes(), scheduler.all_jobs(widest=True))
    services = await _services(visitor.broker)
    shown = {
        "user": visitor.user,
        "nodes": nodes,
        "names": {record.job: record.name for record in records},
        "queue": [row(record, {}) for record in rollouts.queue_of(records)],
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


async def tinker(request: Request) -> Response:
    """Show the visitor's models under the Tinker API; with `?part=rows` only the tables."""
    visitor = await visitor_of(request)
    shown = {"user": visitor.user, "services": await services_of(request, visitor)}
    part = request.query_params.get("part") == "rows"
    return render(request, "tinker_tables.html" if part else "tinker.html", shown)


async def tinker_model(request: Request) -> Response:
    """Show the curves of one of these models."""
    visitor = await visitor_of(request)
    reply = await curves_of(request, visitor)
    job, model = request.path_params["job"], reply.shown.info.model
    url = f"/api/v1/tinker/{quote(job)}/{quote(model)}/metrics"
    runs = [{"job": job, "name": model, "url": url, "whole": True}]
    return render(
        request, "tinker_model.html", {"user": visitor.user, "model": reply.shown, "runs": runs}
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
        ("/compare", compare),
        ("/submit", submit_page),
        ("/pool", pool),
        ("/tinker", tinker),
        ("/tinker/models/{job}/{model}", tinker_model),
        ("/api", api_page),
        ("/jobs/{job}", job),
        ("/jobs/{job}/rollouts", job_rollouts),
        ("/jobs/{job}/rollouts/{seq:int}/{episode:int}", job_episode),
        ("/jobs/{job}/timeline", job_timeline),
        ("/jobs/{job}/failed", job_failed),
        ("/jobs/{job}/logs", job_logs),
        ("/jobs/{job}/events", job_events),
        ("/jobs/{job}/config", job_config),
        ("/jobs/{job}/checkpoints", job_checkpoints),
        ("/playground", playground),
        ("/remove", ask),
    ]
    post: list[tuple[str, Any]] = [
        ("/login", log_in),
        ("/logout", log_out),
        ("/submit", submit_form),
        ("/remove", remove),
        ("/jobs/{job}/checkpoints/{step:int}/serve", serve),
        ("/jobs/{job}/checkpoints/{step:int}/evaluate", evaluate),
        ("/jobs/{job}/{action}", act_form),
    ]
    return [
        *(Route(path, handler) for path, handler in get),
        *(Route(path, handler, methods=["POST"]) for path, handler in post),
    ]
