"""A job's next state, from its record and what the nodes say of its actors. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from ....schemas.job import (
    FINAL_STATES,
    HOLDING_STATES,
    ActorPlacement,
    JobRecord,
    JobState,
)
from ....schemas.node import ActorStatus
from ....schemas.tinker.usage import SamplerTokens, TrainerUsage
from .actors import main_actor, vital

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
    max_losses: int,
) -> Transition | None:
    """Return the state that the job moves to now, or None if it stays.

    `statuses` is what nodes last said, by actor name; what they say of an older attempt is
    ignored. `silent` are the nodes not heard of for too long.
    """
    if record.state in FINAL_STATES:
        return None
    if record.state in {"QUEUED", "LOST"}:
        return _waiting(record, max_losses)
    if not record.actors:
        return Transition("FAILED", "its record names no actors")
    said = {
        actor.name: status
        for actor in record.actors
        if (status := statuses.get(actor.name)) is not None and status.attempt == record.attempt
    }
    main = main_actor(record.actors)
    return (
        _lost(record, silent)
        or _failed(said)
        or _stopped(record, said.get(main.name))
        or _ended(record, said.get(main.name))
        or _started(record, said)
    )


def _waiting(record: JobRecord, max_losses: int) -> Transition | None:
    """Judge a job none of whose actors run."""
    if record.stop != "no":
        return Transition("CANCELLED", "stopped while it waited for a node")
    if record.state == "LOST" and record.losses > max_losses:
        return Transition("FAILED", f"lost its node {record.losses} times: {record.reason}")
    if record.state == "LOST":
        return Transition("QUEUED", f"queued again from its last checkpoint: {record.reason}")
    return None


def _lost(record: JobRecord, silent: frozenset[str]) -> Transition | None:
    for actor in vital(record.actors):
        if actor.node is not None and actor.node in silent:
            reason = f"node {actor.node!r} of the {actor.role} was silent for too long"
            return Transition("LOST", reason)
    return None


def _failed(said: Mapping[str, ActorStatus]) -> Transition | None:
    for name, status in said.items():
        if status.state == "failed":
            told = status.error or f"it ended with code {status.exit_code}"
            return Transition("FAILED", f"{name} failed: {told}")
    return None


def _stopped(record: JobRecord, main: ActorStatus | None) -> Transition | None:
    """End a job that shall stop while its main actor has no process that could drain."""
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
        return _end(record, "stopped with a checkpoint")
    return Transition("COMPLETED", f"the {role} has finished")


def _end(record: JobRecord, reason: str) -> Transition:
    complete = record.stop_complete and record.state != "STARTING"
    return Transition("COMPLETED" if complete else "CANCELLED", reason)


def _started(record: JobRecord, said: Mapping[str, ActorStatus]) -> Transition | None:
    if record.state != "STARTING":
        return None
    placed = [actor.name for actor in record.actors if actor.node is not None]
    up = [name for name in placed if name in said and said[name].state in {"running", "exited"}]
    if len(up) < len(placed):
        return None
    return Transition("RUNNING", "all actors run")


def told_placements(
    record: JobRecord, statuses: Mapping[str, ActorStatus], silent: frozenset[str]
) -> list[ActorPlacement]:
    """Return the job's actors with what the nodes said of them entered.

    An actor whose node fell silent has no node any more and is placed again; that of the main one,
    and of a learner's ranks, makes the whole job LOST (`next_state`).
    """
    return [_told(record, actor, statuses.get(actor.name), silent) for actor in record.actors]


def _told(
    record: JobRecord,
    actor: ActorPlacement,
    status: ActorStatus | None,
    silent: frozenset[str],
) -> ActorPlacement:
    if actor.node in silent and actor.name not in {one.name for one in vital(record.actors)}:
        return actor.model_copy(update={"node": None, "devices": [], "state": "placed"})
    if status is None or status.attempt != record.attempt or actor.node is None:
        return actor
    state = "running" if status.state == "restarting" else status.state
    told = {"state": state, "restarts": status.restarts, "trouble": _trouble(status)}
    return actor.model_copy(update=told)


def _trouble(status: ActorStatus) -> str:
    """Say what is wrong with an actor: it stands still, or fails without doing any work."""
    if status.silent_s:
        return (
            f"{status.name} has told no heartbeat for {status.silent_s:.0f} s: it is stopped, "
            "hangs, or does not reach the broker; its node starts it again when that lasts"
        )[:MOST_CHARACTERS]
    if not status.fruitless:
        return ""
    times = "once" if status.fruitless == 1 else f"{status.fruitless} times"
    error = status.error.splitlines()[0] if status.error else "for an unknown reason"
    return f"{status.name} failed {times} with no work done: {error}"[:MOST_CHARACTERS]


# What Tinker services tell of their users' tokens, as it is kept in the service's record. Pure.


def with_usage(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Return a record with what is new in what was told; the same one if nothing is."""
    return _with_sampled(record, told) if told.sampler else _with_trained(record, told)


def _with_trained(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Take the larger sums; a trainer that starts again may know less."""
    known = record.tinker_tokens
    newer = {user: used for user, used in told.tokens.items() if used > known.get(user, 0)}
    return record.model_copy(update={"tinker_tokens": {**known, **newer}}) if newer else record


def _with_sampled(record: JobRecord, told: TrainerUsage) -> JobRecord:
    """Add what a sampler has computed since it last told; one that starts again begins at 0."""
    last = record.tinker_samplers.get(told.sampler)
    if last is not None and last.since > told.since:  # a later one has its name
        return record
    counted = last.tokens if last is not None and last.since == told.since else {}
    newer = {user: used for user, used in told.tokens.items() if used > counted.get(user, 0)}
    if not newer:
        return record
    known = record.tinker_sampled
    sums = {user: known.get(user, 0) + n - counted.get(user, 0) for user, n in newer.items()}
    now = SamplerTokens(since=told.since, tokens={**counted, **newer})
    return record.model_copy(
        update={
            "tinker_sampled": {**known, **sums},
            "tinker_samplers": {**record.tinker_samplers, told.sampler: now},
        }
    )
