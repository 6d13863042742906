"""Configuration of a pool's machines: `tinkermq up --on`, `tinkermq scheduler --machines`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from .config.load_config import read_yaml
from .config.sections import Section, when
from .wire.errors import ConfigError
from .wire.message import Message, requirement

Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@-]*$", max_length=255)]

_PLACES = {"slurm": "partition", "ray": "address"}
"""Key that `KIND:PLACE` sets, by kind."""
_CLUSTERS = when("kind", "slurm", "ray", "kubernetes")
_KUBERNETES = when("kind", "kubernetes")


class MachinesConfig(Section):
    """Machines requested from a cluster as the queue needs them."""

    kind: Literal["slurm", "ray", "kubernetes", "ssh", "none"] = "none"
    """slurm: a Slurm job per machine; ray: a Ray job per machine; kubernetes: a pod per machine;
    ssh: a node on each host; none: start nodes by hand."""
    hosts: list[Host] = Field(default_factory=list[Host], json_schema_extra=when("kind", "ssh"))
    """Hosts as `ssh` takes them, such as `user@host`."""
    ssh: list[str] = Field(default_factory=list[str], json_schema_extra=when("kind", "ssh"))
    """Further arguments of ssh, such as `-i`, `/home/pool/.ssh/key`."""
    address: str = Field(
        default="",
        pattern=r"^((https?://)?[A-Za-z0-9_.\-]+(:[0-9]+)?(/[A-Za-z0-9_.~/%\-]*)?)?$",
        json_schema_extra=when("kind", "ray"),
    )
    """Address of Ray's dashboard, such as `http://head:8265`; empty: port 8265 of the scheduler's
    machine."""
    ray: dict[str, Any] = Field(
        default_factory=dict[str, Any], json_schema_extra=when("kind", "ray")
    )
    """Further fields of the job submission, such as `entrypoint_resources`,
    `entrypoint_label_selector` or `runtime_env`."""
    namespace: str = Field(
        default="default", pattern=r"^[a-z0-9-]+$", max_length=63, json_schema_extra=_KUBERNETES
    )
    """Namespace of the pods."""
    context: str = Field(default="", json_schema_extra=_KUBERNETES)
    """Context of the kubeconfig; empty: the current one, or the scheduler's own cluster."""
    image: str = Field(default="", json_schema_extra=_KUBERNETES)
    """Image of the node's container, with tinkermq installed."""
    pod: dict[str, Any] = Field(default_factory=dict[str, Any], json_schema_extra=_KUBERNETES)
    """Further parts of the pod manifest (`metadata`, `spec`): maps are merged by key, lists by
    name; the node's container is called `node`."""
    partition: str = Field(default="", json_schema_extra=when("kind", "slurm"))
    """Slurm partition; empty: its default."""
    least: int = Field(default=0, ge=0, le=10_000)
    """Machines that are kept when idle."""
    most: int = Field(default=4, ge=0, le=10_000)
    """Largest number of machines, starting and ending ones included."""
    slots: int = Field(default=2, ge=1, le=4096)
    """Slots per machine: GPUs if `gpus` is set, else CPU cores."""
    gpus: bool = False
    """Whether a slot is a GPU."""
    slot_hours_per_day: float | None = Field(default=None, gt=0)
    """Budget per day (UTC), used while a machine runs, idle or not. When it is used up, all
    machines are returned; runs write a checkpoint and wait for the next day."""
    idle_s: float = Field(default=300.0, ge=0)
    """Seconds after which an idle machine is returned."""
    join_s: float = Field(default=300.0, gt=0)
    """Seconds after which a started machine whose node has not joined, or is not heard of any more,
    is returned."""
    look_s: float = Field(default=5.0, gt=0)
    """Seconds between polls of the cluster."""
    drain_s: int = Field(default=120, ge=1, le=65_535, json_schema_extra=_CLUSTERS)
    """Seconds before its end at which a machine drains: its runs write a checkpoint and continue
    elsewhere."""
    sbatch: list[str] = Field(default_factory=list[str], json_schema_extra=when("kind", "slurm"))
    """Further arguments of sbatch, such as `--account=lab`, `--time=4:00:00`, `--qos=low`."""
    url: str = ""
    """URL of the broker for machines; empty: the scheduler's."""
    credentials: str = ""
    """File with the node credentials, as a path on the machines; empty: a pool without users."""
    python: str = Field(default=sys.executable)
    """Python with tinkermq, as a path on the machines."""
    logs: str = Field(default="", json_schema_extra=when("kind", "slurm", "ssh"))
    """Folder for the nodes' output, as a path on the machines; empty: the folder in which the
    scheduler was started."""

    @classmethod
    def none(cls) -> "MachinesConfig":
        """Return the configuration of a pool that requests no machines."""
        return cls(most=0)

    @property
    def on(self) -> str:
        """Where machines are requested, for people; empty: nowhere."""
        if self.kind == "ssh":
            return f"ssh: {len(self.hosts)} hosts"
        if self.kind == "kubernetes":
            return f"kubernetes:{self.namespace}"
        return "" if self.kind == "none" else f"{self.kind}:{self.partition or self.address}"


def machines_config(text: str, *, credentials: str = "") -> MachinesConfig:
    """Return the configuration of `slurm:PARTITION`, `ray:ADDRESS`, `none` or a YAML file.

    `credentials` of nodes are used if the file names none. Raises ConfigError.
    """
    if text == "none":
        return MachinesConfig.none()
    kind, colon, place = text.partition(":")
    values: dict[str, object]
    if colon and kind in _PLACES:
        values = {"kind": kind, _PLACES[kind]: place}
    elif Path(text).suffix in {".yaml", ".yml"}:
        values = read_yaml(text, MachinesConfig)
    else:
        raise ConfigError(
            f"{text!r} names no source of machines",
            hint="give slurm:PARTITION, ray:ADDRESS or a YAML file (docs/clusters.md)",
        )
    if values.get("kind") == "ssh" and isinstance(hosts := values.get("hosts"), list):
        values = {"most": len(cast("list[object]", hosts)), **values}
    if credentials:
        values = {"credentials": credentials, **values}
    return _checked(values, text)


def _checked(values: dict[str, object], text: str) -> MachinesConfig:
    try:
        config = MachinesConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"machines of {text!r}: {key}: {requirement(first)} (it is {first['input']!r})",
            hint="docs/clusters.md lists the keys",
        ) from error
    if config.least > config.most:
        raise ConfigError(f"least is {config.least}, more than most, which is {config.most}")
    if config.kind == "ssh":
        _check_hosts(config)
    if config.kind == "kubernetes" and not config.image:
        raise ConfigError("image is not given", hint="name one that has tinkermq in it")
    return config


def _check_hosts(config: MachinesConfig) -> None:
    if len(set(config.hosts)) < len(config.hosts):
        raise ConfigError("hosts names one twice", hint="a host has one node; give it more slots")
    if config.most > len(config.hosts):
        raise ConfigError(
            f"most is {config.most}, and there are {len(config.hosts)} hosts",
            hint="leave it out, and all of them are used",
        )


# The machines that a pool has requested from a cluster, as the scheduler reports them.

MachineState = Literal["asked", "coming", "here", "draining"]


class MachineStatus(Message):
    """One machine that the pool has requested."""

    name: str
    """Name, also that of its node."""
    state: MachineState
    """asked: requested; coming: started, its node has not joined; here: joined; draining: being
    returned, or its time is up."""
    id: str = ""
    started: float | None = None
    ends: float | None = None
    why: str = ""
    """Why it waits, in the cluster's words."""


class MachineList(Message):
    """State of the requested machines: reply of the scheduler's `machines`."""

    on: str = ""
    """Where machines are requested; empty: nodes are started by hand."""
    least: int = Field(default=0, ge=0)
    """Machines that are kept when idle."""
    most: int = Field(default=0, ge=0)
    slots: int = Field(default=0, ge=0)
    slot_hours: float = Field(default=0.0, ge=0)
    """Slot-hours used since midnight (UTC), idle or not."""
    slot_hours_per_day: float | None = None
    """Daily budget; null: no bound."""
    machines: list[MachineStatus] = Field(default_factory=list[MachineStatus])
    trouble: str = ""
    """Why none come, in the cluster's words."""


class MachineSpending(Message):
    """Use of a day's budget, in the KV bucket of machines."""

    day: int
    """Days since the epoch (UTC)."""
    seconds: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds that each machine ran on that day, by its id at the cluster."""
