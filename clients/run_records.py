"""The records of a run: its episodes and the log lines of its actors."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import structlog

from ..broker.client.connection import Broker
from ..broker.feed import follow, stored_lines
from ..broker.jetstream.streams import stream_info, stream_subjects
from ..broker.kept_rollouts import RunRollouts
from ..broker.rollouts import BatchLog, LogEntry
from ..schemas.job import FINAL_STATES, JobRecord
from ..schemas.metric import Event, LogLines, Metric
from ..schemas.rollout import Group, Trajectory
from ..schemas.wire.errors import NotFoundError, did_you_mean
from ..schemas.wire.images import restore_images
from ..schemas.wire.subjects import JobScope
from .pool import Pool

_AT_ONCE = 64
_IN_ORDER_AT_ONCE = 8
_log = structlog.get_logger()


@dataclass(frozen=True)
class LoggedEpisode:
    """One trajectory of the log, or a failed task without any."""

    seq: int
    group: Group
    number: int
    trajectory: Trajectory | None
    step: int | None

    @property
    def reward(self) -> float:
        """Return of the episode; a failed task sorts last."""
        return self.trajectory.reward if self.trajectory else float("-inf")

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON output."""
        shared = {
            "seq": self.seq,
            "task": self.group.task.task,
            "sample": self.group.task.sample,
            "step": self.step,
            "source": self.group.source,
        }
        if self.trajectory is None:
            return {**shared, "error": self.group.error.model_dump() if self.group.error else None}
        trajectory = self.trajectory
        return {
            **shared,
            "episode": self.number,
            "reward": trajectory.reward,
            "rewards": trajectory.rewards,
            "finish": trajectory.ended_by,
            "finish_reasons": trajectory.finish_reasons,
            "versions": [trajectory.min_version, trajectory.max_version],
            "num_generated": trajectory.num_generated,
            "logprob_mean": float(trajectory.logprobs[trajectory.mask == 1].mean()),
            "tries": trajectory.num_tries,
            "failures": [failure.model_dump() for failure in trajectory.failures],
            "messages": restore_images(trajectory.messages, self.group.images),
            "row_of": trajectory.episode if trajectory.episode >= 0 else None,
            "kind": trajectory.kind,
            "info": trajectory.info,
        }


@dataclass(frozen=True)
class EpisodeFilter:
    """Selects the episodes of a run to read."""

    step: int | None = None
    """Only episodes trained in this step."""
    errors: bool = False
    """Only failed episodes."""
    most: int | None = None
    """Largest number of episodes, newest first; None: all."""

    def matches(self, episode: LoggedEpisode) -> bool:
        """Return whether the filter selects an episode."""
        trajectory = episode.trajectory
        return not self.errors or trajectory is None or bool(trajectory.failures)


async def read_steps(broker: Broker, scope: JobScope, rollouts: RunRollouts) -> dict[int, int]:
    """Return the step that trained each entry; archived entries have it in their file names."""
    try:
        records = await BatchLog(broker, scope).read_all()
    except NotFoundError:
        return rollouts.steps
    return rollouts.steps | {seq: record.step for _, record in records for seq in record.seqs}


async def read_episodes(
    rollouts: RunRollouts, step_of: Mapping[int, int], episode_filter: EpisodeFilter
) -> list[LoggedEpisode]:
    """Return the episodes of a run that a filter selects, newest first.

    Raises NotFoundError for a step that was not trained.
    """
    step = episode_filter.step
    _check_step(step, step_of)
    episodes: list[LoggedEpisode] = []
    before: int | None = None
    while seqs := rollouts.before(before, _AT_ONCE):
        before = seqs[-1]
        wanted_seqs = [seq for seq in seqs if step is None or step_of.get(seq) == step]
        for entry in await asyncio.gather(*map(rollouts.get, wanted_seqs)):
            if entry is not None:
                logged = _episodes(entry, step_of.get(entry.seq))
                episodes += filter(episode_filter.matches, reversed(list(logged)))
        if episode_filter.most is not None and len(episodes) >= episode_filter.most:
            break
    return episodes


async def episodes_in_order(
    rollouts: RunRollouts, step_of: Mapping[int, int], episode_filter: EpisodeFilter
) -> AsyncGenerator[LoggedEpisode, None]:
    """Yield the episodes of a run that a filter selects, oldest first, with few in memory.

    Raises NotFoundError for a step that was not trained.
    """
    step, num_episodes = episode_filter.step, 0
    _check_step(step, step_of)
    seqs = (seq for seq in rollouts.all_seqs() if step is None or step_of.get(seq) == step)
    while chunk := list(islice(seqs, _IN_ORDER_AT_ONCE)):
        for entry in await asyncio.gather(*map(rollouts.get, chunk)):
            for episode in _episodes(entry, step_of.get(entry.seq)) if entry is not None else ():
                if episode_filter.matches(episode):
                    yield episode
                    num_episodes += 1
                if num_episodes == episode_filter.most:
                    return


def _check_step(step: int | None, step_of: Mapping[int, int]) -> None:
    if step is not None and step not in step_of.values():
        trained = f"trained are 1 to {max(step_of.values())}" if step_of else "none is trained yet"
        raise NotFoundError(f"step {step} is not in the batch log", hint=trained)


def _episodes(entry: LogEntry, step: int | None) -> Iterator[LoggedEpisode]:
    group = entry.group
    if group is None:
        _log.warning("rollout_malformed", seq=entry.seq, error=str(entry.error))
        return
    if not group.trajectories:
        yield LoggedEpisode(entry.seq, group, 0, None, step)
    for number, trajectory in enumerate(group.trajectories):
        yield LoggedEpisode(entry.seq, group, number, trajectory, step)


# The log lines of a run's actors.

_START_POLL_S = 1.0


async def check_actor(pool: Pool, record: JobRecord, actor: str | None) -> None:
    """Raise NotFoundError for an actor that the run does not have and that wrote no lines."""
    known = {actor_record.name for actor_record in record.actors}
    if actor is None or actor in known:
        return
    scope = record.scope
    with contextlib.suppress(NotFoundError):  # nothing was written yet, or it is archived
        subjects = await stream_subjects(pool.broker, scope.stream_log, scope.log("*"))
        known |= {subject.rpartition(".")[2] for subject in subjects}
    if actor not in known:
        raise NotFoundError(
            f"run {record.name} has no actor {actor!r}", hint=did_you_mean(actor, sorted(known))
        )


async def read_log_lines(
    pool: Pool, record: JobRecord, *, follow_on: bool
) -> AsyncGenerator[LogLines | Event, None]:
    """Yield the stored lines, and with `follow_on` new ones without end.

    An event reports lines that were discarded before they were read.
    """
    scope = record.scope
    while not await _has_log(pool, scope):
        if record.state in FINAL_STATES or not follow_on:
            return
        await asyncio.sleep(_START_POLL_S)
        record = await pool.find(record.job)
    if not follow_on:
        async with aclosing(stored_lines(pool.broker, scope)) as stored:
            async for lines in stored:
                yield lines
        return
    with pool.broker.availability.patience():
        async with aclosing(follow(pool.broker, scope, ("log",))) as messages:
            async for message in messages:
                if not isinstance(message, Metric):
                    yield message


async def _has_log(pool: Pool, scope: JobScope) -> bool:
    try:
        await stream_info(pool.broker, scope.stream_log)
    except NotFoundError:
        return False
    return True
