"""Trying an episode again that failed."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import structlog

from ....schemas.wire.trace import trace_of
from .agent_loop import EpisodeFailed, EpisodePlan

T = TypeVar("T")
_log = structlog.get_logger()


async def until_played(
    play: Callable[[EpisodePlan], Awaitable[T]],
    plan: EpisodePlan,
    max_tries: int,
    check_engines: Callable[[], None],
    failures: list[EpisodeFailed] | None = None,
) -> T:
    """Play an episode until it succeeds, each time as an episode of its own; return its outcome.

    A host that vanished does not count as a try. `failures` gets what the tries ended with. Raises
    the last of them when there is no other try to be made, and what `check_engines` raises: an
    engine that has ended is nobody's failure.
    """
    failures = [] if failures is None else failures
    while True:
        attempt = len(failures) + 1
        draws = None if plan.draws is None else f"{plan.draws} {attempt}"
        tried = replace(plan, episode=f"{plan.episode}-{attempt}", draws=draws)
        try:
            return await play(tried)
        except EpisodeFailed as failure:
            check_engines()
            trace = trace_of(plan.start.traceparent)
            blame = failure.blame.model_dump()
            _log.warning("episode_failed", episode=tried.episode, trace=trace, **blame)
            failures.append(failure)
            counted = [one for one in failures if one.blame.code != "host_gone"]
            if failure.is_final or len(counted) >= max_tries:
                raise
