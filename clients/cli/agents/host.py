"""`tinkermq agent host`: run a run's programs on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING

from ....schemas.config.job import JobConfig
from ....schemas.job import JobRecord
from ....schemas.wire.errors import StateError
from ...pool import Pool
from ..run_host import host_run, make_host

if TYPE_CHECKING:
    from ....envs.host import EnvironmentHost


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

    One outgoing connection to the broker is enough. With `env.hosts: 0` all programs of the run
    are those of such hosts, else they come on top of the pool's. Relative paths of the run's
    section `agent` are those of this machine, from the present folder.

    Parameters
    ----------
    run
        Name or job id.
    files
        Folder of the program, in place of the run's `agent.files`.
    reward_files
        Folder of the reward command, in place of the run's `agent.reward_files`.
    places
        Programs at the same time, in place of the run's `agent.per_host`.
    name
        Name of this host; default: one of its own.
    nats_url
        The broker; default: $TINKERMQ_NATS_URL, or the local stack.
    """
    given = {
        "files": None if files is None else str(files),
        "reward_files": None if reward_files is None else str(reward_files),
        "per_host": places,
    }
    instead = {key: value for key, value in given.items() if value is not None}

    def make(pool: Pool, record: JobRecord) -> "EnvironmentHost":
        config = dict(record.config)
        job = JobConfig.model_validate({**config, "agent": {**config.get("agent", {}), **instead}})
        if not job.agent.runs_programs:
            raise StateError(
                f"run {record.name} plays the game {job.env.game!r} and has no program",
                hint=f"host its game: `tinkermq env serve {record.name}`",
            )
        return make_host(pool, record, name, job=job)

    return host_run(run, nats_url, make)
