"""One task: its episodes at once, failed ones tried again, into one group for the rollout log."""

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

from ...broker.feed import publish_dead
from ...broker.rollouts import RolloutLog
from ...envs.remote import Start
from ...schemas.config import JobConfig
from ...schemas.rollout import Group, Trajectory
from ...schemas.task import Blame, DeadLetter, Task
from ..runtime import JobContext
from .agent_loop import AgentLoop, EpisodeFailed, EpisodePlan

_FINAL_CODES = frozenset({"prompt_too_long", "data", "config", "model"})
_log = structlog.get_logger()


class GroupFailed(Exception):
    """A task whose tries are used up; carries the group that records it."""

    def __init__(self, group: Group, blame: Blame, num_attempts: int) -> None:
        super().__init__(blame.message)
        self.group = group
        self.blame = blame
        self.num_attempts = num_attempts


@dataclass
class _Cost:
    """What failed tries of a task cost."""

    tokens: int = 0
    attempts: int = 0


class GroupRunner:
    """Runs the episodes of tasks for one generator."""

    def __init__(self, loop: AgentLoop, config: JobConfig, source: str) -> None:
        self._loop = loop
        self._config = config
        self._source = source

    async def run(self, task: Task, attempt: str) -> Group:
        """Roll a task out `group_size` times (and once greedily, where asked for).

        `attempt` makes the episodes' ids unique among generators that hold the same task. Raises
        GroupFailed when an episode failed as often as `rollout.max_tries` allows, EngineError when
        the engine has ended: that is nobody's try.
        """
        started = time.time()
        cost = _Cost()
        plans = self._plans(task, attempt)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._episode(plan, cost), name=plan.episode)
                    for plan in plans
                ]
        except BaseExceptionGroup as raised:
            failed, rest = raised.split(EpisodeFailed)
            if failed is None or rest is not None:
                raise
            raise self._given_up(task, failed, cost, started) from raised
        return Group(
            task=task,
            trajectories=[item.result() for item in running],
            source=self._source,
            kv_on_swap=self._config.generator.kv_on_swap,
            started=started,
            finished=time.time(),
            tokens_wasted=cost.tokens,
        )

    def _plans(self, task: Task, attempt: str) -> list[EpisodePlan]:
        """All episodes of a group start from the same state: the prompt is what they share."""
        start = Start("train", task.sample, task.seed, task.reset_kwargs)
        return [
            EpisodePlan(
                episode=f"{attempt}-{task.task}-{number}",
                start=start,
                greedy=number >= task.group_size,
            )
            for number in range(task.group_size + int(task.greedy_baseline))
        ]

    async def _episode(self, plan: EpisodePlan, cost: _Cost) -> Trajectory:
        """Try one episode until it succeeds; a host that vanished does not count as a try."""
        blames: list[Blame] = []
        tries = 0
        while True:
            tries += 1
            episode = f"{plan.episode}-{tries}"
            try:
                trajectory = await self._loop.run(replace(plan, episode=episode))
            except EpisodeFailed as failure:
                self._loop.check_engine()
                cost.tokens += failure.tokens_wasted
                cost.attempts += 1
                _log.warning("episode_failed", episode=episode, **failure.blame.model_dump())
                blames.append(failure.blame)
                counted = len([blame for blame in blames if blame.code != "host_gone"])
                final = failure.blame.code in _FINAL_CODES
                if final or counted >= self._config.rollout.max_tries:
                    raise
                continue
            if not blames:
                return trajectory
            return trajectory.model_copy(update={"num_tries": tries, "failures": blames})

    def _given_up(
        self,
        task: Task,
        failed: BaseExceptionGroup[EpisodeFailed],
        cost: _Cost,
        started: float,
    ) -> GroupFailed:
        first = failed.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, EpisodeFailed)
        group = Group(
            task=task,
            error=first.blame,
            source=self._source,
            started=started,
            finished=time.time(),
            tokens_wasted=cost.tokens,
        )
        return GroupFailed(group, first.blame, cost.attempts)


async def append_given_up(context: JobContext, log: RolloutLog, failure: GroupFailed) -> bool:
    """Record a task that was given up: a dead letter, an event, and its group in the log.

    Returns False if the log has a group for the task already.
    """
    task, blame = failure.group.task, failure.blame
    letter = DeadLetter(
        task=task,
        blame=blame,
        num_attempts=max(1, failure.num_attempts),
        source=context.name,
        time=time.time(),
    )
    await publish_dead(context.broker, context.scope, letter)
    await context.event(
        "task_given_up",
        f"task {task.task}: {blame.message}",
        task=task.task,
        boundary=blame.boundary,
    )
    return await log.append(failure.group)
