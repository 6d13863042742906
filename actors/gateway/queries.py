"""What a request asks for, as pages and the REST interface read it alike."""

from typing import Any

from starlette.requests import Request

from ...schemas.job import JobRecord
from ...schemas.wire.errors import MessageError
from ..storage.checkpoint_folders import checkpoint_folders
from .data import rollouts
from .data.episodes import show_episode, show_tokens
from .data.jobs import PAGE, Query
from .data.token_text import TokenTexts, token_texts
from .operations import Scheduler
from .sessions import Visitor
from .web import flag_in, number_in, real_in, visitor_of

MAX_LIMIT = 1000


async def job_of(request: Request) -> tuple[Visitor, JobRecord]:
    """Return who asks, and the job in the path; raises LogInError, NotFoundError."""
    visitor = await visitor_of(request)
    return visitor, await Scheduler(visitor).get(request.path_params["job"])


def query_of(request: Request) -> Query:
    """Return what a request wants to see of the jobs."""
    limit = number_in(request, "limit", PAGE, least=1) or PAGE
    return Query(
        state=request.query_params.get("state", "")[:32],
        search=request.query_params.get("search", "")[:200],
        offset=number_in(request, "offset", 0) or 0,
        limit=min(limit, MAX_LIMIT),
        sort=request.query_params.get("sort", ""),
    )


def actor_in(request: Request) -> str:
    """Return the actor named in the query; raises MessageError for what cannot be one."""
    actor = request.query_params.get("actor", "")
    if actor and not all(char.isalnum() or char in "-_" for char in actor):
        raise MessageError(f"actor={actor!r} is no name of an actor")
    return actor[:64]


async def page_of_rollouts(
    request: Request, visitor: Visitor, record: JobRecord
) -> rollouts.GroupPage:
    """Return the page of the rollout log that a request names."""
    return await rollouts.read_page(
        visitor.broker,
        record,
        before=number_in(request, "before", least=1),
        step=number_in(request, "step", least=1),
        sort=request.query_params.get("sort", "log"),
        wanted=rollouts.Wanted(
            text=request.query_params.get("q", "")[:200],
            reward_from=real_in(request, "reward_from"),
            reward_to=real_in(request, "reward_to"),
            version=number_in(request, "version"),
            tokens_from=number_in(request, "tokens_from"),
            sample=number_in(request, "sample"),
            errors=flag_in(request, "errors"),
        ),
    )


async def read_episode(
    visitor: Visitor, record: JobRecord, seq: int, number: int
) -> dict[str, Any]:
    """Return an episode of an entry of the log, with its tokens."""
    group, step = await rollouts.read_group(visitor.broker, record, seq)
    algorithm: dict[str, Any] = record.config.get("algorithm") or {}
    estimator = algorithm.get("advantage", "grpo")

    def show() -> dict[str, Any]:  # thousands of tokens, and images
        shown = show_episode(group, number, estimator=estimator, step=step)
        return {"seq": seq, **shown, **show_tokens(group.trajectories[number], _texts_of(record))}

    shown = await visitor.share.in_thread(show)
    beside = await rollouts.around(visitor.broker, record, seq, number, len(group.trajectories))
    return {**shown, **beside}


def episode_in(request: Request) -> tuple[int, int]:
    """Return entry and episode that a path names."""
    return int(request.path_params["seq"]), int(request.path_params["episode"])


def beside_in(request: Request) -> tuple[int, int] | None:
    """Return the episode to be shown beside another, `SEQ/EPISODE`; None without one.

    Raises MessageError for anything else.
    """
    text = request.query_params.get("beside", "")
    if not text:
        return None
    seq, _, number = text.partition("/")
    if not all(part.isascii() and part.isdigit() and len(part) < 16 for part in (seq, number)):
        raise MessageError(f"beside={text[:40]!r} names no episode", hint="write SEQ/EPISODE")
    return int(seq), int(number)


def _texts_of(record: JobRecord) -> TokenTexts:
    folders = checkpoint_folders(record.run_dir)
    model: dict[str, Any] = record.config.get("model") or {}
    latest = folders[max(folders)] if folders else None
    return token_texts(str(model.get("path", "")), latest)


def queue_of(records: list[JobRecord]) -> list[JobRecord]:
    """Return the jobs that wait, by their place in the queue; those without one yet come last."""
    waiting = [record for record in records if record.state == "QUEUED"]
    return sorted(waiting, key=lambda one: (one.place == 0, one.place))
