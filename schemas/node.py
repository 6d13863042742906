"""What the scheduler and the nodes say to each other."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from .job import MAX_CONFIG_BYTES, Role
from .wire.message import Message, Request
from .wire.subjects import NAME_PATTERN, JobScope, token

MAX_SLOTS = 4096
"""Slots of one node at most."""
MUST_MATCH = ("tinkermq", "torch", "transformers", "cuda", "nccl")
"""Packages whose versions the ranks of one learner must have in common."""
CLOCK_BOUND_S = 2.0
"""A clock that is further off than this is told."""
MAX_TEXT_CHARS = 1_000
"""Of what a check of a game says."""
_NAMED = 3


class WantedActor(Message):
    """An actor that a node shall run."""

    user: str = Field(pattern=NAME_PATTERN)
    """Owner of the job."""
    job: str = Field(pattern=NAME_PATTERN)
    """Job id."""
    name: str = Field(pattern=NAME_PATTERN)
    """Name within the job."""
    role: Role
    """What it does."""
    slots: int = Field(default=1, ge=0)
    """Slots that it holds."""
    devices: list[int] = Field(default_factory=list[int])
    """Which slots of the node: on a GPU node the GPUs that it sees."""
    attempt: int = Field(default=1, ge=1)
    """Attempt of the job: a higher one starts an exited actor again."""
    run_dir: str
    """Folder of the run; logs go to `logs/attempt_<n>/<name>.log` in it."""
    output_roots: list[str] = Field(default_factory=list[str])
    """Folders below which its job may write; none: anywhere."""
    reads: list[str] = Field(default_factory=list[str])
    """Data files that an environment host reads."""
    programs: list[str] | None = None
    """Folders that an environment host shows to agent programs, which it runs behind walls of their
    own; None: it hosts a game."""
    own_code: list[str] | None = None
    """What a learner that runs functions of the job's owner reads beside its run's folder: models
    and data; None: it runs none."""
    own_network: bool = False
    """Whether such a learner has the node's network; else it reaches the broker alone."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of its computation."""
    secrets: bool = False
    """Whether to ask for secrets at its start."""
    max_restarts: int = Field(default=5, ge=0)
    """Failing more often within ten minutes, or in a row without any work done, is final."""


class NodeSync(Message):
    """All actors that a node shall run, on `node.<n>.sync`: missing ones are started, others
    stopped."""

    scheduler: str
    """The scheduler that asks."""
    epoch: int = 0
    """Of the scheduler's lease: a node refuses what an older holder still sends."""
    actors: list[WantedActor]
    """The wanted actors."""
    kill: list[str] = Field(default_factory=list[str])
    """Jobs (`<user>.<job>`) whose actors are ended without draining."""


class ActorStatus(Message):
    """What became of one wanted actor."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    name: str
    """Name within the job."""
    slots: int = 0
    """Slots that it holds until it has ended."""
    devices: list[int] = Field(default_factory=list[int])
    """Which slots of the node."""
    attempt: int
    """Attempt of the job it was started for."""
    state: Literal["running", "restarting", "exited", "failed"]
    """exited: with code 0, done; failed: for good; restarting: waits for its next start."""
    exit_code: int | None = None
    """Exit code of the last process."""
    restarts: int = 0
    """How often it was started again."""
    fruitless: int = Field(default=0, ge=0)
    """How often in a row it failed without having finished a piece of work."""
    error: str = ""
    """Last error it told."""
    silent_s: float = Field(default=0.0, ge=0)
    """For how long a process that runs has told no heartbeat, once that is long."""
    pid: int | None = None
    """Process id."""


class Gpu(Message):
    """A GPU that a node gives away."""

    index: int = Field(ge=0)
    """Number at the driver."""
    model: str
    """Name of the model."""
    memory_bytes: int = 0
    """Memory it has."""
    used_bytes: int = 0
    """Memory in use, by whomever."""
    utilization: float = Field(default=0.0, ge=0, le=1)
    """Share of the last moments in which it computed."""
    numa: int = 0
    """Memory domain of the host it hangs at."""


class NodeStatus(Message):
    """A node's answer to a sync, and its record in the KV bucket of nodes."""

    node: str
    """Name of the node."""
    host: str
    """Host name."""
    slots: int = Field(ge=0, le=MAX_SLOTS)
    """Slots it can give away."""
    slot_kind: Literal["gpu", "cpu"] = "cpu"
    """What a slot is."""
    slot_model: str = ""
    """Model of the GPU or CPU."""
    groups: list[list[int]] = Field(default_factory=list[list[int]])
    """Slots that are linked closely (NVLink, else a common memory domain); empty: all alike."""
    link: str = ""
    """Name of a fast network that it shares with the nodes that say the same."""
    gpus: list[Gpu] = Field(default_factory=list[Gpu])
    """Its GPUs; a slot's number is an index of this list."""
    actors: list[ActorStatus] = Field(default_factory=list[ActorStatus])
    """What it runs."""
    draining: bool = False
    """Whether it was told to end: it gives no slots away any more."""
    packages: dict[str, str] = Field(default_factory=dict[str, str])
    """Versions of Python and of what its actors compute with, CUDA's and NCCL's among them."""
    time: float
    """Seconds since the epoch."""
    epoch: int = Field(default=0, ge=0)
    """The highest that it has heard of a scheduler's lease; it does what that scheduler says."""
    store_lost: float | None = None
    """When it found, in seconds since the epoch, that the broker had come back without what it had
    stored while this node ran."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the scheduler's, in seconds, as told by the scheduler; None: it
    has not answered yet."""

    def named_at(self, at: str) -> str:
        """Return the node's name, which is its key; those of its actors are checked with it."""
        for actor in self.actors:
            JobScope(actor.user, actor.job)
            token(actor.name, what="actor")
        return token(self.node, what="node")


def differences(packages: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Say which packages that must match do not, by node: `torch 2.6.0 on a, b; 2.5.1 on c`.

    Nodes that do not tell their packages are passed over.
    """
    told = [(node, versions) for node, versions in packages if versions]
    found: list[str] = []
    for package in MUST_MATCH:
        by_version: dict[str, list[str]] = {}
        for node, versions in told:
            by_version.setdefault(versions.get(package, "none"), []).append(node)
        if len(by_version) > 1:
            parts = (f"{version} on {some_names(nodes)}" for version, nodes in by_version.items())
            found.append(f"{package} {'; '.join(parts)}")
    return found


def some_names(nodes: list[str]) -> str:
    """Name the first of many nodes."""
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


class NodeList(Message):
    """The nodes that answer: reply of the scheduler's `nodes`."""

    nodes: list[NodeStatus]
    """Their last answers, by name."""
    trouble: str = ""
    """What keeps the pool from going on, as the scheduler sees it; empty while all is well."""


class RemoveRun(Message):
    """A job was deleted: a node removes the run folder that it has of it, on `node.<n>.remove`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    run_dir: str
    """Folder of the run."""


class DamagedRecord(Message):
    """A record of the pool that counts for nothing."""

    bucket: str
    """The KV bucket that holds it."""
    key: str
    """Its key there."""
    why: str
    """What is wrong with it."""


class DamagedRecords(Message):
    """Reply of the scheduler's `damaged`: those of the caller's jobs, for admins all."""

    records: list[DamagedRecord]
    """The first of them, by bucket and key."""
    total: int = Field(default=0, ge=0)
    """How many there are."""


class SchedulerLease(Message):
    """Which scheduler reconciles, in the KV bucket of leases; taken over once it stands still."""

    holder: str
    """Host, process id and a random part; empty once it was given back."""
    epoch: int
    """Grows with every new holder, whatever their clocks say."""
    beat: int = 0
    """Grows with every renewal."""


class LookQuestion(Message):
    """What a job's hosts would look for on a node, on `node.<n>.look`; asked by a dry run."""

    files: list[Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=list[str], max_length=512
    )
    """Data files."""
    game: str = Field(default="", max_length=512)
    """A registered name, or `package.module:Class`; empty: none."""


class LookAnswer(Message):
    """What a node says of them."""

    known: bool = True
    """False: it could not find out in time."""
    missing: list[str] = Field(default_factory=list[str])
    """Files that are not there."""
    game: str = ""
    """Where the game would be imported from; empty: it cannot be, or was not asked for."""
    lacks_game: str = ""
    """Why it cannot be imported."""
    hint: str = ""
    """What to do about it."""


class ModelQuestion(Message):
    """Whether a node can have a model, on `node.<n>.model`; asked before a job is queued."""

    model: str = Field(min_length=1, max_length=4096)
    """Folder on the node, or `owner/name` of the hub."""
    alike: bool = False
    """Whether to say the same of everything at a path that is no model, be it there or not."""


class ModelAnswer(Message):
    """What a node says of a model."""

    known: bool
    """False: it could not find out in time."""
    missing: str = ""
    """Why it cannot have it; empty: it can."""
    hint: str = ""
    """What to do about it."""


class GameCheckRequest(Request):
    """Try a job on a node, on `rpc.<u>.scheduler.check_game`; asked again until it is done."""

    max_bytes: ClassVar[int] = MAX_CONFIG_BYTES

    request_id: str = Field(min_length=1, max_length=64)
    """Tells one check from the next: the same id asks for the same one."""
    config: dict[str, Any]
    """Configuration of the job."""
    look: Literal["game", "model"] = "game"
    """What of it is tried: its game is played, or its model and conversations are looked into."""


class GameCheck(Message):
    """The answer to one question about a game, or about what a job reads of its model."""

    name: str = Field(max_length=MAX_TEXT_CHARS)
    """What was asked."""
    ok: bool
    """Whether the answer is good."""
    detail: str = Field(default="", max_length=MAX_TEXT_CHARS)
    """What was found."""
    hint: str = Field(default="", max_length=MAX_TEXT_CHARS)
    """What to do when it is not good."""


class GameCheckReply(Message):
    """How far a check is."""

    done: bool
    """False: ask again."""
    node: str = ""
    """The node that played."""
    checks: list[GameCheck] = Field(default_factory=list[GameCheck])
    """What was found, in order."""


class PlayQuestion(Message):
    """Play a game without a model, on `node.<n>.play`."""

    wanted: WantedActor
    """The environment host that a job would have; the game runs where that would, with its
    walls."""
    env: dict[str, Any]
    """The `env` of the job's configuration."""
    seed: int = 0
    """The job's seed."""


class InspectQuestion(Message):
    """Look into the model of a job with the code of the run, on `node.<n>.inspect`."""

    config: dict[str, Any]
    """The job's configuration."""


class PlayAnswer(Message):
    """What came of it."""

    known: bool = True
    """False: the node plays another already, or cannot."""
    trouble: str = ""
    """Why it could not be played to the end; empty: it could."""
    hint: str = ""
    """What to do about that."""
    checks: list[GameCheck] = Field(default_factory=list[GameCheck])
    """What was found, in order."""
