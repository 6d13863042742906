"""Issuing tasks: as many as the staleness gate lets through, under the next numbers."""

import asyncio
import time

import structlog

from ...broker.rollouts import RolloutLog
from ...broker.tasks import TaskQueue
from ...schemas.config import JobConfig
from ...schemas.control import PublishTasksRequest, ReserveRequest
from ...schemas.errors import StateError
from ...schemas.rollout import Group
from ...schemas.task import Blame, Task
from .admission import min_version
from .data_order import DataOrder
from .ledger import Issue, Ledger

_log = structlog.get_logger()


class Issuer:
    """Publishes the tasks of a job; numbers given to external agents pass the same gate."""

    def __init__(
        self,
        queue: TaskQueue,
        log: RolloutLog,
        ledger: Ledger,
        order: DataOrder,
        config: JobConfig,
        total_steps: int,
    ) -> None:
        self._queue = queue
        self._log = log
        self._ledger = ledger
        self._order = order
        self._config = config
        self._total_steps = total_steps
        self._reserved: dict[int, float] = {}

    async def issue(self, version: int) -> int:
        """Publish every task that may be issued at `version`; return how many."""
        if self._config.training.tasks == "external":
            return 0
        issues = [self._ledger.next_issue() for _ in range(self.num_issuable(version))]
        async with asyncio.TaskGroup() as publishing:
            for issue in issues:
                publishing.create_task(self._publish(self._task(issue)))
        return len(issues)

    def _task(self, issue: Issue) -> Task:
        return Task(
            task=issue.number,
            sample=self._order.sample(issue.index),
            index=issue.index,
            reissue_of=issue.reissue_of,
            seed=self._order.task_seed(issue.index),
            min_version=self._min_version(issue.slot),
            group_size=self._config.rollout.group_size,
            greedy_baseline=self._config.algorithm.advantage == "remax",
        )

    def num_issuable(self, version: int) -> int:
        """Count the tasks that the gate lets through at `version`."""
        training = self._config.training
        return self._ledger.num_issuable(
            version, training.max_staleness, training.batch_size, self._total_steps
        )

    async def publish_for_client(self, request: PublishTasksRequest, version: int) -> int:
        """Issue a client's tasks, as many as the gate lets through now; return how many."""
        count = min(len(request.tasks), self.num_issuable(version))
        for spec in request.tasks[:count]:
            number, slot = self._ledger.reserve()
            await self._publish(
                Task(
                    task=number,
                    sample=spec.sample,
                    seed=self._order.task_seed(number) if spec.seed is None else spec.seed,
                    min_version=self._min_version(slot),
                    group_size=self._config.rollout.group_size,
                    greedy_baseline=self._config.algorithm.advantage == "remax",
                    reset_kwargs=spec.reset_kwargs,
                )
            )
        return count

    def reserve(self, request: ReserveRequest, version: int) -> list[int]:
        """Give numbers to an external agent that appends its groups itself.

        Raises StateError when the gate lets none through now.
        """
        count = min(request.count, self.num_issuable(version))
        if count == 0:
            raise StateError(
                "the job takes no more trajectories now: the staleness bound is reached",
                hint="try again after the next training step",
            )
        numbers = [self._ledger.reserve()[0] for _ in range(count)]
        for number in numbers:
            self._ledger.min_versions[number] = 0
            self._reserved[number] = time.monotonic() + request.deadline_s
        return numbers

    async def expire_reservations(self) -> None:
        """Close the numbers that an agent did not use in time: a late append is then refused."""
        now = time.monotonic()
        for number, deadline in list(self._reserved.items()):
            if number not in self._ledger.min_versions:
                del self._reserved[number]
            elif deadline < now:
                del self._reserved[number]
                await self._log.append(self._tombstone(number))

    def _tombstone(self, number: int) -> Group:
        task = Task(task=number, seed=0, group_size=self._config.rollout.group_size)
        blame = Blame(
            boundary="task",
            code="reservation_expired",
            message=f"no trajectories came for the reserved task {number}",
            hint="append within the deadline of the reservation",
        )
        return Group(task=task, error=blame, source="learner")

    def _min_version(self, slot: int) -> int:
        training = self._config.training
        return min_version(slot, training.batch_size, training.max_staleness)

    async def _publish(self, task: Task) -> None:
        self._ledger.note_task(task)
        if not await self._queue.publish(task):
            _log.info("task_was_there", task=task.task)
