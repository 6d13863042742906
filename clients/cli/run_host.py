"""Host the episodes of a run in this process: its game or its agent programs."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...broker.client.login import erase_login
from ...schemas.config.agent import runs_programs
from ...schemas.config.job import EnvConfig, JobConfig
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.local.process import notifying_systemd
from ...schemas.wire.errors import BrokerError, DeadlineError, StateError
from ..pool import Pool
from .output import print_note
from .session import with_pool

if TYPE_CHECKING:
    from ...envs.host import EnvironmentHost


END_POLL_S = 2.0
"""How often a host checks whether its run has ended."""

MakeHost = Callable[[Pool, JobRecord], "EnvironmentHost"]
"""Makes the host of a run's episodes; raises an error for a run that it cannot host."""


def host_run(run: str, nats_url: str | None, make: MakeHost) -> int:
    """Host a run's episodes until Ctrl-C or the run's end; return the exit code.

    Raises StateError for a run that has ended.
    """

    async def work(pool: Pool) -> None:
        erase_login()  # the game's processes must not have it
        record = await pool.find(run)
        if record.state in FINAL_STATES:
            raise StateError(
                f"run {record.name} is {record.state}: its episodes are no longer played",
                hint=f"resume it first: `tinkermq resume {record.name}`",
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
        watching = tasks.create_task(
            _wait_until_ended(pool, record.job, stopping), name="see the end"
        )
        game = record.config.get("env", {}).get("game") or "agent"
        print_note(f"{host.name} serves {game} for {record.name}; Ctrl-C stops it")
        async with notifying_systemd():
            await hosting
        watching.cancel()


async def _wait_until_ended(pool: Pool, job: str, stopping: asyncio.Event) -> None:
    """Set `stopping` when a run has ended; keeps waiting while the broker is away."""
    while True:
        await asyncio.sleep(END_POLL_S)
        try:
            record = await pool.find(job)
        except (BrokerError, DeadlineError):
            if pool.broker.closed.is_set():
                raise
            continue
        if record.state in FINAL_STATES:
            print_note(f"{record.name} is {record.state}")
            stopping.set()
            return


def make_host(
    pool: Pool, record: JobRecord, name: str = "", *, job: JobConfig | None = None
) -> "EnvironmentHost":
    """Return a host of a run's episodes; `job` replaces its stored configuration.

    Raises StateError for a run whose episodes cannot be hosted by a command.
    """
    from ...envs.host import EnvironmentHost

    if job is None and not runs_programs(record.config):
        return _host_of_game(pool, record, name)
    job = job or JobConfig.model_validate(record.config)
    if job.agent.runs_programs and not job.agent.command:
        raise StateError(
            f"run {record.name} has agent.client set: its programs are run by callers",
            hint="host a function by AgentEnvironment, or run programs for AgentEpisodes",
        )
    programs = None
    if job.agent.command:
        from ...envs.agents.leases import make_program_runner

        tries = job.rollout.max_tries
        programs = make_program_runner(
            job.agent, pool.broker, record.scope, max_tries=tries, has_tasks=job.has_tasks
        )
    return EnvironmentHost(
        pool.broker, record.scope, job.env, name=name, seed=job.seed, programs=programs
    )


def _host_of_game(pool: Pool, record: JobRecord, name: str) -> "EnvironmentHost":
    """Return a host of a run's game; its configuration need not be complete yet."""
    from ...envs.host import EnvironmentHost

    env = EnvConfig.model_validate(record.config.get("env") or {"game": ""})
    if not env.game:
        raise StateError(f"run {record.name} plays no episodes: it is an SFT run")
    seed = int(record.config.get("seed", 0))
    return EnvironmentHost(pool.broker, record.scope, env, name=name, seed=seed)


# `tinkermq agent host`: run a run's agent programs on this machine.


def host(
    run: str,
    /,
    *,
    files: Path | None = None,
    reward_files: Path | None = None,
    places: int | None = None,
    name: str = "",
    nats_url: str | None = None,
) -> int:
    """Run a run's agent programs on this machine until Ctrl-C or the run's end.

    One outgoing connection to the broker is enough. With `env.hosts: 0`, such hosts run all
    programs of the run, otherwise they add to the pool's hosts. Relative paths in the run's section
    `agent` are resolved on this machine, from the working folder.

    Parameters
    ----------
    run
        Name or job id.
    files
        Folder of the program, in place of the run's `agent.files`.
    reward_files
        Folder of the reward command, in place of the run's `agent.reward_files`.
    places
        Most programs at once, in place of the run's `agent.per_host`.
    name
        Name of this host; default: a generated one.
    nats_url
        The broker; default: $TINKERMQ_NATS_URL, or the local stack.
    """
    options = {
        "files": None if files is None else str(files),
        "reward_files": None if reward_files is None else str(reward_files),
        "per_host": places,
    }
    overrides = {key: value for key, value in options.items() if value is not None}

    def make(pool: Pool, record: JobRecord) -> "EnvironmentHost":
        config = dict(record.config)
        job = JobConfig.model_validate(
            {**config, "agent": {**config.get("agent", {}), **overrides}}
        )
        if not job.agent.runs_programs:
            raise StateError(
                f"run {record.name} plays the game {job.env.game!r} and has no program",
                hint=f"host its game: `tinkermq env serve {record.name}`",
            )
        return make_host(pool, record, name, job=job)

    return host_run(run, nats_url, make)
