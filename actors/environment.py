"""The environment-host actor: runs a job's game in the pool.

The work is done by `envs/serving/host.py`, which a client runs inside its own process just as well.
"""

import asyncio
import sys
from collections.abc import Sequence

from ..envs.agents.programs.hosted import program_runner
from ..envs.agents.programs.runner import ProgramRunner
from ..envs.serving.host import EnvironmentHost
from .runtime import JobContext, run_job_actor, settle_memory

BEAT_S = 1.0


async def serve_games(context: JobContext) -> None:
    """Host the games of the context's job until it stops."""
    await context.serve_control()
    host = EnvironmentHost(
        context.broker,
        context.scope,
        context.config.env,
        seed=context.config.seed,
        judge_job=context.record.judge,
        programs=_programs(context),
    )
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(_report(context, host), name="env_beat")
        await host.run(context.stopping)
        beating.cancel()


def _programs(context: JobContext) -> ProgramRunner | None:
    """Return what runs the programs of an agent job; ConfigError where it cannot."""
    config = context.config
    if not config.agent.command:
        return None
    return program_runner(
        config.agent,
        context.broker,
        context.scope,
        max_tries=config.rollout.max_tries,
        private=[context.run_dir],
    )


async def _report(context: JobContext, host: EnvironmentHost) -> None:
    """Put what the host has done into the heartbeat."""
    await host.ready.wait()
    settle_memory()
    context.set_state("running")
    steps = 0
    while True:
        if host.counts.steps > steps:
            steps = host.counts.steps
            context.progressed()
        context.numbers.update({name: float(n) for name, n in vars(host.counts).items()})
        context.numbers["episodes"] = float(host.num_running)
        spent = host.time_use.totals()
        context.numbers.update({f"{kind}_s": seconds for kind, seconds in spent.items()})
        await asyncio.sleep(BEAT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and host games; return the exit code."""
    return run_job_actor("environment", serve_games, argv)


if __name__ == "__main__":
    sys.exit(main())
