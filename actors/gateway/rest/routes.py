"""The operations of the REST interface: the table that the routes and `openapi` are made from."""

import difflib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....schemas.wire.errors import MessageError
from .. import users
from ..data.live import job_stream
from ..data.records import FIGURES, GROUPS, SORTS
from ..operations import BODIES, SubmitBody
from ..tinker import sessions
from . import api

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
    Operation("GET", "/api/v1/whoami", api.who_am_i, "The user whose key was sent"),
    Operation(
        "GET",
        _JOBS,
        api.list_jobs,
        "Jobs, newest first",
        (
            ("state", "string", f"a state, or one of {', '.join(GROUPS)}, archived"),
            ("search", "string", "words that name, id, game, model or reason must contain"),
            ("offset", "integer", "leave out so many"),
            _LIMIT,
            ("sort", "string", f"{', '.join((*SORTS, *FIGURES))}; -reward: greatest first"),
        ),
    ),
    Operation("POST", _JOBS, api.submit_job, "Submit a job", body=SubmitBody),
    Operation("POST", "/api/v1/check", api.check_config, "Check a configuration", body=SubmitBody),
    Operation("DELETE", _JOB, api.act_on_job, "The same as `delete`", body=BODIES["delete"]),
    Operation("GET", _JOB, api.get_job, "One job with its newest figures"),
    *(
        Operation("POST", f"{_JOB}/{name}", api.act_on_job, text, body=BODIES[name])
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
    Operation("GET", f"{_JOB}/config", api.get_config, "Configuration, as given and effective"),
    Operation(
        "GET", f"{_JOB}/metrics", api.get_metrics, "Curves, at most 1,000 points each", _METRICS
    ),
    Operation(
        "GET",
        f"{_JOB}/metrics/exact",
        api.get_exact_metrics,
        "What each step told, a line of JSON for each",
        _METRICS,
        reply="application/jsonl",
    ),
    Operation("GET", f"{_JOB}/events", api.get_events, "Last events, newest first", (_LIMIT,)),
    Operation(
        "GET",
        f"{_JOB}/logs",
        api.get_logs,
        "Last lines of the actors",
        (("actor", "string", "only this actor's"), _LIMIT),
    ),
    Operation("GET", f"{_JOB}/actors", api.get_actors, "Actors, and what each waits for"),
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
        api.get_rollouts,
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
        api.get_episode,
        "One episode: messages, rewards, tokens",
    ),
    Operation("GET", f"{_JOB}/checkpoints", api.get_checkpoints, "Checkpoints, newest first"),
    Operation(
        "GET",
        f"{_JOB}/checkpoints/{{step:int}}",
        api.get_checkpoint,
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
    Operation("GET", "/api/v1/nodes", api.list_nodes, "Nodes of the pool"),
    Operation("GET", "/api/v1/queue", api.list_queue, "Jobs that wait, and why"),
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
