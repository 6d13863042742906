"""A game with several roles: each role's conversation is an episode of its own, at one table.

The table is reset first; then every role takes its seat with an ordinary agent loop, which waits
at the environment host for its turns. What the roles share is the game and nothing else: prompt,
mask, rewards and limits are each role's own.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from ....envs.serving.remote import Environments, SeatAt
from ....schemas.rollout import Trajectory
from ....schemas.wire.errors import TinkermqError
from .agent_loop import AgentLoop, EpisodeFailed, EpisodePlan, NoTurn, failure_of


async def play_table(
    environments: Environments, plan: EpisodePlan, players: Mapping[str, AgentLoop]
) -> dict[str, Trajectory]:
    """Play one game, each role by its agent loop; return the trajectories by role.

    A role whose turn never came has none. Raises EpisodeFailed when a seat failed: then the whole
    game did.
    """
    try:
        started = await environments.reset(plan.episode, plan.start)
    except TinkermqError as error:
        raise failure_of("environment", error) from error
    try:
        outcomes = await asyncio.gather(
            *(
                _seat(loop, plan, SeatAt(started.host, plan.episode, role))
                for role, loop in players.items()
            )
        )
    finally:
        environments.close(started.host, plan.episode)
    failures = [one for one in outcomes if isinstance(one, EpisodeFailed)]
    found = {item.role: item for item in outcomes if isinstance(item, Trajectory)}
    if failures:
        wasted = sum(one.tokens_wasted for one in failures)
        wasted += sum(item.num_generated for item in found.values())
        first = failures[0]
        raise EpisodeFailed(first.cause, first.blame.boundary, wasted) from first
    return found


async def _seat(loop: AgentLoop, plan: EpisodePlan, seat: SeatAt) -> Trajectory | Exception:
    """Play one role; a seat that fails gives itself up, which ends the game for the others."""
    episode = f"{plan.episode}.{seat.role}"
    try:
        return await loop.run(replace(plan, episode=episode, start=replace(plan.start, seat=seat)))
    except (EpisodeFailed, NoTurn) as outcome:
        return outcome
