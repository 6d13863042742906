"""Machines of Slurm: a job for each, whose one step is the node.

A job's name is the machine's, and `singleton` keeps two of one name from running: who asked twice,
after a kill in between, has one machine. Slurm sends the node SIGTERM when its time is nearly up
or that a more important job needs the machine; the node drains as it does on any SIGTERM. It is
a step, and not the batch script, because only steps get the grace of a preemption. Refusals are
reported in Slurm's words.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Literal

from ....broker.client.login import CREDENTIALS_VARIABLE, OF_PERSONS
from ....schemas.machines import MachinesConfig
from .source import CommandHints, Machine, MachineNames, run_command

_HINTS = CommandHints(
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
    """Asks by sbatch, looks by squeue, gives back by scancel."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Have nodes reach the broker at `url`."""
        self._config = config
        self._url = url
        self._names = MachineNames(url)

    async def list_machines(self) -> list[Machine]:
        """Return the pool's jobs in Slurm's queue, by name; raises PlacementError."""
        reply = await _run(["squeue", "--me", "--noheader", f"--format={_FORMAT}"])
        lines = [line for line in reply.splitlines() if line.count("|") >= 5]
        machines = [_machine(line, self._config.logs) for line in lines]
        own = [machine for machine in machines if self._names.own(machine.name)]
        return sorted(own, key=lambda one: (self._names.number(one.name), int(one.id)))

    async def request_machine(self, name: str) -> None:
        """Submit the job of a machine; raises PlacementError with Slurm's reason."""
        arguments = sbatch_arguments(self._config, name)
        await _run(["sbatch", *arguments, f"--wrap={self._script(name)}"])

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Have the node drain, or cancel the job: SIGTERM, SIGKILL after Slurm's KillWait."""
        how = ["--signal=TERM"] if drain and machine.state == "started" else []
        await _run(["scancel", "--quiet", *how, machine.id])

    def _script(self, name: str) -> str:
        words = [self._config.python, "-m", "tinkermq.actors.node"]
        words += ["--nats", self._url, "--name", name]
        slots = '--gpus "$CUDA_VISIBLE_DEVICES"' if self._config.gpus else "--slots "
        slots += "" if self._config.gpus else str(self._config.slots)
        return f"exec {_STEP} {shlex.join(words)} {slots}"


def sbatch_arguments(config: MachinesConfig, name: str) -> list[str]:
    """Return how sbatch is asked for one machine; what the pool's owner adds comes last."""
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
    """Return a time that squeue wrote as SLURM_TIME_FORMAT asks; None for N/A."""
    return float(text) if text.isdecimal() else None


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return what jobs inherit: no secrets, and nothing that makes a job a part of another."""
    secret = {*OF_PERSONS, CREDENTIALS_VARIABLE}
    public = {name: value for name, value in given.items() if name not in secret}
    ours = {
        name for name in public if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"
    }
    return {name: public[name] for name in public if name not in ours} | {"SLURM_TIME_FORMAT": "%s"}


async def _run(command: Sequence[str]) -> str:
    return await run_command(command, _HINTS, _environment(os.environ))
