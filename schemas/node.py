"""Nodes: their actors, and requests to them."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .job import MAX_CONFIG_BYTES, Role
from .wire.message import Message, Request
from .wire.subjects import NAME_PATTERN, JobScope, token

MAX_SLOTS = 4096
"""Largest number of slots of a node."""
MUST_MATCH = ("tinkermq", "torch", "transformers", "cuda", "nccl")
"""Packages whose versions must be equal among the ranks of a learner."""
CLOCK_BOUND_S = 2.0
"""Clock offset above which a node is reported."""
_NAMED = 3


class WantedActor(Message):
    """An actor that a node is to run."""

    user: str = Field(pattern=NAME_PATTERN)
    job: str = Field(pattern=NAME_PATTERN)
    name: str = Field(pattern=NAME_PATTERN)
    role: Role
    slots: int = Field(default=1, ge=0)
    devices: list[int] = Field(default_factory=list[int])
    """The node's slots; on a GPU node the visible GPUs."""
    attempt: int = Field(default=1, ge=1)
    """A higher one starts an exited actor again."""
    run_dir: str
    """Logs go to its `logs/attempt_<n>/<name>.log`."""
    output_roots: list[str] = Field(default_factory=list[str])
    """Folders below which its job may write; empty: anywhere."""
    own_folders: list[str] = Field(default_factory=list[str])
    """Folders in which runs of its owner lie, besides that of its own `run_dir`."""
    reads: list[str] = Field(default_factory=list[str])
    """Data files of an environment host."""
    programs: list[str] | None = None
    """Folders shown to a host's agent programs; null: it hosts a game."""
    threads: int = Field(default=1, ge=1)
    secrets: bool = False
    """Request secrets at its start."""
    max_restarts: int = Field(default=5, ge=0)
    """Failures within ten minutes, or in a row without any work, after which it has failed."""


class NodeSync(Message):
    """All actors that a node is to run, on `node.<n>.sync`: it starts missing ones and stops
    others."""

    scheduler: str
    """The scheduler that sends it."""
    epoch: int = 0
    """Epoch of the scheduler's lease; a node ignores older ones."""
    actors: list[WantedActor]
    kill: list[str] = Field(default_factory=list[str])
    """Jobs (`<user>.<job>`) whose actors end without draining."""


class ActorStatus(Message):
    """State of one wanted actor."""

    user: str
    """Owner of the job."""
    job: str
    name: str
    slots: int = 0
    """Number of slots that it holds until it ends."""
    devices: list[int] = Field(default_factory=list[int])
    """Numbers of these slots."""
    attempt: int
    """Attempt of the job for which it was started."""
    state: Literal["running", "restarting", "exited", "failed"]
    """exited: with code 0; failed: finally; restarting: waits for its next start."""
    exit_code: int | None = None
    """Exit code of the last process."""
    restarts: int = 0
    fruitless: int = Field(default=0, ge=0)
    """Failures in a row without finished work."""
    error: str = ""
    """Last error that it reported."""
    silent_s: float = Field(default=0.0, ge=0)
    """Seconds since the last heartbeat, once that is long."""
    pid: int | None = None


GroupKind = Literal["nvlink", "numa", ""]


class Gpu(Message):
    """A GPU of a node."""

    index: int = Field(ge=0)
    """Index at the driver, of a MIG instance that of its GPU."""
    uuid: str = ""
    """UUID of the GPU or MIG instance."""
    is_instance: bool = False
    """Whether it is a MIG instance, which cannot work together with another one."""
    model: str
    memory_bytes: int = 0
    used_bytes: int = 0
    """Memory in use by all processes."""
    utilization: float = Field(default=0.0, ge=0, le=1)
    """Recent share of time in use."""
    numa: int | None = None
    """NUMA node of the machine that it is closest to; null: unknown."""


class NodeStatus(Message):
    """A node's answer to a sync, and its record in the KV bucket of nodes."""

    node: str
    host: str
    slots: int = Field(ge=0, le=MAX_SLOTS)
    slot_kind: Literal["gpu", "cpu"] = "cpu"
    """Kind of device that a slot is."""
    slot_model: str = ""
    """Model of the GPU or CPU."""
    groups: list[list[int]] = Field(default_factory=list[list[int]])
    """Closely linked slots (NVLink, else NUMA); empty: all alike."""
    groups_by: GroupKind = ""
    """Kind of link within a group; empty: unknown."""
    link: str = ""
    """Fast network shared with nodes that name the same."""
    gpus: list[Gpu] = Field(default_factory=list[Gpu])
    """A slot's number is an index of this list."""
    actors: list[ActorStatus] = Field(default_factory=list[ActorStatus])
    draining: bool = False
    """Whether it is ending and offers no slots."""
    packages: dict[str, str] = Field(default_factory=dict[str, str])
    """Versions of Python, computing packages, CUDA and NCCL."""
    time: float
    """Seconds since the epoch."""
    epoch: int = Field(default=0, ge=0)
    """Highest epoch of a scheduler's lease that it has seen; it obeys that scheduler."""
    store_lost: float | None = None
    """Time at which it found that the broker had lost its store; null: never."""
    clock_ahead_s: float | None = None
    """Seconds by which its clock is ahead of the scheduler's; null: not measured yet."""

    def named_at(self, at: str) -> str:
        """Return the node's name, its key; checks the names of its actors, too."""
        for actor in self.actors:
            JobScope(actor.user, actor.job)
            token(actor.name, what="actor")
        return token(self.node, what="node")


def differences(packages: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Name packages with differing versions, by node: `torch 2.6.0 on a, b; 2.5.1 on c`.

    Nodes without package information are skipped.
    """
    listed = [(node, versions) for node, versions in packages if versions]
    lines: list[str] = []
    for package in MUST_MATCH:
        by_version: dict[str, list[str]] = {}
        for node, versions in listed:
            by_version.setdefault(versions.get(package, "none"), []).append(node)
        if len(by_version) > 1:
            parts = (f"{version} on {some_names(nodes)}" for version, nodes in by_version.items())
            lines.append(f"{package} {'; '.join(parts)}")
    return lines


def some_names(nodes: list[str]) -> str:
    """Return the names of the first of many nodes."""
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class NodeList(Message):
    """The nodes that answer: reply of the scheduler's `nodes`."""

    nodes: list[NodeStatus]
    trouble: str = ""
    """Problem that keeps the pool from working; empty: none."""


class RemoveRun(Message):
    """Remove the run folder of a deleted job, on `node.<n>.remove`."""

    user: str
    """Owner of the job."""
    job: str
    run_dir: str


class DamagedRecord(Message):
    """A record of the pool that is ignored because it is damaged."""

    bucket: str
    key: str
    why: str


class DamagedRecords(Message):
    """Reply of the scheduler's `damaged`: records of the caller's jobs, for admins all."""

    records: list[DamagedRecord]
    """The first damaged records, by bucket and key."""
    total: int = Field(default=0, ge=0)


class SchedulerLease(Message):
    """The leading scheduler, in the KV bucket of leases; taken over when it stops changing."""

    holder: str
    """Host, process id and a random part; empty: given back."""
    epoch: int
    """Grows with each holder."""
    beat: int = 0


class LookQuestion(Message):
    """Which files, game and functions of a job a node has, on `node.<n>.look`; sent before it is
    queued."""

    files: list[Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=list[str], max_length=512
    )
    game: str = Field(default="", max_length=512)
    """Registered name, or `package.module:Class`; empty: none."""
    functions: list[Annotated[str, Field(max_length=512)]] = Field(
        default_factory=list[str], max_length=64
    )
    """Functions of the user's that actors import, as `package.module:function`."""
    user: str = Field(default="", max_length=64)
    """Owner of the job, whose questions on disks that hang hold up no other's."""


class ModelQuestion(Message):
    """Whether a node can load a model, on `node.<n>.model`; sent before a job is queued."""

    model: str = Field(min_length=1, max_length=4096)
    """Folder on the node, or `owner/name` of the hub."""
    alike: bool = False
    """Give the same answer for every path without a model, existing or not."""
    user: str = Field(default="", max_length=64)
    """As in `LookQuestion`."""


class InspectRequest(Request):
    """Inspect a job's model on a node, on `rpc.<u>.scheduler.inspect`; repeated until done."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    request_id: str = Field(min_length=1, max_length=64)
    """Id of the request, equal in repeated ones."""
    config: dict[str, Any]
    """Configuration of the job."""


class InspectQuestion(Message):
    """Inspect a job's model with the code of a run, on `node.<n>.inspect`."""

    config: dict[str, Any]
    """Configuration of the job."""
