"""The environment-host actor: runs a job's game in the pool.

It runs the host of `envs/host.py`, which a client can also run in its own process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ..broker.client.rpc import Service
from ..envs.agents.leases import LeaseRequests, make_lease_runner, make_program_runner
from ..envs.host import EnvironmentHost
from ..envs.running.runners import BoundedRunner
from ..schemas.agent import GiveRequest
from ..schemas.local.process import leave
from .runtime import JobContext, run_job_actor, settle_memory
from .storage.access import refuse_unshown_folder

BEAT_S = 1.0


async def serve_games(context: JobContext) -> None:
    """Host the games of the context's job until it stops."""
    await context.serve_control()
    programs, leases = _programs(context)
    host = EnvironmentHost(
        context.broker,
        context.scope,
        context.config.env,
        seed=context.config.seed,
        judge_job=context.record.judge,
        programs=programs,
    )
    async with asyncio.TaskGroup() as tasks, _answering(context, leases):
        beating = tasks.create_task(_report(context, host), name="env_beat")
        await host.run(context.stopping)
        beating.cancel()


def _programs(context: JobContext) -> tuple[BoundedRunner | None, LeaseRequests | None]:
    """Return the runner of an agent job's programs, and the queue of requests for leases.

    Raises ConfigError if programs cannot be run.
    """
    config, broker, scope = context.config, context.broker, context.scope
    tries = config.rollout.max_tries
    if config.agent.client:
        return make_lease_runner(config.agent, broker, scope, max_tries=tries)
    if not config.agent.command:
        return None, None
    record = context.record

    def may_read(path: Path) -> None:
        if record.output_roots:
            refuse_unshown_folder(path, record)

    runner = make_program_runner(
        config.agent,
        broker,
        scope,
        max_tries=tries,
        private=[context.run_dir],
        has_tasks=config.has_tasks,
        builds=not record.output_roots,  # not for users, since a build has network access
        may_read=may_read,
    )
    return runner, None


@contextlib.asynccontextmanager
async def _answering(context: JobContext, leases: LeaseRequests | None) -> AsyncIterator[None]:
    """Answer requests for episodes."""
    if leases is None:
        yield
        return

    description = f"episodes for users of job {context.scope.job}"
    async with await Service.start(
        context.broker, name="tinkermq-given", description=description
    ) as service:
        await service.endpoint("give", context.scope.env_give, GiveRequest, leases.answer)
        yield


async def _report(context: JobContext, host: EnvironmentHost) -> None:
    """Add the host's counts to the heartbeat."""
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
    leave(main())
