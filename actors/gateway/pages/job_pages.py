"""The pages of one run, and of several laid over each other."""

import asyncio
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from ....broker.client.connection import Broker
from ....broker.jetstream.streams import stream_info
from ....schemas.job import JobRecord
from ....schemas.wire.errors import MessageError, NotFoundError
from ..data import logs
from ..data.charts import CHARTS
from ..data.comparison import MAX_RUNS, differences
from ..data.overview import glance
from ..data.records import Query, select
from ..operations import (
    effective,
    to_yaml,
)
from ..queries import (
    actor_in,
    beside_in,
    episode_in,
    job_of,
    page_of_rollouts,
    read_episode,
)
from ..scheduler import Scheduler
from ..sessions import Visitor
from ..web import gateway_of, visitor_of
from .render import render

_EVENTS, _ALL_EVENTS = 12, 500
_ROLLOUT_QUERY = (
    *("step", "sort", "errors", "q", "reward_from", "reward_to", "version", "tokens_from"),
    *("sample", "beside"),
)
_NAMES = quote(",".join(line.name for chart in CHARTS for line in chart.lines), safe="")
_CHARTS = [chart._asdict() for chart in CHARTS]


async def job_page(
    request: Request, visitor: Visitor, record: JobRecord, tab: str, more: dict[str, Any]
) -> Response:
    """Show a tab of a job's page, with the head that is the same in all of them."""
    seen = await glance(gateway_of(request), visitor, record)
    runs = [_curves_of(record)]
    shown = {"user": visitor.user, "record": record, "tab": tab, "runs": runs, **seen, **more}
    return render(request, f"job_{tab}.html", shown)


async def _last_seq(broker: Broker, stream: str) -> int:
    """Return where live updates begin: what is stored later is not on the page yet."""
    try:
        return int((await stream_info(broker, stream))["state"]["last_seq"])
    except NotFoundError:  # the job's streams were removed: there is nothing to follow
        return 0


async def job(request: Request) -> Response:
    """Show a job's curves, its actors and its last events."""
    return await _page_with_events(request, "curves", _EVENTS, charts=_CHARTS)


async def compare(request: Request) -> Response:
    """Show several runs laid over each other, and where their configurations differ.

    They are named one by one, or are those that a search finds: by tag, by group.
    """
    visitor = await visitor_of(request)
    search, records, num_found = await _compared(request, Scheduler(visitor))
    rows = await gateway_of(request).figures.rows(visitor.broker, records)
    configs = await asyncio.to_thread(lambda: [effective(one.config) for one in records])
    jobs = [one.job for one in records]
    asked = request.query_params.multi_items()
    kept = [(key, value) for key, value in asked if key not in ("run", "search")]
    shown: dict[str, Any] = {
        "user": visitor.user,
        "rows": rows,
        "runs": [_curves_of(one) for one in records],
        "charts": _CHARTS,
        "search": search,
        "num_found": num_found,
        "differences": differences(configs),
        "without": {
            one.job: "/compare?" + urlencode([*(("run", o) for o in jobs if o != one.job), *kept])
            for one in records
        },
    }
    return render(request, "compare.html", shown)


async def _compared(request: Request, scheduler: Scheduler) -> tuple[str, list[JobRecord], int]:
    """Return the search, the runs to compare, and how many there would be."""
    jobs = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(jobs) > MAX_RUNS:
        raise MessageError(f"{len(jobs)} runs were named; a page compares at most {MAX_RUNS}")
    search = "" if jobs else request.query_params.get("search", "")[:200]
    if not search:
        return "", [await scheduler.get(one) for one in jobs], len(jobs)
    told = await scheduler.list_jobs()
    found = select(told, Query(search=search, limit=len(told))).records
    found = [one for one in found if one.trains]
    return search, found[:MAX_RUNS], len(found)


def _curves_of(record: JobRecord) -> dict[str, str]:
    """Return where the page has a run's curves from; `first`, what it asks for first."""
    url = f"/api/v1/jobs/{quote(record.job)}/metrics"
    return {"job": record.job, "name": record.name, "url": url, "first": f"{url}?names={_NAMES}"}


async def job_events(request: Request) -> Response:
    """Show a job's events."""
    return await _page_with_events(request, "events", _ALL_EVENTS)


async def _page_with_events(request: Request, tab: str, limit: int, **more: Any) -> Response:
    visitor, record = await job_of(request)
    seq = await _last_seq(visitor.broker, record.scope.stream_feed)
    events = await logs.tail_of_events(visitor.broker, record, limit=limit)
    return await job_page(request, visitor, record, tab, {"events": events, "seq": seq, **more})


async def job_logs(request: Request) -> Response:
    """Show the ends of the logs of a job's actors."""
    visitor, record = await job_of(request)
    actor = actor_in(request)
    seq = await _last_seq(visitor.broker, record.scope.stream_log)
    lines = await logs.tail_of_log(visitor.broker, record.scope, actor=actor)
    more = {"lines": lines, "actor": actor, "seq": seq}
    return await job_page(request, visitor, record, "logs", more)


async def job_rollouts(request: Request) -> Response:
    """Show a page of a job's groups."""
    visitor, record = await job_of(request)
    page = await page_of_rollouts(request, visitor, record)
    asked = {name: request.query_params.get(name, "") for name in _ROLLOUT_QUERY}
    rewards = [one["reward"] for group in page.groups for one in group["episodes"]]
    low, high = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    kept = {name: value for name, value in asked.items() if value}
    told = {name: value for name, value in kept.items() if name != "beside"}
    links = {"query": urlencode(kept), "query_json": urlencode(told)}
    shown = {"page": page, "asked": asked, "low": low, "high": high, **links}
    return await job_page(request, visitor, record, "rollouts", shown)


async def job_episode(request: Request) -> Response:
    """Show one episode."""
    visitor, record = await job_of(request)
    episode = await read_episode(visitor, record, *episode_in(request))
    named = beside_in(request)
    beside = None if named is None else await read_episode(visitor, record, *named)
    shown = {"episode": episode, "beside": beside}
    return await job_page(request, visitor, record, "episode", shown)


async def job_config(request: Request) -> Response:
    """Show a job's configuration."""
    visitor, record = await job_of(request)
    texts = {"given": to_yaml(record.config), "effective": to_yaml(effective(record.config))}
    return await job_page(request, visitor, record, "config", texts)
