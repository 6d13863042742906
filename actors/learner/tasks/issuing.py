"""Issuing tasks: as many as the staleness gate lets through, under the next numbers."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from ....broker.rollouts import RolloutLog
from ....broker.tasks import TaskQueue
from ....schemas.config.job import JobConfig
from ....schemas.control import PublishTasksRequest, ReserveRequest, TaskSpec
from ....schemas.rollout import Group
from ....schemas.task import Blame, Task
from ....schemas.wire.errors import StateError
from ....schemas.wire.trace import new_trace
from .auto_staleness import Staleness
from .data_order import TaskOrder
from .ledger import Issue, Ledger
from .staleness_gate import min_version
from .state import LearnerState

_log = structlog.get_logger()


class TaskIssuer:
    """Publishes the tasks of a job; numbers given to external agents pass the same gate."""

    def __init__(
        self,
        queue: TaskQueue,
        log: RolloutLog,
        ledger: Ledger,
        order: TaskOrder,
        config: JobConfig,
        total_steps: int,
        bound: int = 0,
        check_owner: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`bound` is the staleness bound that was in force, where it is chosen.

        `check_owner` raises FencedError when another learner has taken the job over.
        """
        self._check_owner = check_owner
        self._queue = queue
        self._log = log
        self._ledger = ledger
        self._order = order
        self._config = config
        self._total_steps = total_steps
        self.staleness = Staleness(config.training, bound)
        self._reserved: dict[int, float] = {}
        self.is_open = False
        """Whether the ledger is complete, so that clients may be given numbers."""

    async def check_owner(self) -> None:
        """Raise FencedError when another learner has taken the job over; DeadlineError."""
        if self._check_owner is not None:
            await self._check_owner()

    async def issue(self, version: int) -> int:
        """Publish every task that may be issued at `version`; return how many.

        Those of clients that were dropped come first; where clients bring all tasks, nothing else.
        """
        room = self.num_issuable(version)
        again = min(room, self._ledger.num_owed_tasks)
        tasks = [self._again(version) for _ in range(again)]
        if self._config.training.tasks != "external":
            issues = [self._ledger.next_issue() for _ in range(room - again)]
            tasks += [self._task(issue, version) for issue in issues]
        if tasks:
            await self.check_owner()
        async with asyncio.TaskGroup() as publishing:
            for task in tasks:
                publishing.create_task(self._publish(task))
        return len(tasks)

    def _again(self, version: int) -> Task:
        """Return a client's task that was dropped, under a new number."""
        task, number, slot = self._ledger.next_owed_task()
        changes = {
            "task": number,
            "issued": time.time(),
            "reissue_of": task.task,
            "min_version": self._min_version(slot, version),
        }
        return task.model_copy(update=changes)

    def write_to(self, state: LearnerState) -> None:
        """Put the staleness bound into the state of a checkpoint."""
        state.bound = self.staleness.now

    def _task(self, issue: Issue, version: int) -> Task:
        chosen = self._order.choose(issue.index, version)
        return Task(
            task=issue.number,
            issued=time.time(),
            sample=chosen.sample,
            index=issue.index,
            item=chosen.item,
            chosen_at=chosen.chosen_at,
            reissue_of=issue.reissue_of,
            tries=issue.tries,
            seed=chosen.seed,
            min_version=self._min_version(issue.slot, version),
            group_size=self._config.rollout.group_size,
            greedy_baseline=self._config.algorithm.advantage == "remax",
        )

    def num_issuable(self, version: int) -> int:
        """Count the tasks that the gate lets through at `version`."""
        batch_size = self._config.training.batch_size
        return self._ledger.num_issuable(version, self.staleness.now, batch_size, self._total_steps)

    async def publish_for_client(self, request: PublishTasksRequest, version: int) -> int:
        """Issue a client's tasks, as many as the gate lets through now; return how many.

        Raises StateError while the learner starts, FencedError once another one has taken over.
        """
        self._refuse_while_closed()
        await self.check_owner()
        count = min(len(request.tasks), self.num_issuable(version))
        # All numbers are taken before the first wait: the gate holds for everybody who asks.
        tasks = [self._client_task(spec, version) for spec in request.tasks[:count]]
        for task in tasks:
            await self._publish(task)
        return count

    def _client_task(self, spec: TaskSpec, version: int) -> Task:
        number, slot = self._ledger.reserve()
        return Task(
            task=number,
            issued=time.time(),
            sample=spec.sample,
            seed=self._order.task_seed(number) if spec.seed is None else spec.seed,
            min_version=self._min_version(slot, version),
            group_size=self._config.rollout.group_size,
            greedy_baseline=self._config.algorithm.advantage == "remax",
            reset_kwargs=spec.reset_kwargs,
        )

    def reserve(self, request: ReserveRequest, version: int) -> list[int]:
        """Give numbers to an external agent that appends its groups itself.

        Raises StateError when the gate lets none through now, or while the learner starts.
        """
        self._refuse_while_closed()
        count = min(request.count, self.num_issuable(version))
        if count == 0:
            raise StateError(
                "the job takes no more trajectories now: the staleness bound is reached",
                hint="try again after the next training step",
            )
        given = [self._ledger.reserve() for _ in range(count)]
        for number, slot in given:
            self._ledger.min_versions[number] = self._min_version(slot, version)
            self._reserved[number] = time.monotonic() + request.deadline_s
        return [number for number, _ in given]

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

    @property
    def is_left_alone(self) -> bool:
        """Whether nothing is under way, and only somebody outside can bring something."""
        return self._config.training.tasks == "external" and not self._ledger.min_versions

    def waits_for(self, missing: int) -> str:
        """Say who is to bring the groups that the next batch lacks."""
        if self._config.training.tasks != "external":
            return f"the generators: {missing} more groups"
        coming, lost = len(self._ledger.min_versions), self._ledger.num_credits
        why = f" ({lost} that came could not be trained)" if lost else ""
        return f"{missing} more groups from outside, {coming} of them under way{why}"

    def _refuse_while_closed(self) -> None:
        if not self.is_open:
            raise StateError(
                "the learner is starting and does not know yet which tasks were issued",
                hint="try again in some seconds",
            )

    def _min_version(self, slot: int, version: int) -> int:
        """Give the oldest version that may begin the task; older tokens would be dropped."""
        training = self._config.training
        oldest = min_version(slot, training.batch_size, self.staleness.now)
        if training.staleness_policy == "train":
            return oldest
        return max(oldest, version - self.staleness.largest)

    async def _publish(self, task: Task) -> None:
        """Queue a task; one that another learner has queued under its number makes room for it."""
        self._ledger.note_task(task)
        while not await self._queue.publish(task, traceparent=new_trace()):
            other = await self._queue.find(task.task)
            if other is None or other.identity == task.identity:
                _log.info("task_was_there", task=task.task)
                return
            await self.check_owner()
            _log.warning("task_replaced", task=task.task, position=task.index, was=other.index)
            await self._queue.remove(task.task)
