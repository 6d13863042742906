"""Issues tasks: as many as the staleness gate admits, under the next numbers.

The ledger of task numbers (issued, trained, dropped, and what is issued next) is pure: it is
changed only by calls and uses neither broker nor clock. Its state is part of each checkpoint; later
changes are read again from the task queue, the rollout log and the batch records.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from ...broker.rollouts import RolloutLog
from ...broker.tasks import TaskQueue
from ...schemas.config.job import JobConfig
from ...schemas.control import PublishTasksRequest, ReserveRequest, TaskSpec
from ...schemas.number_set import NumberSet
from ...schemas.rollout import Group
from ...schemas.task import MAX_TRIES, Blame, DropReason, Task
from ...schemas.wire.errors import StateError
from ...schemas.wire.trace import new_trace
from ..training.state import LearnerState
from .data_order import TaskOrder
from .staleness import Staleness, min_version, num_admissible, returns_credit


def is_issued_again(reason: DropReason, tries: int) -> bool:
    """Return whether a task dropped for `reason` after some failed tries is issued again.

    If all returns are equal, they may always be equal: another task takes its place.
    """
    if reason == "stale":
        return True
    return reason in ("failed", "malformed") and tries + 1 < MAX_TRIES


@dataclass(frozen=True)
class Issue:
    """A task that may be issued."""

    number: int
    index: int
    reissue_of: int | None
    slot: int
    tries: int = 0


class Ledger:
    """Tracks all task numbers of a job, and all positions of its data order."""

    def __init__(self, state: LearnerState) -> None:
        self.trained = NumberSet(state.trained)
        self.dropped = NumberSet(state.dropped)
        self.next_task = state.next_task
        self._next_index = state.next_index
        self._indices = NumberSet(state.indices)
        self._to_reissue: dict[int, int] = dict(state.owed)
        self._tries: dict[int, int] = dict(state.owed_tries)
        self._client_tasks: dict[int, Task] = {}
        self._client_reissues: dict[int, Task] = {task.task: task for task in state.owed_tasks}
        self._index_of: dict[int, int] = {}
        self._in_log: set[int] = set()
        self._reissued = NumberSet()
        self._repeated = NumberSet(state.repeated)
        self._to_repeat: dict[int, Task] = {}
        self._free_numbers: list[int] = []
        self._lost_positions: list[int] = []
        self._recovery_limit = 0
        self._issued: dict[int, Task] = {}
        self.min_versions: dict[int, int] = {}
        """Numbers issued and not in the log yet -> oldest version their tokens may have."""

    def __contains__(self, number: object) -> bool:
        """Return whether a number is trained or dropped."""
        assert isinstance(number, int)
        return number in self.trained or number in self.dropped

    @property
    def num_credits(self) -> int:
        """Admission credits that were returned.

        A number that was used before it was issued is skipped in its turn, and counts from then on.
        """
        return self.dropped.count_below(self.next_task)

    # -- noting --------------------------------------------------------------------------------

    def expect(self, limit: int) -> None:
        """Assume until `find_missing` that numbers below `limit` were issued before a crash."""
        self._recovery_limit = limit

    def was_issued(self, number: int) -> bool:
        """Return whether a number may have been issued."""
        return number < max(self.next_task, self._recovery_limit)

    def note_task(self, task: Task) -> None:
        """Record a task that was issued or is in the queue."""
        self._note(task.task, task)
        if task.task not in self:
            self._issued[task.task] = task
            if task.task not in self._in_log:
                self.min_versions[task.task] = task.min_version

    def issued_under(self, number: int) -> Task | None:
        """Return the undecided task issued under a number; None for one that is unknown."""
        return self._issued.get(number)

    def issued_instead_of(self, task: Task) -> Task | None:
        """Return the task issued under the number of `task`, if it differs from `task`.

        A fenced-off learner may have issued `task`.
        """
        issued = self._issued.get(task.task)
        return None if issued is None or issued.identity == task.identity else issued

    def note_in_log(self, number: int, claimed: Task | None) -> None:
        """Record that a number's group is in the log.

        `claimed` is the group's task, None if it cannot be read. After a crash, it counts for a
        number without other information.
        """
        if number in self or not self.was_issued(number):
            return
        self._note(number, None if number in self.min_versions else claimed)
        self._in_log.add(number)
        self.min_versions.pop(number, None)
        if number in self._free_numbers:
            self._free_numbers.remove(number)

    def _note(self, number: int, task: Task | None) -> None:
        self.next_task = max(self.next_task, number + 1)
        if task is None:
            return
        if task.reissue_of is not None and task.reissue_of < number:
            if self._to_reissue.pop(task.reissue_of, None) is not None:
                self._tries.pop(task.reissue_of, None)
            self._client_reissues.pop(task.reissue_of, None)
            self._reissued.add(task.reissue_of)
            if task.index is None:
                self._repeated.add(task.reissue_of)
        # No position is issued under a number smaller than the position.
        if task.index is not None and task.index <= number:
            for old in [n for n, at in self._to_reissue.items() if at == task.index and n < number]:
                del self._to_reissue[old]
                self._tries.pop(old, None)
            self._next_index = max(self._next_index, task.index + 1)
            if number not in self:
                self._index_of[number] = task.index
                if task.tries:
                    self._tries[number] = task.tries
        if task.index is None and task.issued and number not in self:
            self._client_tasks[number] = task

    def find_missing(self) -> None:
        """List the issued numbers and positions that are neither in the queue nor in the log.

        They are issued again. All tasks in the queue and in the log must have been recorded.
        """
        self._recovery_limit = 0
        known = set(self._index_of.values()) | set(self._to_reissue.values())
        self._lost_positions = [
            at for at in self._indices.gaps(self._next_index) if at not in known
        ]
        decided = NumberSet(self.trained.ranges() + self.dropped.ranges())
        self._free_numbers = [
            number
            for number in decided.gaps(self.next_task)
            if number not in self._in_log and number not in self.min_versions
        ]

    def find_repeated(self) -> list[int]:
        """Return the undecided numbers whose position was trained or also has another number.

        A fenced-off learner issued one of them. Of several numbers the lowest stays.
        """
        repeated: list[int] = []
        held: set[int] = set()
        for number, index in sorted(self._index_of.items()):
            if number in self._reissued:
                continue
            if index in held or index in self._indices:
                repeated.append(number)
            held.add(index)
        return repeated

    def withdraw(self, number: int) -> None:
        """Remove the task of a number that is not in the log; another is issued under it."""
        self._index_of.pop(number, None)
        self._issued.pop(number, None)
        self._tries.pop(number, None)
        self.min_versions.pop(number, None)
        self._free_numbers.append(number)

    # -- deciding ------------------------------------------------------------------------------

    def train(self, numbers: Iterable[int]) -> None:
        """Record numbers as trained."""
        for number in numbers:
            self.trained.add(number)
            self._settle(number)

    def drop(
        self,
        number: int,
        reason: DropReason,
        *,
        unplayable: bool = False,
        of_another_task: bool = False,
    ) -> bool:
        """Record that a group is never trained; its credit returns, once.

        Returns whether its task, a position of the data order or a client's task, will be issued
        again under another number; an `unplayable` task never is. A group that is `of_another_task`
        than was issued does not count as a failed try of the issued task.
        """
        if not returns_credit(reason) or number in self:
            return False
        self.dropped.add(number)
        tries = self._tries.pop(number, 0)
        task = self._client_tasks.pop(number, None)
        if task is not None:
            tries = task.tries
        if elsewhere := self._is_elsewhere(number):
            self._index_of.pop(number, None)
        again = (
            (of_another_task or is_issued_again(reason, tries)) and not unplayable and not elsewhere
        )
        tries += reason != "stale" and not of_another_task
        if again and task is not None:
            self._client_reissues[number] = task.model_copy(update={"tries": tries})
        elif again and number in self._index_of:
            self._to_reissue[number] = self._index_of.pop(number)
            if tries:
                self._tries[number] = tries
        self._settle(number)
        if (to_repeat := self._to_repeat.pop(number, None)) is not None:
            self.repeat(to_repeat)
        return self._waits_for_issue(number)

    def repeat(self, task: Task) -> None:
        """Issue a task that failed for good once more, at the request of its run's owner.

        It becomes a new task of the same content outside the data order, like a client's task. A
        repeated request, or one for a task that was trained or issued again, changes nothing; one
        for an undecided task holds when the task is dropped.
        """
        number = task.task
        is_elsewhere = number in self._reissued or self._waits_for_issue(number)
        if number in self.trained or number in self._repeated or is_elsewhere:
            return
        if number not in self.dropped:
            self._to_repeat[number] = task
            return
        self._repeated.add(number)
        self._client_reissues[number] = task.model_copy(
            update={"index": None, "item": None, "chosen_at": None, "tries": 0}
        )

    def _waits_for_issue(self, number: int) -> bool:
        return number in self._to_reissue or number in self._client_reissues

    def _is_elsewhere(self, number: int) -> bool:
        """Return whether a task was issued again, or its position has another number.

        An unreadable group does not name the task that it replaces, but the next one does.
        """
        index = self._index_of.get(number)
        if number in self._reissued or index is None:
            return number in self._reissued
        held = any(at == index and n != number for n, at in self._index_of.items())
        return held or index in self._indices

    def _settle(self, number: int) -> None:
        index = self._index_of.pop(number, None)
        self._client_tasks.pop(number, None)
        self._issued.pop(number, None)
        if number not in self._to_reissue:
            self._tries.pop(number, None)
        if index is not None and number not in self._reissued:
            self._indices.add(index)
        self._in_log.discard(number)
        self.min_versions.pop(number, None)

    # -- issuing -------------------------------------------------------------------------------

    def num_issuable(self, version: int, max_staleness: int, batch: int, total_steps: int) -> int:
        """Count the tasks that the staleness gate admits now."""
        allowed = num_admissible(version, max_staleness, batch, self.num_credits, total_steps)
        return max(0, allowed - self.next_task) + len(self._free_numbers)

    def reserve(self) -> tuple[int, int]:
        """Return the next number, and its slot."""
        if self._free_numbers:
            number = self._free_numbers.pop(0)
        else:
            while self.next_task in self.dropped:
                self.next_task += 1
            number = self.next_task
            self.next_task += 1
        return number, max(0, number - self.dropped.count_below(number))

    @property
    def num_client_reissues(self) -> int:
        """Number of clients' tasks to issue again."""
        return len(self._client_reissues)

    def next_client_reissue(self) -> tuple[Task, int, int]:
        """Return the oldest client's task to issue again, with its new number and slot."""
        number, slot = self.reserve()
        return self._client_reissues.pop(min(self._client_reissues)), number, slot

    def next_issue(self) -> Issue:
        """Return the next number with its position of the data order."""
        number, slot = self.reserve()
        if self._to_reissue:
            old = min(self._to_reissue)
            return Issue(number, self._to_reissue.pop(old), old, slot, self._tries.pop(old, 0))
        if self._lost_positions:
            return Issue(number, self._lost_positions.pop(0), None, slot)
        index = self._next_index
        self._next_index += 1
        return Issue(number, index, None, slot)

    def write_to(self, state: LearnerState) -> None:
        """Write the ledger into the state of a checkpoint."""
        state.trained = self.trained.ranges()
        state.dropped = self.dropped.ranges()
        state.indices = self._indices.ranges()
        state.next_task = self.next_task
        state.next_index = self._next_index
        state.owed = sorted(self._to_reissue.items())
        state.owed_tasks = [task for _, task in sorted(self._client_reissues.items())]
        state.repeated = self._repeated.ranges()
        state.owed_tries = sorted(
            (owed, n) for owed, n in self._tries.items() if owed in self._to_reissue
        )


_log = structlog.get_logger()


class TaskIssuer:
    """Publishes the tasks of a job; numbers for external agents pass through the same gate."""

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
        """`bound` is the last staleness bound, if it is chosen automatically.

        `check_owner` raises FencedError if another learner has taken over the job.
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
        """Whether the ledger is complete, so that clients may reserve numbers."""

    async def check_owner(self) -> None:
        """Raise FencedError if another learner has taken over the job; or DeadlineError."""
        if self._check_owner is not None:
            await self._check_owner()

    async def issue(self, version: int) -> int:
        """Publish every task that may be issued at `version`; return their number.

        Dropped tasks of clients come first; if clients publish all tasks, no others are issued.
        """
        room = self.num_issuable(version)
        again = min(room, self._ledger.num_client_reissues)
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
        """Return a client's dropped task under a new number."""
        task, number, slot = self._ledger.next_client_reissue()
        changes = {
            "task": number,
            "issued": time.time(),
            "reissue_of": task.task,
            "min_version": self._min_version(slot, version),
        }
        return task.model_copy(update=changes)

    async def issue_lost(self) -> None:
        """Queue again the issued tasks that are neither queued nor in the log.

        The broker's store has lost them. The queue is read first: a group is appended before its
        task leaves the queue.
        """
        waiting = list(self._ledger.min_versions)
        queued = await self._queue.pending_numbers()
        for number in waiting:
            task = self._ledger.issued_under(number)
            if task is None or number in queued or await self._log.contains(number):
                continue
            _log.warning("task_lost", task=number)
            await self._publish(task)

    def write_to(self, state: LearnerState) -> None:
        """Write the staleness bound into the state of a checkpoint."""
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
        """Count the tasks that the gate admits at `version`."""
        batch_size = self._config.training.batch_size
        return self._ledger.num_issuable(version, self.staleness.now, batch_size, self._total_steps)

    async def publish_for_client(self, request: PublishTasksRequest, version: int) -> int:
        """Issue a client's tasks, as many as the gate admits; return their number.

        Raises StateError while the learner starts, FencedError after another has taken over.
        """
        self._refuse_while_closed()
        await self.check_owner()
        count = min(len(request.tasks), self.num_issuable(version))
        # All numbers are reserved before the first wait, so that concurrent requests also respect
        # the gate.
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
        """Reserve numbers for an external agent that appends its groups itself.

        Raises StateError if the gate admits none, or while the learner starts.
        """
        self._refuse_while_closed()
        count = min(request.count, self.num_issuable(version))
        if count == 0:
            raise StateError(
                "the run accepts no more trajectories now: the staleness bound is reached",
                hint="try again after the next training step",
            )
        reserved = [self._ledger.reserve() for _ in range(count)]
        for number, slot in reserved:
            self._ledger.min_versions[number] = self._min_version(slot, version)
            self._reserved[number] = time.monotonic() + request.deadline_s
        return [number for number, _ in reserved]

    async def expire_reservations(self) -> None:
        """Close the numbers that an agent did not use in time; later appends are refused."""
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
            message=f"no trajectories were appended for the reserved task {number}",
            hint="append within the deadline of the reservation",
        )
        return Group(task=task, error=blame, source="learner")

    @property
    def is_left_alone(self) -> bool:
        """Whether no task is in progress and only external actors can publish one."""
        return self._config.training.tasks == "external" and not self._ledger.min_versions

    def waits_for(self, missing: int) -> str:
        """Return the name of the wait for the groups missing from the next batch."""
        if self._config.training.tasks != "external":
            return f"the generators: {missing} more groups"
        coming, lost = len(self._ledger.min_versions), self._ledger.num_credits
        why = f" ({lost} could not be trained)" if lost else ""
        return f"{missing} more groups from outside, {coming} of them under way{why}"

    def _refuse_while_closed(self) -> None:
        if not self.is_open:
            raise StateError(
                "the learner is starting and has not read yet which tasks were issued",
                hint="try again in some seconds",
            )

    def _min_version(self, slot: int, version: int) -> int:
        """Return the oldest version that may generate the task; older tokens would be dropped."""
        training = self._config.training
        oldest = min_version(slot, training.batch_size, self.staleness.now)
        if training.staleness_policy == "train":
            return oldest
        return max(oldest, version - self.staleness.largest)

    async def _publish(self, task: Task) -> None:
        """Queue a task, replacing one queued by a fenced-off learner under its number."""
        self._ledger.note_task(task)
        while not await self._queue.publish(task, traceparent=new_trace()):
            other = await self._queue.find(task.task)
            if other is None or other.identity == task.identity:
                _log.info("task_was_there", task=task.task)
                return
            await self.check_owner()
            _log.warning("task_replaced", task=task.task, position=task.index, old=other.index)
            await self._queue.remove(task.task)
