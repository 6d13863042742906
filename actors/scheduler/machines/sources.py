"""The source of machines for a configuration, and the sources with commands: SSH and Slurm."""

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from ....broker.client.connection import Broker
from ....broker.client.login import CREDENTIALS_VARIABLE, without_secrets
from ....schemas.machines import MachinesConfig
from ....schemas.wire import errors
from ....schemas.wire.foreign import blaming_awaited, words_of
from ..nodes import Nodes
from .keeper import MachineKeeper
from .kubernetes import KubernetesSource
from .ray import RaySource
from .source import (
    ALLOCATED_GPUS,
    CommandHints,
    Machine,
    MachineNames,
    MachineSource,
    node_command,
    run_command,
)

# -- SSH: machines that always exist ---------------------------------------------------------------
# A machine's number is its host's place in the list. `flock` holds a lock on the host as long as
# its node runs: a second start finds it held, and a poll tries to share it. A host that does not
# answer is reported with ssh's reason and not used meanwhile.

_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_FOLDER = 'cd "${TMPDIR:-/tmp}"'
_HINTS = CommandHints(
    missing="install an SSH client there",
    late="is the host up? try the same command by hand",
    refused="`ssh HOST true` must work without a password as the scheduler's user; "
    "correct `hosts:` or `ssh:` of the machines",
)


class SSHSource:
    """Runs nodes on hosts that `ssh` reaches without a password."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Nodes connect to the broker at `url`."""
        self._config = config
        self._url = url
        prefix = MachineNames(url).prefix
        self._hosts = {f"{prefix}{number}": host for number, host in enumerate(config.hosts, 1)}

    async def list_machines(self) -> list[Machine]:
        """Return the hosts that run a node of this pool, and hosts that do not answer."""
        results = await asyncio.gather(*(self._read_machine(name) for name in self._hosts))
        return [item for item in results if item is not None]

    async def request_machine(self, name: str) -> None:
        """Start a node in the background of its host; harmless if it runs.

        Raises PlacementError with ssh's reason, or if there are no more hosts.
        """
        if name not in self._hosts:
            raise errors.PlacementError(
                f"all {len(self._hosts)} hosts are in use", hint="add some to `hosts:`"
            )
        node = f"echo $$ > {name}.pid; exec {self._node(name)}"
        held = shlex.join(["setsid", "flock", "-n", "-o", f"{name}.lock", "sh", "-c", node])
        log = shlex.quote(self._log(name))
        await self._run(name, f"{_FOLDER}; {held} < /dev/null >> {log} 2>&1 &")

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """End the node, which always drains; harmless if it has ended."""
        name = machine.name
        await self._run(
            name, f"{_FOLDER}; flock -n -s {name}.lock true || kill -TERM $(cat {name}.pid)"
        )

    async def _read_machine(self, name: str) -> Machine | None:
        host, log = self._hosts[name], self._log(name)
        tell = f"flock -n -s {name}.lock true || stat --format=%Y {name}.pid || true"
        try:
            output = await self._run(name, f"{_FOLDER}; {tell}")
        except (errors.PlacementError, errors.DeadlineError, errors.NotFoundError) as error:
            return Machine(name, host, "leaving", why=error.message, log=log)
        # Files that a shell reads first, such as .bashrc, may have written output before.
        started = output.rstrip().rpartition("\n")[2]
        if not started.isdecimal():
            return None
        return Machine(name, f"{host}@{started}", "started", float(started), log=log)

    def _log(self, name: str) -> str:
        return f"{self._config.logs or '.'}/{name}.log"

    def _node(self, name: str) -> str:
        words = node_command(self._config, self._url, name)
        if self._config.credentials:
            words = ["env", f"{CREDENTIALS_VARIABLE}={self._config.credentials}", *words]
        return shlex.join(words)

    async def _run(self, name: str, command: str) -> str:
        words = ["ssh", *_OPTIONS, *self._config.ssh, self._hosts[name], command]
        return await run_command(words, _HINTS)


# -- Slurm: a job for each machine, whose one step is the node -------------------------------------
# A job's name is the machine's, and `singleton` keeps two of one name from running: a request
# repeated after a kill starts only one machine. Slurm sends the node SIGTERM when its time is
# nearly up or a more important job needs the machine; the node drains as it does on any
# SIGTERM. It is a step, and not the batch script, because only steps get the grace of a preemption.
# Refusals are reported in Slurm's words.

_SLURM_HINTS = CommandHints(
    missing="run the scheduler where Slurm's commands are, on a login node for example",
    late="is slurmctld up? try `sinfo`",
    refused="Slurm's own command line says the same; correct `sbatch:` or "
    "`partition:` of the machines, or ask the cluster's admins",
)
_FORMAT = "%i|%j|%T|%S|%e|%r"
_STEP = "srun --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
_LEAVING = frozenset({"COMPLETING", "STAGE_OUT"})
_ASKED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
_NO_REASON = frozenset({"None", "(null)"})


class SlurmSource:
    """Requests machines with sbatch, lists them with squeue, releases them with scancel."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Nodes connect to the broker at `url`."""
        self._config = config
        self._url = url
        self._names = MachineNames(url)

    async def list_machines(self) -> list[Machine]:
        """Return the pool's jobs in Slurm's queue, by name; raises PlacementError."""
        reply = await _run(["squeue", "--me", "--noheader", f"--format={_FORMAT}"])
        lines = [line for line in reply.splitlines() if line.count("|") >= 5]
        machines = [_machine(line, self._config.logs) for line in lines]
        own = [machine for machine in machines if self._names.own(machine.name)]
        return sorted(own, key=lambda item: (self._names.number(item.name), int(item.id)))

    async def request_machine(self, name: str) -> None:
        """Submit the job of a machine; raises PlacementError with Slurm's reason."""
        arguments = sbatch_arguments(self._config, name)
        await _run(["sbatch", *arguments, f"--wrap={self._script(name)}"])

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Drain the node, or cancel the job: SIGTERM, then SIGKILL after Slurm's KillWait."""
        how = ["--signal=TERM"] if drain and machine.state == "started" else []
        await _run(["scancel", "--quiet", *how, machine.id])

    def _script(self, name: str) -> str:
        words = shlex.join(node_command(self._config, self._url, name))
        return f"exec {_STEP} {words}{ALLOCATED_GPUS if self._config.gpus else ''}"


def sbatch_arguments(config: MachinesConfig, name: str) -> list[str]:
    """Return sbatch's arguments for one machine; those of the pool's owner come last."""
    size = f"--gres=gpu:{config.slots}" if config.gpus else f"--cpus-per-task={config.slots}"
    return [
        "--parsable",
        f"--job-name={name}",
        "--dependency=singleton",
        "--no-requeue",
        "--nodes=1",
        "--ntasks=1",
        size,
        f"--signal=TERM@{config.drain_s}",
        f"--output={config.logs or '.'}/{name}-%j.log",
        *([f"--chdir={config.logs}"] if config.logs else []),
        *([f"--partition={config.partition}"] if config.partition else []),
        *([f"--export=ALL,{CREDENTIALS_VARIABLE}={config.credentials}"] * bool(config.credentials)),
        *config.sbatch,
    ]


def _machine(line: str, logs: str) -> Machine:
    number, name, state, started, ends, why = line.split("|", 5)
    return Machine(
        name,
        number,
        _state(state),
        None if state in _ASKED else _time(started),
        None if state in _ASKED else _time(ends),
        why if state in _ASKED and why not in _NO_REASON else "",
        f"{logs or '.'}/{name}-{number}.log",
    )


def _state(state: str) -> Literal["asked", "started", "leaving"]:
    if state in _ASKED:
        return "asked"
    return "leaving" if state in _LEAVING else "started"


def _time(text: str) -> float | None:
    """Return a time that squeue wrote in SLURM_TIME_FORMAT; None for N/A."""
    return float(text) if text.isdecimal() else None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that jobs inherit: no secrets, no variables of another job."""
    public = without_secrets(variables)
    ours = {
        name for name in public if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
    }
    return {name: public[name] for name in public if name not in ours} | {"SLURM_TIME_FORMAT": "%s"}


async def _run(command: Sequence[str]) -> str:
    return await run_command(command, _SLURM_HINTS, _environment(os.environ))


# -- the source of a configuration -----------------------------------------------------------------


class _Named:
    """A source that raises TinkermqErrors for all errors of its cluster's client."""

    def __init__(self, source: MachineSource) -> None:
        self._source = source

    async def list_machines(self) -> list[Machine]:
        """Return all machines."""
        with blaming_awaited(_failure):
            return await self._source.list_machines()

    async def request_machine(self, name: str) -> None:
        """Request a machine."""
        with blaming_awaited(_failure):
            await self._source.request_machine(name)

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Release a machine."""
        with blaming_awaited(_failure):
            await self._source.release_machine(machine, drain=drain)


def _failure(error: BaseException) -> errors.TinkermqError:
    ours = errors.root_cause(error)
    if isinstance(ours, errors.TinkermqError):
        return ours
    return errors.PlacementError(
        f"the cluster cannot be asked: {words_of(ours)}",
        hint="see the file of `--machines`, and what the cluster's own command says",
    )


_SOURCES = {
    "none": SSHSource,  # without hosts: nodes are started by hand
    "slurm": SlurmSource,
    "ray": RaySource,
    "kubernetes": KubernetesSource,
    "ssh": SSHSource,
}


def machine_keeper(broker: Broker, config: MachinesConfig, pool: Nodes) -> MachineKeeper:
    """Return the keeper of a pool's machines."""
    url = config.url or broker.url
    return MachineKeeper(broker, config, url, machine_source(config, url), pool)


def machine_source(config: MachinesConfig, url: str) -> MachineSource:
    """Return the configured source of machines; nodes connect to the broker at `url`."""
    return _Named(_SOURCES[config.kind](config, url))
