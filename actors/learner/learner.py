"""The learner: issues tasks under the staleness bound, trains from the log, publishes weights.

It is a function of the rollout log and the batch records. Every step is recorded before it is
trained, and the record names the one that it follows, so a second learner is fenced off. After a
crash the newest checkpoint is loaded and the recorded batches behind it are trained again, in
order: same batches, same weights.

Torch runs in one thread of its own; the event loop always answers.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import structlog

from ...broker.rollouts import BatchLog, RolloutLog
from ...broker.tasks import TaskQueue
from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.config.rules import why_no_rows
from ...schemas.rollout import Group
from ...schemas.task import BatchRecord, Dropped
from ...schemas.wire.errors import BrokerError, DeadlineError
from ..policy.policies import opponent_versions
from ..runtime import EXIT_DONE, EXIT_DRAINED, JobContext, settle_memory
from ..training.checkpoint import CheckpointStore
from ..training.checkpoint_copy import CheckpointCopy
from ..training.parallel import torch_thread
from ..training.policies import Policies
from ..training.state import LearnerState
from ..weights.publisher import Publisher
from .batching import BatchDecision, form_batch, oldest_trained
from .control import LearnerControl, TorchTracer
from .curriculum import keeps_of
from .data_order import TaskOrder
from .drops import Drops
from .evaluations import MOST_EVALUATIONS, Evaluations
from .failures import Failures, Untrainable
from .intake import CheckedEntry, Intake, batch_digest
from .memory import GpuTurns, PassTokens, gpu_use_of
from .recorded_steps import RecordedSteps
from .reporter import Reporter, learner_time_use
from .saving import Saver
from .tasks import Ledger, TaskIssuer

T = TypeVar("T")
_EVALUATION_S = 600.0
"""Time for what the last evaluation takes beside playing it: another generator, weights."""
_LOOK_S = 1.0
_OWNER_S = 2.0
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
        passes: PassTokens,
        *,
        vocab_size: int,
    ) -> None:
        config: JobConfig = context.config
        broker, scope = context.broker, context.scope
        self.context, self.config, self.state = context, config, state
        self.total_steps = policies.total_steps
        self.ledger = Ledger(state)
        self.intake = self._open_intake(policies, vocab_size)
        self.issuer = TaskIssuer(
            TaskQueue(broker, scope, ack_wait_s=config.generator.ack_wait_s),
            RolloutLog(broker, scope),
            self.ledger,
            order,
            config,
            self.total_steps,
            state.bound,
            self._check_owner,
        )
        environments = Environments(broker, scope, config.env, context.missing)
        self.evaluations = Evaluations(
            broker,
            scope,
            config,
            environments.describe,
            reporter.log_evaluation,
            context.event,
            heard=lambda: self._failures.heard(),
        )
        checkpoints.judged = self.evaluations
        self.publisher = Publisher(
            context,
            policies.snapshot,
            policies.snapshot_bytes,
            kind=policies.kind,
            num_evaluated=MOST_EVALUATIONS,
        )
        self._gpu = self._open_gpu(policies)
        self._tracer = TorchTracer(context.run_dir / "traces")
        self.control = LearnerControl(
            context,
            self.issuer,
            self.intake,
            vocab_size,
            lambda: self.intake.max_version,
            self._tracer,
        )
        self._order, self._policies, self._reporter = order, policies, reporter
        self._passes = passes
        self._batches = BatchLog(broker, scope)
        self._recording = asyncio.Lock()
        self._drops = Drops(
            self.intake,
            self.ledger,
            order,
            reporter,
            state,
            context.event,
            external=config.training.tasks == "external",
        )
        self._recorded = RecordedSteps(
            context, self._batches, self.intake, self.ledger, self._drops, state
        )
        self._failures = Failures(
            config.training.batch_size,
            config.limits.idle_s,
            broker.clock,
            external=config.training.tasks == "external",
        )
        self._untrainable = Untrainable(
            config.training.batch_size, config.limits.untrainable_groups, state.judged_seq
        )
        self._left_alone: float | None = None
        self._torch, self._time_use = torch_thread(config.learner.threads), learner_time_use()
        self._checkpoints, self._tokenizer = checkpoints, tokenizer
        self._saver = Saver(
            context,
            checkpoints,
            state,
            self.intake,
            self._copy_checkpoint,
            partial(policies.save_form, tokenizer=tokenizer),
            reporter.log_checkpoint,
        )

    def _open_gpu(self, policies: Policies) -> GpuTurns:
        is_shared = self.context.record.is_colocated
        models = [*policies.models.values()]
        use = gpu_use_of(self.config, models, policies.critics) if is_shared else None
        return GpuTurns(self.context, use)

    def _bytes_by_kind(self) -> dict[str, int]:
        return self._policies.bytes_by_kind | {"weights sent": self.publisher.sending_bytes}

    def _open_intake(self, policies: Policies, vocab_size: int) -> Intake:
        config, state = self.config, self.state
        return Intake(
            RolloutLog(self.context.broker, self.context.scope),
            from_seq=state.log_seq,
            decided=state.decided_seqs,
            vocab_size=vocab_size,
            max_tokens=config.rollout.max_tokens,
            group_size=config.rollout.group_size,
            greedy_baseline=config.algorithm.advantage == "remax",
            was_issued=self.ledger.was_issued,
            issued_instead_of=self.ledger.issued_instead_of,
            check_readable=policies.check_readable,
            why_no_rows=why_no_rows(config),
            keeps=keeps_of(config.algorithm.own_filter),
        )

    async def run(self) -> int:
        """Train until the last step is done or `stopping` is set; return the exit code."""
        try:
            return await self._run()
        finally:
            await self._saver.close()
            await self._reporter.flush()

    async def _run(self) -> int:
        await self.evaluations.load()
        await self._recorded.read()
        async with asyncio.TaskGroup() as background:
            helpers = [
                background.create_task(self.intake.read_log(), name="intake"),
                background.create_task(self.evaluations.follow(), name="evaluations"),
                background.create_task(self._reporter.watch_actors(), name="actors"),
                background.create_task(self.publisher.serve(), name="weights"),
                background.create_task(self._saver.upload(), name="uploads"),
            ]
            self.context.own_bytes = self._bytes_by_kind
            await self.control.serve()
            await self._gpu.serve()
            await self.publisher.reserve()
            await self._publish()
            await self._gpu.published(self.state.step)
            await self._recover()
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
            await self._train(entries, await self._record(entries), record=True)

    async def _next_batch(self) -> list[CheckedEntry] | None:
        """Wait for the groups of the next step; None when told to stop."""
        while not self.context.stopping.is_set():
            await self._saver.check()
            if self.control.checkpoint_wanted:
                self.control.checkpoint_done(await self._save())
            if self.control.paused:
                await self._stay_paused()
                continue
            self.intake.changed.clear()  # before looking: what comes from now on is seen next time
            arrived = self._notice_arrivals()
            self._judge(arrived)
            await self.issuer.expire_reservations()
            decision = self._decide()
            entries = [self.intake[seq] for seq in decision.train]
            self._drops.drop(
                [Dropped(seq=s, task=self.intake[s].number, reason=r) for s, r in decision.dropped]
            )
            await self._drops.report_drops()
            if (arrived or decision.dropped) and not entries:
                await self._judge_dropped()
            await self.issuer.issue(self.state.step)
            if entries:
                return entries
            if decision.dropped:
                continue
            if self._saver.missing:
                await self._wait_for_room()
                continue
            if (error := self._failures.idle()) is not None:
                await self._save()
                raise error
            missing = self.config.training.batch_size - len(self.intake.candidates())
            with self._named_wait(max(missing, 0)):
                await self._wait_or_look_again(self.intake.changed)
        return None

    def _decide(self) -> BatchDecision:
        """Decide what of the log is trained at this version, and what is dropped."""
        training = self.config.training
        return form_batch(
            self.intake.candidates(),
            version=self.state.step,
            batch_size=training.batch_size,
            max_staleness=training.largest_staleness,
            policy=training.staleness_policy,
            filter_equal_rewards=self.config.algorithm.filter_equal_rewards,
            decided=self.ledger,
            outstanding=self.ledger.min_versions.values(),
        )

    async def _stay_paused(self) -> None:
        """Wait for somebody to resume the job, but look again now and then."""
        self.control.changed.clear()
        self.context.set_state("paused")  # a step that was under way has ended since
        named = self.context.waiting("somebody to resume the job")
        with named, self._time_use.doing("paused"):
            await self._wait_or_look_again(self.control.changed)
        self._failures.heard()

    async def _wait_for_room(self) -> None:
        """Try the checkpoint again for which there was no room, and look what has come meanwhile.

        Without one the log is not trimmed, and the groups of the next step may be waiting for room
        in it: the job is not idle.
        """
        self._failures.heard()
        if self._saver.is_to_be_tried_again:
            await self._begin_save()
        with self.context.missing(self._saver.missing or "a checkpoint"):
            await self._wait_or_look_again(self.intake.changed)

    def _named_wait(self, missing: int) -> AbstractContextManager[None]:
        """Name the wait for so many groups; where it is for somebody outside, with its begin."""
        name, useless = self.issuer.waits_for(missing), self._untrainable.wait
        if not self.issuer.is_left_alone:
            if not useless:
                self._left_alone = None
                return self.context.waiting(name)
            name = useless
        self._left_alone = self._left_alone or time.time()
        return self.context.missing(name, self._left_alone)

    async def _wait_or_look_again(self, event: asyncio.Event) -> None:
        """Wait until an event is set, but look again now and then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self.context.unless_stopping(event.wait(), None)

    async def _record(self, entries: list[CheckedEntry]) -> BatchRecord:
        """Write down which groups the next step trains, before it does."""
        record = BatchRecord(
            step=self.state.step + 1,
            seqs=[entry.seq for entry in entries],
            tasks=[
                entry.candidate.number for entry in entries if entry.candidate.number is not None
            ],
            dropped=self._drops.take_unrecorded(),
            oldest=oldest_trained(self.state.step, self.config.training),
            seed=self.config.seed,
            microbatch_tokens=self._passes.now,
            digest=batch_digest(entries),
            learner=f"{self.context.name}@{self.context.presence.host}:{self.context.presence.pid}",
            time=time.time(),
        )
        async with self._recording:
            self.state.batch_seq = await self._batches.append(record, self.state.batch_seq)
        return record

    async def _train(
        self, entries: list[CheckedEntry], batch: BatchRecord, *, record: bool
    ) -> None:
        """One optimiser step as it was written down, one version, published.

        `record`: it is a new one.
        """
        formed = time.time()
        step, oldest = self.state.step + 1, batch.oldest
        groups = [entry.group for entry in entries if entry.group is not None]
        tokens = self._passes.of(batch)
        train = partial(
            self._policies.step, groups, step, oldest, batch.seqs, microbatch_tokens=tokens
        )
        async with self._gpu.training():
            with self._time_use.doing("train"):
                work = self._gpu.freeing(self._tracer.traced(train, step))
                report = await self._in_torch(work)
            await self._note_passes(tokens)
            self._tracer.step_done()
            self._trained(entries, groups, oldest)
            if record:
                self.context.progressed()
            self.intake.note_version(step)
            with self._time_use.doing("publish"):
                await self._publish()
        if record or await self.publisher.has(step):
            await self._request_evaluation()
        bound = float(self.issuer.staleness.now)
        report.numbers.update({**self._order.numbers(), "staleness/bound": bound})
        spent = self._time_use.take()
        trace = self._reporter.tracer.trace(step, entries, formed, spent, self.publisher.send_s)
        if record:
            self.issuer.staleness.adapt(trace)
        await self._reporter.report(step, groups, report, trace, self.intake, oldest)
        if self._saver.is_due:
            await self._begin_save()

    async def _note_passes(self, tokens: int) -> None:
        """Go on with the passes that the step was trained in, and tell where they are smaller."""
        now = self._policies.microbatch_tokens
        self._passes.note(now)
        if now < tokens:
            message = f"out of memory at {tokens} tokens a pass; from now on {now}"
            await self.context.event("microbatch_lowered", message, step=self.state.step + 1)

    def _trained(self, entries: list[CheckedEntry], groups: list[Group], oldest: int) -> None:
        self.state.step += 1
        self.context.step = self.state.step
        self.context.set_state("working", version=self.state.step)
        self.ledger.train(entry.number for entry in entries if entry.number is not None)
        self._failures.heard()
        self._untrainable.stepped()
        self._order.learn(groups)
        for group in groups:
            self._reporter.waste.add(group, trained=True, oldest=oldest)
        self.intake.forget(entry.seq for entry in entries)

    # -- parts ---------------------------------------------------------------------------------

    def _notice_arrivals(self) -> list[CheckedEntry]:
        """Enter what came into the ledger; return it."""
        arrived, self.intake.arrived = self.intake.arrived, []
        for entry in arrived:
            if entry.group is not None:
                self._reporter.tracer.take_group(entry.group)
            if entry.number is not None:
                self.ledger.note_in_log(entry.number, entry.task)
        return arrived

    def _judge(self, arrived: list[CheckedEntry]) -> None:
        """Raise when nothing but failures comes; what came before a start was judged then."""
        for entry in arrived:
            if entry.group is not None or entry.blame is not None:
                self._failures.note_task(entry.blame)

    async def _judge_dropped(self) -> None:
        """Say it, and at last raise, when nothing comes that can be trained."""
        untrainable = self._untrainable
        waiting = (candidate.seq for candidate in self.intake.candidates())
        dropped = (
            item
            for item in self._drops.unrecorded
            if item.task is not None and self.ledger.was_issued(item.task)
        )
        untrainable.count_dropped(dropped, waiting)
        if word := untrainable.word():
            await self.context.event("groups_untrainable", word, step=self.state.step)
        if (error := untrainable.error()) is not None:
            self.state.judged_seq = untrainable.give_up(self.intake.last_seq)
            await self._save()
            raise error

    async def _publish(self) -> None:
        """Snapshot the weights now; sending them goes on while the next batch is trained.

        Nobody waits for those of an SFT job but who validates or follows the run.
        """
        step = self.state.step
        wanted = step == 0 or self._saver.is_due or self.evaluations.is_due(step, self.total_steps)
        if wanted or not self.config.sft.data:
            kept = {*opponent_versions(self.config.self_play, step), *([step] if wanted else [])}
            await self.publisher.publish(
                step, self._read_weights, keep=lambda: self.evaluations.open_versions | kept
            )
            self.evaluations.note_version(step)

    async def _request_evaluation(self) -> None:
        """Ask for an evaluation of the present version, where one is due."""
        if await self.evaluations.request_due(self.state.step, self.total_steps):
            self.publisher.pin(self.state.step)

    async def _save(self) -> str | None:
        """Write a checkpoint and wait for it; return its folder, None where it has no room."""
        await self._begin_save()
        with self._time_use.doing("checkpoint"):
            return await self._saver.finish()

    async def _begin_save(self) -> None:
        """Copy a checkpoint, which is written while training goes on."""
        await self._refuse_if_replaced()
        self._notice_arrivals()
        with self._time_use.doing("checkpoint"):
            await self._saver.begin()

    async def _copy_checkpoint(self) -> tuple[LearnerState, CheckpointCopy]:
        """Bring all that is remembered up to date, and copy it and the models."""
        parts = (self.intake, self.ledger, self.issuer, self._drops, self._reporter, self._order)
        for part in parts:
            part.write_to(self.state)
        state = self.state.model_copy(deep=True)
        return state, await self._in_torch(partial(self._policies.copy, self._tokenizer))

    async def _read_weights(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Start what reads the weights; return its result to come, once they may be trained on."""
        loop = asyncio.get_running_loop()
        reading = self._policies.read_beside_training(work)
        if reading is not None:
            return asyncio.wrap_future(reading)
        taken: asyncio.Future[T] = loop.create_future()
        taken.set_result(await self._in_torch(work))
        return taken

    async def _in_torch(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)

    # -- start and end -------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Take notice of all that was issued, and train the recorded batches again."""
        await self._recorded.take_notice(self._notice_arrivals)
        self.issuer.is_open = True
        await self._recorded.train(self._train)
        await self._drop_repeated()
        self._failures.heard()

    async def _check_owner(self) -> None:
        """Raise FencedError when another learner of the job has recorded a step."""
        async with self._recording:  # clients ask for tasks while this one records
            await self._batches.check_owner(self.state.batch_seq)

    async def _refuse_if_replaced(self) -> None:
        """Raise FencedError rather than write a checkpoint that another learner's steps contradict.

        A broker that is away does not keep a checkpoint from being written: what it decides that
        is recorded nowhere is compared with the records when it is loaded.
        """
        with contextlib.suppress(TimeoutError, BrokerError, DeadlineError):
            async with asyncio.timeout(_OWNER_S):
                await self._check_owner()

    async def _drop_repeated(self) -> None:
        """Let no position be trained twice that a learner that was cut off had issued, too."""
        repeated = self.ledger.find_repeated()
        entries = {candidate.number: candidate.seq for candidate in self.intake.candidates()}
        for number in repeated:
            if (seq := entries.get(number)) is not None:
                self._drops.drop([Dropped(seq=seq, task=number, reason="malformed")])
            else:
                self.ledger.withdraw(number)
        if repeated:
            await self.context.event(
                "positions_repeated",
                f"{len(repeated)} tasks that another learner of this job had issued, too, are not "
                "trained",
                step=self.state.step,
            )

    async def _finish(self) -> None:
        """Last checkpoint, last evaluation, last word."""
        self._notice_arrivals()
        await self._drops.report_drops(now=True)
        self._tracer.finish()
        await self._refuse_if_replaced()
        self.control.checkpoint_done(await self._saver.save_at_the_end())
        await self.publisher.wait()
        if self.state.step < self.total_steps:
            await self.context.event("training_stopped", step=self.state.step)
            return
        longest_s = self.config.evaluation.deadline_s + _EVALUATION_S
        try:
            with self.context.waiting(self.evaluations.named_wait):
                async with asyncio.timeout(longest_s):
                    await self.context.unless_stopping(self.evaluations.wait_all(), None)
        except TimeoutError:
            await self.context.event("evaluation_missing", f"no result in {longest_s:.0f} s")
        await asyncio.to_thread(self._checkpoints.remove_old)
        await self._reporter.finish()
        await self.context.event("training_completed", step=self.state.step)
