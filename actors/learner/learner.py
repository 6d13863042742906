"""The learner: issues tasks under the staleness bound, trains from the log, publishes weights.

It is a function of the rollout log and the batch records. Every step is recorded before it is
trained, and the record names the one that it follows, so a second learner is fenced off. After a
crash the newest checkpoint is loaded and the recorded batches behind it are trained again, in
order: same batches, same weights.

Torch runs in one thread of its own; the event loop always answers.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from ...broker.batches import BatchLog
from ...broker.rollouts import RolloutLog
from ...broker.stored import get_all
from ...broker.tasks import TaskQueue
from ...schemas.batch import BatchRecord, Dropped
from ...schemas.config import JobConfig
from ...schemas.errors import MessageError, StorageError
from ...schemas.rollout import Group
from ...schemas.task import Task
from ..runtime import EXIT_DONE, EXIT_DRAINED, JobContext, settle_memory
from ..self_play import pool
from .admission import num_admissible
from .batching import form_batch
from .checkpoint import CheckpointStore, LearnerState
from .control import LearnerControl
from .data_order import TaskOrder
from .evaluations import Evaluations
from .failures import Failures
from .intake import Entry, Intake, batch_digest
from .issuing import Issuer
from .ledger import Ledger
from .policies import Policies
from .publishing import Publisher
from .reporting import Reporter
from .saving import Saver
from .step_trace import learner_time_use
from .torch_trace import TorchTracer

T = TypeVar("T")
_RECOVERY_S = 300.0
_EVALUATION_S = 1800.0
_LOOK_S = 1.0
_log = structlog.get_logger()


class Learner:
    """Trains one job."""

    def __init__(
        self,
        context: JobContext,
        policies: Policies,
        tokenizer: Any,
        state: LearnerState,
        order: TaskOrder,
        checkpoints: CheckpointStore,
        reporter: Reporter,
        *,
        vocab_size: int,
    ) -> None:
        config: JobConfig = context.config
        broker, scope = context.broker, context.scope
        self.context = context
        self.config = config
        self.state = state
        self.total_steps = policies.total_steps
        self.ledger = Ledger(state)
        self.intake = Intake(
            RolloutLog(broker, scope),
            vocab_size=vocab_size,
            max_tokens=config.rollout.max_tokens,
            group_size=config.rollout.group_size,
            greedy_baseline=config.algorithm.advantage == "remax",
            was_issued=self.ledger.was_issued,
            check_images=policies.check_images,
        )
        self.issuer = Issuer(
            TaskQueue(broker, scope, ack_wait_s=config.generator.ack_wait_s),
            RolloutLog(broker, scope),
            self.ledger,
            order,
            config,
            self.total_steps,
        )
        self.evaluations = Evaluations(broker, scope, reporter.log_evaluation, config)
        self.publisher = Publisher(context, policies.models, policies.snapshot)
        self._tracer = TorchTracer(context.run_dir / "traces")
        self.control = LearnerControl(
            context, self.issuer, self.intake, vocab_size, lambda: state.step, self._tracer
        )
        self._order = order
        self._policies = policies
        self._reporter = reporter
        self._batches = BatchLog(broker, scope)
        self._dropped: list[Dropped] = []
        self._failures = Failures(config.training.batch_size, config.limits.idle_s)
        self._torch = ThreadPoolExecutor(1, thread_name_prefix="torch")
        self._time_use = learner_time_use()
        self._saver = Saver(
            context,
            checkpoints,
            policies,
            tokenizer,
            state,
            self.ledger,
            self.intake,
            reporter,
            order,
            self._in_torch,
        )

    async def run(self) -> int:
        """Train until the last step is done or `stopping` is set; return the exit code."""
        await self.evaluations.load()
        records = await self._batches.read_all()
        self.intake.max_version = records[-1][1].step if records else self.state.step
        self.ledger.expect(await self._largest_number(records))
        async with asyncio.TaskGroup() as background:
            helpers = [
                background.create_task(self.intake.run(self.state.log_seq), name="intake"),
                background.create_task(self.evaluations.follow(), name="evaluations"),
                background.create_task(self._reporter.watch_actors(), name="actors"),
                background.create_task(self.publisher.serve(), name="weights"),
            ]
            await self.control.serve()
            await self._publish()
            await self._recover(records)
            await self._request_evaluation()
            settle_memory()
            self._reporter.tracer.forget()
            self._time_use.take()
            self.context.set_state("working", version=self.state.step)
            await self.context.event(
                "training_started", step=self.state.step, total_steps=self.total_steps
            )
            await self._train_until_done()
            await self._finish()
            for helper in helpers:
                helper.cancel()
        self._torch.shutdown()
        done = self.state.step >= self.total_steps or self.context.stop_asked
        return EXIT_DONE if done else EXIT_DRAINED

    # -- the loop ------------------------------------------------------------------------------

    async def _train_until_done(self) -> None:
        while self.state.step < self.total_steps:
            with self._time_use.doing("wait"):
                entries = await self._next_batch()
            if entries is None:
                return
            await self._train(entries, record=True)
            if self._saver.is_due:
                await self._save()

    async def _next_batch(self) -> list[Entry] | None:
        """Wait for the groups of the next step; None when told to stop."""
        training = self.config.training
        while not self.context.stopping.is_set():
            if self.control.checkpoint_wanted:
                self.control.checkpoint_done(await self._save())
            if self.control.paused:
                self.control.changed.clear()
                named = self.context.waiting("somebody to resume the job")
                with named, self._time_use.doing("paused"):
                    await self._look_again(self.control.changed)
                self._failures.heard()
                continue
            self.intake.changed.clear()  # before looking: what comes from now on is seen next time
            self._judge(self._notice_arrivals())
            await self.issuer.expire_reservations()
            decision = form_batch(
                self.intake.candidates(),
                version=self.state.step,
                batch_size=training.batch_size,
                max_staleness=training.largest_staleness,
                policy=training.staleness_policy,
                filter_equal_rewards=self.config.algorithm.filter_equal_rewards,
                decided=self.ledger,
                outstanding=self.ledger.min_versions.values(),
            )
            entries = [self.intake[seq] for seq in decision.train]
            self._drop(
                [Dropped(seq=s, task=self.intake[s].number, reason=r) for s, r in decision.dropped]
            )
            await self.issuer.issue(self.state.step)
            if entries:
                return entries
            if decision.dropped:
                continue
            if (error := self._failures.idle()) is not None:
                await self._save()
                raise error
            missing = training.batch_size - len(self.intake.candidates())
            with self.context.waiting(f"the generators: {max(missing, 0)} more groups"):
                await self._look_again(self.intake.changed)
        return None

    async def _look_again(self, event: asyncio.Event) -> None:
        """Wait until an event is set, but look again now and then."""
        try:
            await asyncio.wait_for(self.context.unless_stopping(event.wait()), _LOOK_S)
        except TimeoutError:
            return

    async def _record(self, entries: list[Entry]) -> None:
        """Write down which groups the next step trains, before it does."""
        step = self.state.step + 1
        record = BatchRecord(
            step=step,
            seqs=[entry.seq for entry in entries],
            tasks=[
                entry.candidate.number for entry in entries if entry.candidate.number is not None
            ],
            dropped=self._dropped,
            seed=self.config.seed,
            digest=batch_digest(entries),
            learner=f"{self.context.name}@{self.context.presence.host}:{self.context.presence.pid}",
            time=time.time(),
        )
        self.state.batch_seq = await self._batches.append(record, self.state.batch_seq)
        self._dropped = []

    async def _train(self, entries: list[Entry], *, record: bool) -> None:
        """One optimiser step, one version, published."""
        formed = time.time()
        if record:
            await self._record(entries)
        step = self.state.step + 1
        groups = [entry.group for entry in entries if entry.group is not None]
        work = self._tracer.traced(lambda: self._policies.step(groups, step), step)
        with self._time_use.doing("train"):
            report = await self._in_torch(work)
        self._tracer.step_done()
        self._trained(entries, groups)
        self.intake.max_version = step
        with self._time_use.doing("publish"):
            await self._publish()
        await self._request_evaluation()
        bound = float(self.issuer.staleness.now)
        report.numbers.update({**self._order.numbers(), "staleness/bound": bound})
        spent = self._time_use.take()
        trace = self._reporter.tracer.trace(step, entries, formed, spent, self.publisher.send_s)
        if record:
            self.issuer.staleness.take(trace)
        await self._reporter.report(step, groups, report, trace, self.intake)

    def _trained(self, entries: list[Entry], groups: list[Group]) -> None:
        self.state.step += 1
        self.context.step = self.state.step
        self.context.set_state("working", version=self.state.step)
        self.ledger.train(entry.number for entry in entries if entry.number is not None)
        self._order.learn(groups)
        for group in groups:
            self._reporter.waste.add(group, trained=True)
        self.intake.forget(entry.seq for entry in entries)

    # -- parts ---------------------------------------------------------------------------------

    def _notice_arrivals(self) -> list[Entry]:
        """Enter what came into the ledger; return it."""
        arrived, self.intake.arrived = self.intake.arrived, []
        for entry in arrived:
            if entry.group is not None:
                self._reporter.tracer.take_group(entry.group)
            if entry.number is not None:
                self.ledger.note_in_log(entry.number, entry.task)
        return arrived

    def _judge(self, arrived: list[Entry]) -> None:
        """Raise when nothing but failures comes; what came before a start was judged then."""
        for entry in arrived:
            if entry.group is not None or entry.blame is not None:
                self._failures.note(entry.blame)

    def _drop(self, dropped: list[Dropped]) -> None:
        """Decide that entries are never trained; the next batch record says so."""
        for item in dropped:
            entry = self.intake[item.seq]
            if item.task is not None:
                self.ledger.drop(item.task, item.reason)
            if entry.group is not None:
                self._reporter.waste.add(entry.group, trained=False)
                self._order.pass_over(entry.group, item.reason)
            self._reporter.waste.add_failed(entry.tokens_wasted)
            self._reporter.num_dropped[item.reason] += 1
        self.intake.forget(item.seq for item in dropped)
        self._dropped += dropped

    async def _publish(self) -> None:
        """Snapshot the weights now; sending them goes on while the next batch is trained.

        Nobody waits for those of an SFT job but evaluators and who follows the run.
        """
        step = self.state.step
        wanted = step == 0 or self._saver.is_due or self.evaluations.is_due(step, self.total_steps)
        if wanted or not self.config.sft.data:
            past = pool(self.config.self_play, step)
            kept = self.evaluations.open_versions.union(past, [step] if wanted else [])
            await self.publisher.publish(step, self._in_torch, keep=kept)

    async def _request_evaluation(self) -> None:
        """Ask for an evaluation of the present version, where one is due."""
        if await self.evaluations.request_due(self.state.step, self.total_steps):
            self.publisher.pin(self.state.step)

    async def _save(self) -> str | None:
        self._notice_arrivals()
        with self._time_use.doing("checkpoint"):
            return await self._saver.save()

    async def _in_torch(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    # -- start and end -------------------------------------------------------------------------

    async def _recover(self, records: list[tuple[int, BatchRecord]]) -> None:
        """Take notice of all that was issued, and train the recorded batches again."""
        with self.context.waiting("the rollout log to be read"):
            await self.intake.catch_up(_RECOVERY_S)
        self._notice_arrivals()
        broker, scope = self.context.broker, self.context.scope
        for message in await get_all(broker, scope.stream_task, scope.task("*")):
            try:
                self.ledger.note_task(Task.from_bytes(message.payload, at=message.subject))
            except MessageError as error:
                _log.error("task_malformed", subject=message.subject, error=error.message)
        self.ledger.find_missing()
        self.issuer.is_open = True
        self.state.batch_seq = max([self.state.batch_seq, *(seq for seq, _ in records[-1:])])
        behind = [record for _, record in records if record.step > self.state.step]
        if behind:
            await self.context.event(
                "training_recovered",
                f"training {len(behind)} recorded steps again",
                step=self.state.step,
            )
        for record in behind:
            await self._train_again(record)

    async def _largest_number(self, records: list[tuple[int, BatchRecord]]) -> int:
        """Bound the numbers that were given out before a crash: each log entry may be a credit."""
        training = self.config.training
        num_read = await self.intake.newest() + 1 - self.state.log_seq
        by_gate = num_admissible(
            self.intake.max_version,
            training.largest_staleness,
            training.batch_size,
            self.ledger.num_credits + max(num_read, 0),
        )
        return max([by_gate, *(number + 1 for _, record in records for number in record.tasks)])

    async def _train_again(self, record: BatchRecord) -> None:
        """Train one recorded batch; its metrics were reported, unless the crash came first."""
        lost = [seq for seq in record.seqs if seq not in self.intake]
        if lost:
            raise StorageError(
                f"step {record.step} trained log entries {lost[:5]} that the rollout log no "
                "longer has",
                hint="resume from a checkpoint that is at least that new, or fork the run",
            )
        self._drop([item for item in record.dropped if item.seq in self.intake])
        self._dropped = []
        entries = [self.intake[seq] for seq in record.seqs]
        if batch_digest(entries) != record.digest:
            raise StorageError(f"the groups of step {record.step} are not the recorded ones")
        if refused := [entry.seq for entry in entries if entry.group is None]:
            raise StorageError(
                f"step {record.step} trained log entries {refused[:5]} that cannot be trained now",
                hint="was the configuration changed in the middle of the run?",
            )
        await self._train(entries, record=False)

    async def _finish(self) -> None:
        """Last checkpoint, last evaluation, last word."""
        self._notice_arrivals()
        self._tracer.finish()
        self.control.checkpoint_done(await self._saver.save_at_the_end())
        await self.publisher.wait()
        if self.state.step < self.total_steps:
            await self.context.event("training_stopped", step=self.state.step)
            return
        try:
            with self.context.waiting("the evaluator's last results"):
                await asyncio.wait_for(
                    self.context.unless_stopping(self.evaluations.wait_all()), _EVALUATION_S
                )
        except TimeoutError:
            await self.context.event("evaluation_missing", f"no result in {_EVALUATION_S:.0f} s")
        self._reporter.finish()
        await self.context.event("training_completed", step=self.state.step)
