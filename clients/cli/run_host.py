"""Hosting the episodes of a run in this process: its game, or its programs."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...broker.client.login import KEY_VARIABLE
from ...broker.service_process import told_to_systemd
from ...schemas.config.agent import runs_programs
from ...schemas.config.job import EnvConfig, JobConfig
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.wire.errors import BrokerError, DeadlineError, StateError
from ..pool import Pool
from .output import note
from .session import with_pool

if TYPE_CHECKING:
    from ...envs.host import EnvironmentHost

END_POLL_S = 2.0
"""How often a host looks whether its run has ended."""

MakeHost = Callable[[Pool, JobRecord], "EnvironmentHost"]
"""Makes what hosts a run's episodes; raises for a run that it cannot host."""


def host_run(run: str, nats_url: str | None, make: MakeHost) -> int:
    """Host a run's episodes until Ctrl-C or the run's end; return the exit code.

    Raises StateError for a run that has ended.
    """

    async def work(pool: Pool) -> None:
        os.environ.pop(KEY_VARIABLE, None)  # not for the processes of the game
        record = await pool.find(run)
        if record.state in FINAL_STATES:
            raise StateError(
                f"run {record.name} is {record.state}: nobody plays its episodes any more",
                hint=f"let it go on first: `tinkermq resume {record.name}`",
            )
        await _serve(pool, record, make(pool, record))

    with_pool(nats_url, work)
    return 0


async def _serve(pool: Pool, record: JobRecord, host: "EnvironmentHost") -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C interrupts
            loop.add_signal_handler(number, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        hosting = tasks.create_task(host.run(stopping), name="host the episodes")
        await host.ready.wait()
        watching = tasks.create_task(_until_end(pool, record.job, stopping), name="see the end")
        game = record.config.get("env", {}).get("game") or "agent"
        note(f"{host.name} serves {game} for {record.name}; Ctrl-C stops it")
        async with told_to_systemd():
            await hosting
        watching.cancel()


async def _until_end(pool: Pool, job: str, stopping: asyncio.Event) -> None:
    """Set `stopping` when a job has ended; a broker that is away for a while is waited for."""
    while True:
        await asyncio.sleep(END_POLL_S)
        try:
            record = await pool.find(job)
        except (BrokerError, DeadlineError):
            if pool.broker.closed.is_set():
                raise
            continue
        if record.state in FINAL_STATES:
            note(f"{record.name} is {record.state}")
            stopping.set()
            return


def make_host(
    pool: Pool, record: JobRecord, name: str = "", *, job: JobConfig | None = None
) -> "EnvironmentHost":
    """Return a host of a run's episodes; `job` stands for its stored configuration.

    Raises StateError for a run whose episodes cannot be hosted by a command.
    """
    from ...envs.host import EnvironmentHost

    if job is None and not runs_programs(record.config):
        return _host_of_game(pool, record, name)
    job = job or JobConfig.model_validate(record.config)
    if job.agent.runs_programs and not job.agent.command:
        raise StateError(
            f"run {record.name} has agent.client set: who calls it runs its programs",
            hint="host a function by AgentEnvironment, or run programs for AgentEpisodes",
        )
    programs = None
    if job.agent.command:
        from ...envs.agents.leases import make_program_runner

        tries = job.rollout.max_tries
        programs = make_program_runner(job.agent, pool.broker, record.scope, max_tries=tries)
    return EnvironmentHost(
        pool.broker, record.scope, job.env, name=name, seed=job.seed, programs=programs
    )


def _host_of_game(pool: Pool, record: JobRecord, name: str) -> "EnvironmentHost":
    """Return a host of a run's game; its configuration need not be complete yet."""
    from ...envs.host import EnvironmentHost

    env = EnvConfig.model_validate(record.config.get("env") or {"game": ""})
    if not env.game:
        raise StateError(f"run {record.name} plays no episodes: it is an SFT job")
    seed = int(record.config.get("seed", 0))
    return EnvironmentHost(pool.broker, record.scope, env, name=name, seed=seed)
