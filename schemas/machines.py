"""Where a pool gets machines, and how many: `tinkermq up --on`, `tinkermq scheduler --machines`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from .config.load_config import read_yaml
from .config.sections import Section, when
from .wire.errors import ConfigError
from .wire.message import Message

Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@-]*$", max_length=255)]

_PLACES = {"slurm": "partition", "ray": "address"}
"""What `KIND:PLACE` says of each kind."""
_CLUSTERS = when("kind", "slurm", "ray", "kubernetes")
_KUBERNETES = when("kind", "kubernetes")


class MachinesConfig(Section):
    """Machines that are asked of a cluster as the queue needs them."""

    kind: Literal["slurm", "ray", "kubernetes", "ssh", "none"] = "none"
    """slurm: a Slurm job for each machine; ray: a Ray job for each; kubernetes: a pod for each;
    ssh: a node on each of some hosts; none: nodes are started by hand."""
    hosts: list[Host] = Field(default_factory=list[Host], json_schema_extra=when("kind", "ssh"))
    """Hosts as `ssh` names them, `user@host` for another user."""
    ssh: list[str] = Field(default_factory=list[str], json_schema_extra=when("kind", "ssh"))
    """Further arguments of ssh, such as `-i`, `/home/pool/.ssh/key`."""
    address: str = Field(
        default="",
        pattern=r"^((https?://)?[A-Za-z0-9_.\-]+(:[0-9]+)?(/[A-Za-z0-9_.~/%\-]*)?)?$",
        json_schema_extra=when("kind", "ray"),
    )
    """Where Ray's dashboard takes jobs, such as `http://head:8265`; empty: port 8265 of the machine
    of the scheduler."""
    ray: dict[str, Any] = Field(
        default_factory=dict[str, Any], json_schema_extra=when("kind", "ray")
    )
    """Further fields of a job's submission, such as `entrypoint_resources`,
    `entrypoint_label_selector` or `runtime_env`."""
    namespace: str = Field(
        default="default", pattern=r"^[a-z0-9-]+$", max_length=63, json_schema_extra=_KUBERNETES
    )
    """Namespace of the pods."""
    context: str = Field(default="", json_schema_extra=_KUBERNETES)
    """Context of the kubeconfig; empty: its current one, or the cluster in which the scheduler
    runs."""
    image: str = Field(default="", json_schema_extra=_KUBERNETES)
    """Image of the node's container, with tinkermq in it."""
    pod: dict[str, Any] = Field(default_factory=dict[str, Any], json_schema_extra=_KUBERNETES)
    """What else a pod says, as a manifest has it (`metadata`, `spec`): maps are merged by key and
    lists by name; the node's container is called `node`."""
    partition: str = Field(default="", json_schema_extra=when("kind", "slurm"))
    """Slurm's partition; empty: its default."""
    least: int = Field(default=0, ge=0, le=10_000)
    """Machines that are kept though nothing needs them."""
    most: int = Field(default=4, ge=0, le=10_000)
    """Machines that there may be, those included that are on their way in or out."""
    slots: int = Field(default=2, ge=1, le=4096)
    """Slots of one machine: its GPUs where `gpus` is set, else CPU cores."""
    gpus: bool = False
    """Whether a slot is a GPU."""
    slot_hours_per_day: float | None = Field(default=None, gt=0)
    """Budget of a day (UTC), counted while a machine runs, whether anything runs on it or not. Once
    it is used up all machines are given back: jobs write a checkpoint and wait for the next day."""
    idle_s: float = Field(default=300.0, ge=0)
    """A machine on which nothing ran for so long, in seconds, is given back."""
    join_s: float = Field(default=300.0, gt=0)
    """A machine that was started and whose node has not joined after so long is given back."""
    look_s: float = Field(default=5.0, gt=0)
    """Between two looks at the cluster, in seconds."""
    drain_s: int = Field(default=120, ge=1, le=65_535, json_schema_extra=_CLUSTERS)
    """So long before its end a machine is told to drain, in seconds: its jobs write a checkpoint
    and go on elsewhere."""
    sbatch: list[str] = Field(default_factory=list[str], json_schema_extra=when("kind", "slurm"))
    """Further arguments of sbatch, such as `--account=lab`, `--time=4:00:00`, `--qos=low`."""
    url: str = ""
    """URL at which machines reach the broker; empty: the one that the scheduler uses."""
    credentials: str = ""
    """File with the credentials of nodes, as machines see it; empty: a pool without users."""
    python: str = Field(default=sys.executable)
    """Python with tinkermq on the machines."""
    logs: str = Field(default="", json_schema_extra=when("kind", "slurm", "ssh"))
    """Folder for what nodes write, as machines see it; empty: the one in which the scheduler
    was started."""

    @classmethod
    def none(cls) -> "MachinesConfig":
        """Return the configuration of a pool that asks nobody for machines."""
        return cls(most=0)

    @property
    def on(self) -> str:
        """Where machines are asked for, as a person writes it; empty: nowhere."""
        if self.kind == "ssh":
            return f"ssh: {len(self.hosts)} hosts"
        if self.kind == "kubernetes":
            return f"kubernetes:{self.namespace}"
        return "" if self.kind == "none" else f"{self.kind}:{self.partition or self.address}"


def machines_config(text: str, *, credentials: str = "") -> MachinesConfig:
    """Return what `slurm:PARTITION`, `ray:ADDRESS`, `none` or the path of a YAML file stands for.

    `credentials` of nodes are used where the file names none. Raises ConfigError.
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
            f"{text!r} says nowhere to get machines",
            hint="give slurm:PARTITION, ray:ADDRESS or a YAML file (docs/slurm.md, docs/ray.md)",
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
            f"machines of {text!r}: {key}: {first['msg']} (it is {first['input']!r})",
            hint="docs/slurm.md lists the keys",
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


# What a pool asks of a cluster, and what the scheduler says of it.

MachineState = Literal["asked", "coming", "here", "draining"]


class MachineStatus(Message):
    """One machine that the pool has asked for."""

    name: str
    """Its name, which is that of its node."""
    state: MachineState
    """asked: the cluster has not started it; coming: it has, and no node has joined yet; here: its
    node has joined; draining: it is given back, or its time is up."""
    id: str = ""
    """What the cluster calls it."""
    started: float | None = None
    """When the cluster started it, in seconds since the epoch."""
    ends: float | None = None
    """When its time is up, in seconds since the epoch."""
    why: str = ""
    """What the cluster says it waits for."""


class MachineList(Message):
    """What came of asking for machines: reply of the scheduler's `machines`."""

    on: str = ""
    """Where machines are asked for; empty: nowhere, nodes are started by hand."""
    least: int = Field(default=0, ge=0)
    """Machines that are kept."""
    most: int = Field(default=0, ge=0)
    """Machines that there may be."""
    slots: int = Field(default=0, ge=0)
    """Slots of one machine."""
    slot_hours: float = Field(default=0.0, ge=0)
    """Used since midnight (UTC), whether anything ran on them or not."""
    slot_hours_per_day: float | None = None
    """Those that may be used in a day; None: any."""
    machines: list[MachineStatus] = Field(default_factory=list[MachineStatus])
    """By name."""
    trouble: str = ""
    """Why none come, in the cluster's words; empty while all is well."""


class MachineSpending(Message):
    """What machines have used of a day's budget, in the KV bucket of machines."""

    day: int
    """Days since the epoch (UTC)."""
    seconds: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds of that day in which each machine ran, by what the cluster calls it."""
