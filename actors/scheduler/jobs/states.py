"""The rules of a job: its actors, its next state, its user's holdings, and the quotas. Pure.

On a node a slot is a GPU or a CPU share. The learner, each generator, each inference server and an
evaluator hold as many slots as configured, or share one if learner and generator share a GPU;
environment hosts hold none, so that a laptop with two cores can run a job.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ....broker.jetstream.streams import BUCKET_BYTES
from ....broker.jobs import is_final
from ....schemas.config.job import GeneratorConfig, JobConfig
from ....schemas.config.sections import BROKER, LearnerConfig
from ....schemas.control import rank_name
from ....schemas.job import (
    FINAL_STATES,
    HOLDING_STATES,
    MAX_RECORD_BYTES,
    TEACHER_KEY,
    WANDB_KEY,
    ActorPlacement,
    JobRecord,
    JobState,
    Role,
    SamplerTokens,
    SecretName,
    TrainerUsage,
)
from ....schemas.node import ActorStatus, WantedActor
from ....schemas.user import Quota
from ....schemas.wire.errors import ConfigError, QuotaError

# -- actors ----------------------------------------------------------------------------------------

KINDS = ("train", "sft", "eval", "infer", "tinker")
"""Kinds of jobs that this pool runs."""


def actors_for(config: JobConfig, kind: str) -> list[ActorPlacement]:
    """Return the unplaced actors of a job; the first is the main one.

    Raises ConfigError for a configuration that does not fit this kind of job.
    """
    hosts = [_actor("environment", f"environment-{i}") for i in range(config.env.hosts)]
    if kind == "eval":
        if not config.env.game:
            raise ConfigError(
                "the configuration has no game to evaluate a model with",
                hint="set env.game, or evaluate the folder like another run: "
                "`tinkermq eval FOLDER --like RUN`",
            )
        return [_actor("evaluator", "evaluator-0", config.evaluator_slots), *hosts]
    if kind == "infer":
        return [*_servers(config.generator), *hosts]
    if kind == "tinker":
        if not config.tinker.base:
            raise ConfigError(
                "a service for the Tinker API was submitted without the name of its base model",
                hint="set tinker.base, or submit it with `tinkermq tinker up --model NAME=FOLDER`",
            )
        samplers = [
            _actor("sampler", f"sampler-{i}", config.generator.slots)
            for i in range(config.generator.count)
        ]
        return [_actor("trainer", "trainer", config.learner.slots), *samplers]
    if kind == "sft" and not config.sft.data:
        raise ConfigError(
            "an SFT run was submitted without data",
            hint="name files with conversations in sft.data, or submit it with `tinkermq train`",
        )
    actors = _learner(config.learner)
    actors += _generators(config)
    if config.has_evaluator:
        actors.append(_actor("evaluator", "evaluator-0", config.evaluator_slots))
    return actors + hosts if config.plays_in_pool else actors


def _generators(config: JobConfig) -> list[ActorPlacement]:
    """Return the generators; one that may share the learner's slot is marked."""
    slots = config.generator_slots
    made = [_actor("generator", f"generator-{i}", slots) for i in range(config.generator.count)]
    if not config.may_colocate:
        return made
    shared = {"shares": "learner", "slots": 0, "own_slots": 0}
    if config.placement == "auto":
        shared |= {"slots": slots, "own_slots": slots}
    return [actor.model_copy(update=shared) for actor in made]


def _learner(config: LearnerConfig) -> list[ActorPlacement]:
    """Return a learner and its other ranks, which are placed together or not at all."""
    slots = config.slots // config.ranks
    spread = config.spread if config.ranks > 1 else []
    learner = ActorPlacement(name="learner", role="learner", slots=slots, spread=spread)
    return [learner, *(_actor("rank", rank_name(n), slots) for n in range(1, config.ranks))]


def vital(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return the actors whose lost node requeues the job: the main actor, and its ranks."""
    return [main_actor(actors), *(actor for actor in actors if actor.role == "rank")]


def _servers(config: GeneratorConfig) -> list[ActorPlacement]:
    if config.count < 1:
        raise ConfigError(
            "generator.count=0 leaves an inference run without a server",
            hint="it is the number of servers of an inference job: set generator.count=1 or more "
            "(`tinkermq serve --servers 1`)",
        )
    return [_actor("server", f"server-{i}", config.slots) for i in range(config.count)]


def main_actor(actors: Sequence[ActorPlacement]) -> ActorPlacement:
    """Return the actor whose end ends the job: a training's learner, or the first server."""
    return actors[0]


def scaled(
    actors: Sequence[ActorPlacement], role: Role, count: int, slots: int = 0
) -> list[ActorPlacement]:
    """Return the actors with `count` of one role; the newest are removed, free names reused.

    New actors hold `slots` slots each.
    """
    remaining: list[ActorPlacement] = []
    left = count
    for actor in actors:
        if actor.role == role:
            if left == 0:
                continue
            left -= 1
        remaining.append(actor)
    names = {actor.name for actor in remaining}
    free = (name for i in range(1 + len(names) + left) if (name := f"{role}-{i}") not in names)
    added = (_actor(role, next(free), slots) for _ in range(left))
    return remaining + [actor.model_copy(update={"added": True}) for actor in added]


def unplaced(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return the actors that have no node."""
    return [
        ActorPlacement(
            name=actor.name,
            role=actor.role,
            slots=actor.own_slots or actor.slots,
            spread=actor.spread,
            shares=actor.shares,
            own_slots=actor.own_slots,
        )
        for actor in actors
    ]


def at_rest(actors: Sequence[ActorPlacement]) -> list[ActorPlacement]:
    """Return the actors of an ended job, none of which runs."""
    return [
        actor if actor.state == "failed" else actor.model_copy(update={"state": "exited"})
        for actor in actors
    ]


def slots_of(actors: Sequence[ActorPlacement]) -> int:
    """Return the total slots of the actors."""
    return sum(actor.slots for actor in actors)


def wanted_actor(record: JobRecord, actor: ActorPlacement, config: JobConfig) -> WantedActor:
    """Return a node's description of an actor to run."""
    threads = 1
    if actor.role in ("learner", "rank", "trainer"):
        threads = config.learner.threads
    elif actor.role in ("generator", "evaluator", "server", "sampler"):
        threads = config.generator.threads
    data = [*config.env.train_data, *config.env.val_data]
    return WantedActor(
        user=record.user,
        job=record.job,
        name=actor.name,
        role=actor.role,
        slots=actor.slots,
        devices=actor.devices,
        attempt=record.attempt,
        run_dir=record.run_dir,
        output_roots=record.output_roots,
        own_folders=record.own_folders,
        reads=data if actor.role == "environment" else [],
        programs=_shown_to_programs(config) if actor.role == "environment" else None,
        threads=threads,
        secrets=bool(secrets_of(record, actor)),
        max_restarts=config.limits.max_restarts,
    )


def secrets_of(record: JobRecord, actor: ActorPlacement) -> list[SecretName]:
    """Return the secrets of its owner that an actor of a job needs."""
    of_it: list[SecretName] = []
    if actor.name == main_actor(record.actors).name:
        of_it.append(WANDB_KEY)
    if actor.role == "generator":
        of_it.append(TEACHER_KEY)
    return [name for name in of_it if name in record.secrets]


def _shown_to_programs(config: JobConfig) -> list[str] | None:
    """Return the folders that a job's programs or their rewards read; None for a job of games."""
    agent = config.agent
    tasks = [source.folder for source in config.task_sources if source is not None]
    named = [agent.files, agent.reward_files, *agent.read, *tasks]
    return [folder for folder in named if folder is not None] if agent.command else None


def _actor(role: Role, name: str, slots: int = 0) -> ActorPlacement:
    return ActorPlacement(name=name, role=role, slots=slots)


ACTIVE = HOLDING_STATES
MOST_CHARACTERS = 500


@dataclass(frozen=True)
class Transition:
    """A state and the reason for it."""

    state: JobState
    reason: str


def next_state(
    record: JobRecord,
    statuses: Mapping[str, ActorStatus],
    silent: frozenset[str],
    max_node_failures: int,
) -> Transition | None:
    """Return the next state of the job, or None if it does not change.

    `statuses` are the nodes' last statuses by actor name; statuses of an older attempt are ignored.
    `silent` are the nodes that were silent for too long.
    """
    if record.state in FINAL_STATES:
        return None
    if record.state in {"QUEUED", "LOST"}:
        return _waiting(record, max_node_failures)
    if not record.actors:
        return Transition("FAILED", "its record names no actors")
    current = {
        actor.name: status
        for actor in record.actors
        if (status := statuses.get(actor.name)) is not None and status.attempt == record.attempt
    }
    main = main_actor(record.actors)
    return (
        _lost_node(record, silent)
        or _failed(current)
        or _stopped(record, current.get(main.name))
        or _ended(record, current.get(main.name))
        or _started(record, current)
    )


def _waiting(record: JobRecord, max_node_failures: int) -> Transition | None:
    """Return the transition of a job without running actors."""
    if record.stop != "no":
        return Transition("CANCELLED", "stopped while it waited for a node")
    if record.state == "LOST" and record.losses > max_node_failures:
        return Transition("FAILED", f"lost its node {record.losses} times: {record.reason}")
    if record.state == "LOST":
        return Transition("QUEUED", f"queued again from its last checkpoint: {record.reason}")
    return None


def _lost_node(record: JobRecord, silent: frozenset[str]) -> Transition | None:
    for actor in vital(record.actors):
        if actor.node is not None and actor.node in silent:
            reason = f"node {actor.node!r} of the {actor.role} was silent for too long"
            return Transition("LOST", reason)
    return None


def _failed(statuses: Mapping[str, ActorStatus]) -> Transition | None:
    for name, status in statuses.items():
        if status.state == "failed":
            error = status.error or f"it ended with code {status.exit_code}"
            return Transition("FAILED", f"{name} failed: {error}")
    return None


def _stopped(record: JobRecord, main: ActorStatus | None) -> Transition | None:
    """End a stopping job whose main actor has no process to drain."""
    if record.stop == "no":
        return None
    if record.stop == "now":
        return _end(record, "stopped without a checkpoint")
    if main is None and record.state == "STARTING":
        return Transition("CANCELLED", "stopped before it ran")
    if main is not None and main.state == "restarting":
        return _end(record, f"stopped while the {main_actor(record.actors).role} was down")
    return None


def _ended(record: JobRecord, main: ActorStatus | None) -> Transition | None:
    if main is None or main.state != "exited":
        return None
    role = main_actor(record.actors).role
    if record.state == "STARTING":
        return Transition("RUNNING", f"the {role} ran to its end")
    if record.stop != "no":
        return _end(record, "stopped with a checkpoint" if record.trains else "stopped")
    return Transition("COMPLETED", f"the {role} has finished")


def _end(record: JobRecord, reason: str) -> Transition:
    complete = record.stop_complete and record.state != "STARTING"
    return Transition("COMPLETED" if complete else "CANCELLED", reason)


def _started(record: JobRecord, statuses: Mapping[str, ActorStatus]) -> Transition | None:
    if record.state != "STARTING":
        return None
    placed = [actor.name for actor in record.actors if actor.node is not None]
    up = [
        name
        for name in placed
        if name in statuses and statuses[name].state in {"running", "exited"}
    ]
    if len(up) < len(placed):
        return None
    return Transition("RUNNING", "all actors run")


def with_statuses(
    record: JobRecord, statuses: Mapping[str, ActorStatus], silent: frozenset[str]
) -> list[ActorPlacement]:
    """Return the job's actors, updated from the nodes' statuses.

    An actor whose node fell silent is placed again; if the main actor or a learner's rank was
    there, the whole job becomes LOST (`next_state`).
    """
    return [
        _with_status(record, actor, statuses.get(actor.name), silent) for actor in record.actors
    ]


def _with_status(
    record: JobRecord,
    actor: ActorPlacement,
    status: ActorStatus | None,
    silent: frozenset[str],
) -> ActorPlacement:
    if actor.node in silent and actor.name not in {item.name for item in vital(record.actors)}:
        return actor.model_copy(update={"node": None, "devices": [], "state": "placed"})
    if status is None or status.attempt != record.attempt or actor.node is None:
        return actor
    state = "running" if status.state == "restarting" else status.state
    fields = {"state": state, "restarts": status.restarts, "trouble": _trouble(status)}
    return actor.model_copy(update=fields)


def _trouble(status: ActorStatus) -> str:
    """Return the problem of an actor: it is silent, or fails without finishing any work."""
    if status.silent_s:
        return (
            f"{status.name} has sent no heartbeat for {status.silent_s:.0f} s: it may be "
            "stopped, hang, or not reach the broker; if that lasts, its node restarts it"
        )[:MOST_CHARACTERS]
    if not status.fruitless:
        return ""
    times = "once" if status.fruitless == 1 else f"{status.fruitless} times"
    error = status.error.splitlines()[0] if status.error else "for an unknown reason"
    return f"{status.name} failed {times} without finishing any work: {error}"[:MOST_CHARACTERS]


# -- tokens used at Tinker services, as stored in the service's record -----------------------------


def with_usage(record: JobRecord, usage: TrainerUsage) -> JobRecord:
    """Return a record updated from a report; the same object if nothing is new."""
    return _with_sampled(record, usage) if usage.sampler else _with_trained(record, usage)


def _with_trained(record: JobRecord, usage: TrainerUsage) -> JobRecord:
    """Keep the larger sums; a restarted trainer may report less."""
    known = record.tinker_tokens
    newer = {user: used for user, used in usage.tokens.items() if used > known.get(user, 0)}
    return record.model_copy(update={"tinker_tokens": {**known, **newer}}) if newer else record


def _with_sampled(record: JobRecord, usage: TrainerUsage) -> JobRecord:
    """Add a sampler's tokens since its last report; a restarted sampler starts at 0."""
    last = record.tinker_samplers.get(usage.sampler)
    if last is not None and last.since > usage.since:  # a later sampler has this name
        return record
    counted = last.tokens if last is not None and last.since == usage.since else {}
    newer = {user: used for user, used in usage.tokens.items() if used > counted.get(user, 0)}
    if not newer:
        return record
    known = record.tinker_sampled
    sums = {user: known.get(user, 0) + n - counted.get(user, 0) for user, n in newer.items()}
    now = SamplerTokens(since=usage.since, tokens={**counted, **newer})
    return record.model_copy(
        update={
            "tinker_sampled": {**known, **sums},
            "tinker_samplers": {**record.tinker_samplers, usage.sampler: now},
        }
    )


# -- quotas ----------------------------------------------------------------------------------------
#
# Part of the bucket of jobs is reserved: submissions stop before it is full, so that stops, repairs
# and the scheduler's own changes always have room.

USERS_BYTES = BUCKET_BYTES * 3 // 4
"""Part of the bucket of jobs for the records of users."""
ADMINS_BYTES = BUCKET_BYTES * 7 // 8
"""Part of the bucket of jobs for users and admins; the rest is for changes to existing records."""
_DELETE = "delete old runs (`tinkermq delete`)"
_WAIT = "wait for the end of others, or stop some (`tinkermq stop`)"
_ADVICE = {
    "max_slots": ("slots", "ask for fewer (generator.count), or stop other runs"),
    "max_jobs": ("runs, ended ones included", _DELETE),
    "max_live_jobs": ("runs that have not ended", _WAIT),
    "max_actors": (
        "processes, environment hosts included",
        "ask for fewer (generator.count, env.hosts), or stop other runs",
    ),
    "max_stored_bytes": ("bytes of streams", f"lower `limits`, or {_DELETE}"),
    "max_record_bytes": ("bytes of job records", f"keep configurations small, and {_DELETE}"),
}


def reserved_bytes(config: JobConfig) -> int:
    """Return the bytes that a job's limits reserve for its streams."""
    limits = config.limits
    segments = limits.segment_bytes if config.keeps_segments else 0
    checkpoints = limits.checkpoint_bytes if config.storage.url == BROKER else 0
    streams = limits.task_bytes + limits.rollout_bytes + 3 * limits.log_bytes
    return streams + segments + checkpoints


def stored_bytes(record: JobRecord | None) -> int:
    """Return the bytes of a job's streams that count in quotas; 0 before they are created."""
    counts = record is not None and (not is_final(record) or record.has_streams)
    return record.stored_bytes if record is not None and counts else 0


def holdings(records: Iterable[JobRecord], num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return what the jobs of a user hold; `num_bytes` are the sizes of records by key."""
    held = dict.fromkeys(_ADVICE, 0)
    for record in records:
        held["max_jobs"] += 1
        held["max_record_bytes"] += num_bytes.get(record.scope.key, 0)
        held["max_stored_bytes"] += stored_bytes(record)
        if not is_final(record):
            held["max_live_jobs"] += 1
            placed = [actor for actor in record.actors if actor.node is not None]
            held["max_slots"] += slots_of(placed)
            held["max_actors"] += len(placed)
    return held


def check_room(user: str, quota: Quota, held: Mapping[str, int], **more: int) -> None:
    """Raise QuotaError if a user holding `held` may not hold `more`, by names of bounds."""
    for name, number in more.items():
        most, has = getattr(quota, name), held.get(name, 0)
        what, advice = _ADVICE[name]
        if most is not None and number > 0 and has + number > most:
            text = f"user {user!r} has {has:,} {what}, and this asks for {number:,} more: the quota"
            if not has:
                text = f"the run needs {number:,} {what}, the quota of user {user!r}"
            raise QuotaError(
                f"{text} is {most:,}",
                hint=f"{advice}, or ask an admin for more (`tinkermq user quota {user}`)",
            )


def check_bucket(total_bytes: int, more: int, *, is_admin: bool) -> None:
    """Raise QuotaError if the records of all users leave no room for another of `more` bytes."""
    most = ADMINS_BYTES if is_admin else USERS_BYTES
    if total_bytes + more > most:
        raise QuotaError(
            f"the records of all runs of the pool have {total_bytes:,} bytes; with this one they "
            f"exceed the {most:,} for submissions",
            hint="delete old runs (`tinkermq delete`); running ones continue and can be stopped",
        )


def check_record(record: JobRecord, num_bytes: int) -> None:
    """Raise QuotaError for a record over the size limit."""
    if num_bytes > MAX_RECORD_BYTES:
        raise QuotaError(
            f"the record of run {record.name} would have {num_bytes:,} bytes; the limit is "
            f"{MAX_RECORD_BYTES:,}",
            hint="keep the configuration small: name files instead of data; or submit a new run",
        )
