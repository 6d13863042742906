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
from .agent_loop import AgentLoop, EpisodeFailed, EpisodePlan, NoTurn, blaming


async def play_table(
    environments: Environments, plan: EpisodePlan, players: Mapping[str, AgentLoop]
) -> dict[str, Trajectory]:
    """Play one game, each role by its agent loop; return the trajectories by role.

    A role whose turn never came has none. Raises EpisodeFailed when a seat failed: then the whole
    game did.
    """
    with blaming("environment"):
        started = await environments.reset(plan.episode, plan.start)
    try:
        outcomes = await asyncio.gather(
            *(
                _seat(loop, plan, SeatAt(started.host, plan.episode, role))
                for role, loop in players.items()
            )
        )
    finally:
        environments.close(started.host, plan.episode)
    failures = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailed)]
    by_role = {played.role: played for played in outcomes if isinstance(played, Trajectory)}
    if failures:
        wasted = sum(failure.tokens_wasted for failure in failures)
        wasted += sum(trajectory.num_generated for trajectory in by_role.values())
        first = failures[0]
        raise EpisodeFailed(first.cause, first.blame.boundary, wasted) from first
    return by_role


async def _seat(loop: AgentLoop, plan: EpisodePlan, seat: SeatAt) -> Trajectory | Exception:
    """Play one role; a seat that fails gives itself up, which ends the game for the others."""
    named = {"episode": f"{plan.episode}.{seat.role}"}
    if plan.draws is not None:
        named["draws"] = f"{plan.draws} {seat.role}"
    try:
        return await loop.run(replace(plan, **named, start=replace(plan.start, seat=seat)))
    except (EpisodeFailed, NoTurn) as outcome:
        return outcome
