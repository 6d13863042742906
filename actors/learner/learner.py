"""The learner: issues tasks under the staleness bound, trains from the log, publishes weights.

It is a function of the rollout log and the batch records. Every step is recorded before it is
trained, and each record names its predecessor, so a second learner is fenced off. After a crash the
newest checkpoint is loaded and the recorded batches after it are trained again, in order: same
batches, same weights.

Torch runs in a separate thread (`compute.py`), so that the event loop stays responsive.
"""

import asyncio
import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any

from ...broker.feed import read_dead
from ...broker.jetstream.kv import Bucket
from ...broker.rollouts import RolloutLog
from ...broker.tasks import TaskQueue
from ...envs.host_client import Environments
from ...schemas import control
from ...schemas.config.rules import why_no_rows
from ...schemas.job import JobRecord
from ...schemas.local.tracking import Outcome
from ...schemas.rollout import Group
from ...schemas.task import BatchRecord, Dropped
from ...schemas.wire.errors import TinkermqError
from ...schemas.wire.subjects import BUCKET_JOBS
from ..policy.policies import opponent_versions
from ..runtime import EXIT_DONE, EXIT_DRAINED, JobContext, settle_memory
from ..training.checkpoint import CheckpointStore
from ..training.functions.calls import OwnFunctions
from ..training.state import LearnerState
from ..weights.publisher import Publisher
from .compute import Compute
from .curriculum import keeps_of
from .data_order import TaskOrder
from .evaluations import MOST_EVALUATIONS, Evaluations
from .failures import Failures, Untrainable
from .intake import CheckedEntry, Drops, Intake, batch_digest
from .recorded_steps import RecordedSteps
from .reporter import Reporter, learner_time_use
from .saving import Saver
from .staleness import form_batch, oldest_trained
from .tasks import Ledger, TaskIssuer

_CONTROL_S = 600.0
"""Longest wait of a control request for its checkpoint or its traces."""
_EVALUATION_S = 600.0
"""Time for the last evaluation beyond playing: another generator may start, or load weights."""
_POLL_S = 1.0
_CHECK_LOGS_S = 15.0
"""Time without a group after which the logs are compared with what the learner knows."""


class Learner:
    """Trains one job."""

    def __init__(
        self,
        context: JobContext,
        compute: Compute,
        state: LearnerState,
        order: TaskOrder,
        checkpoints: CheckpointStore,
        reporter: Reporter,
        functions: OwnFunctions,
    ) -> None:
        """Continue from `state`; `compute` holds the models, `order` chooses the tasks.

        `functions` are the job's own.
        """
        config, broker, scope = context.config, context.broker, context.scope
        self._context, self._config, self._state = context, config, state
        self._order, self._compute, self._reporter = order, compute, reporter
        self._functions = functions
        self._checkpoints = checkpoints
        log, external = RolloutLog(broker, scope), config.training.tasks == "external"

        self._ledger = Ledger(state)
        self._intake = Intake(
            log,
            self._ledger,
            from_seq=state.log_seq,
            decided=state.decided_seqs,
            newest_decided=state.newest_decided,
            vocab_size=compute.vocab_size,
            max_tokens=config.rollout.max_tokens,
            group_size=config.rollout.group_size,
            greedy_baseline=config.algorithm.advantage == "remax",
            check_readable=compute.policies.check_readable,
            why_no_rows=why_no_rows(config),
            keeps=keeps_of(functions.get("filter", config.algorithm.own_filter)),
        )
        self._drops = Drops(
            self._intake, self._ledger, order, state, context.event, external=external
        )
        self._recorded = RecordedSteps(context, self._intake, self._ledger, self._drops, state)
        self._issuer = TaskIssuer(
            TaskQueue(broker, scope, ack_wait_s=config.generator.ack_wait_s),
            log,
            self._ledger,
            order,
            config,
            state.total_steps,
            state.bound,
            self._recorded.check_owner,
        )
        self._failures = Failures(
            config.training.batch_size,
            config.limits.idle_s,
            broker.clock,
            external=external,
            is_new=state.step == 0,
        )
        self._untrainable = Untrainable(
            config.training.batch_size, config.limits.untrainable_groups, state.judged_seq
        )
        self._publisher = Publisher(
            context,
            compute.policies.snapshot,
            compute.policies.snapshot_bytes,
            kind=compute.policies.kind,
            num_evaluated=MOST_EVALUATIONS,
        )
        self._evaluations = Evaluations(
            broker,
            scope,
            config,
            Environments(broker, scope, config.env, context.missing).describe,
            reporter.log_evaluation,
            context.event,
            self._failures.note_progress,
        )
        checkpoints.judged = self._evaluations
        parts = (self._intake, self._ledger, self._issuer, self._drops, order)
        self._saver = Saver(context, checkpoints, state, self._intake, compute, parts)

        self._time_use = learner_time_use()
        self._left_alone: float | None = None
        """Time in seconds since the epoch since which only external actors could have added a
        group; None: not at present."""
        self._check_logs_at = 0.0
        """When the logs are next compared with what the learner knows, on the monotonic clock; 0:
        at once."""
        self._is_paused = False
        self._control_changed = asyncio.Event()
        self._wanted_checkpoints: list[asyncio.Future[str | None]] = []

    async def run(self) -> int:
        """Train until the last step is done or `stopping` is set; return the exit code."""
        outcome: Outcome | None = "FAILED"
        try:
            await self._run()
            outcome = "FINISHED" if self._is_done else await self._outcome_of_stop()
        finally:
            await self._saver.close()
            await self._reporter.close(outcome)
        self._compute.close()
        self._functions.close()
        return EXIT_DONE if self._is_done or self._context.stop_asked else EXIT_DRAINED

    async def _outcome_of_stop(self) -> Outcome | None:
        """Return how a run that was told to stop has ended; None if it goes on elsewhere."""
        context = self._context
        try:
            entry = await Bucket(context.broker, BUCKET_JOBS, JobRecord).get(context.scope.key)
        except TinkermqError as error:
            context.log.warning("outcome_unknown", error=error.message, hint=error.hint)
            return None
        if entry is None or entry.value.stop == "now":
            return "KILLED"
        if entry.value.stop == "drain":
            return "FINISHED" if entry.value.stop_complete else "KILLED"
        return None

    @property
    def _is_done(self) -> bool:
        return self._state.step >= self._state.total_steps

    async def _run(self) -> None:
        await self._evaluations.load()
        await self._recorded.read()
        async with asyncio.TaskGroup() as background:
            helpers = [
                background.create_task(self._intake.read_log(), name="intake"),
                background.create_task(self._evaluations.follow(), name="evaluations"),
                background.create_task(self._reporter.watch_actors(), name="actors"),
                background.create_task(self._publisher.serve(), name="weights"),
                background.create_task(self._saver.upload(), name="uploads"),
            ]
            remove = self._context.broker.on_reconnect(self._note_reconnect)
            await self._begin()
            while (entries := await self._next_batch()) is not None:
                record = await self._record(entries)
                await self._train(entries, record, is_new=True)
            await self._finish()
            remove()
            for helper in helpers:
                helper.cancel()

    # -- begin ---------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Publish the checkpoint's weights, and train the steps recorded after it again."""
        self._context.own_bytes = self._bytes_by_kind
        await self._serve_control()
        await self._compute.gpu.serve()
        await self._publisher.retract(self._intake.max_version)
        await self._publisher.reserve()
        await self._publish()
        await self._compute.gpu.published(self._state.step)
        await self._recorded.note_issued()
        self._issuer.is_open = True
        for record in await self._recorded.behind():
            if self._context.stopping.is_set():
                break
            await self._train(self._recorded.entries_of(record), record, is_new=False)
        await self._drop_repeated()
        await self._repeat_failed()
        self._failures.note_progress()
        await self._request_evaluation()
        settle_memory()
        self._reporter.tracer.forget()
        self._time_use.take()
        self._context.set_state("working", version=self._state.step)
        await self._context.event(
            "training_started", step=self._state.step, total_steps=self._state.total_steps
        )

    def _bytes_by_kind(self) -> dict[str, int]:
        weights_sent = {"weights sent": self._publisher.sending_bytes}
        return self._compute.policies.bytes_by_kind | weights_sent

    async def _drop_repeated(self) -> None:
        """Drop tasks at positions that a fenced-off learner also issued."""
        repeated = self._ledger.find_repeated()
        entries = {candidate.number: candidate.seq for candidate in self._intake.candidates()}
        for number in repeated:
            if (seq := entries.get(number)) is not None:
                self._drops.drop([Dropped(seq=seq, task=number, reason="malformed")])
            else:
                self._ledger.withdraw(number)
        if repeated:
            await self._context.event(
                "positions_repeated",
                f"{len(repeated)} tasks were also issued by another learner of this run; they are "
                "not trained twice",
                step=self._state.step,
            )

    async def _repeat_failed(self) -> None:
        """Issue again, once, the failed tasks whose repetition the run's owner asked for."""
        for letter in await read_dead(self._context.broker, self._context.scope):
            if letter.decision == "repeat" and letter.is_final:
                self._ledger.repeat(letter.task)

    # -- issue, take in, choose ----------------------------------------------------------------

    async def _next_batch(self) -> list[CheckedEntry] | None:
        """Issue tasks and wait for the groups of the next step; None: there is no next step."""
        with self._time_use.doing("wait"):
            while not (self._is_done or self._context.stopping.is_set()):
                await self._saver.check()
                await self._check_logs()
                if self._wanted_checkpoints:
                    self._answer_checkpoints(await self._save())
                if self._is_paused:
                    await self._stay_paused()
                    continue
                self._intake.changed.clear()  # before reading: later arrivals set it again
                arrived = self._take_in()
                await self._issuer.expire_reservations()
                chosen, dropped = self._choose()
                await self._drops.report_drops()
                if (arrived or dropped) and not chosen:
                    await self._judge_dropped()
                await self._issuer.issue(self._state.step)
                if chosen:
                    return chosen
                if not dropped:
                    await self._wait_for_groups()
        return None

    async def _check_logs(self) -> None:
        """Compare the logs with what is known, after a reconnect and while no group arrives.

        Raises RewoundError if the broker's store was set back. Lost tasks are issued again.
        """
        if time.monotonic() < self._check_logs_at:
            return
        await self._recorded.check_owner()
        await self._intake.check_log()
        await self._issuer.issue_lost()
        self._check_logs_at = time.monotonic() + _CHECK_LOGS_S

    def _note_reconnect(self) -> None:
        self._check_logs_at = 0.0
        self._intake.changed.set()

    def _take_in(self) -> list[CheckedEntry]:
        """Return the groups that arrived; raises if too many tasks in a row have failed.

        Groups from before the learner's start were counted earlier.
        """
        arrived = self._note_arrivals()
        for entry in arrived:
            if entry.group is not None or entry.blame is not None:
                self._failures.note_task(entry.blame)
        return arrived

    def _note_arrivals(self) -> list[CheckedEntry]:
        """Record arrived groups in the ledger, and their times in the trace."""
        arrived = self._intake.take_arrived()
        if arrived and self._check_logs_at:
            self._check_logs_at = time.monotonic() + _CHECK_LOGS_S
        for entry in arrived:
            if entry.group is not None:
                self._reporter.tracer.take_group(entry.group)
        return arrived

    def _choose(self) -> tuple[list[CheckedEntry], list[Dropped]]:
        """Return the groups to train at this version (none or a batch), and the dropped groups."""
        training = self._config.training
        decision = form_batch(
            self._intake.candidates(),
            version=self._state.step,
            batch_size=training.batch_size,
            max_staleness=training.largest_staleness,
            policy=training.staleness_policy,
            filter_equal_rewards=self._config.algorithm.filter_equal_rewards,
            decided=self._ledger,
            outstanding=self._ledger.min_versions.values(),
        )
        dropped = [
            Dropped(seq=seq, task=self._intake[seq].number, reason=reason)
            for seq, reason in decision.dropped
        ]
        self._drops.drop(dropped)
        return [self._intake[seq] for seq in decision.train], dropped

    async def _judge_dropped(self) -> None:
        """Report many consecutive untrainable groups; raises if there are too many."""
        untrainable = self._untrainable
        waiting = (candidate.seq for candidate in self._intake.candidates())
        dropped = (
            item
            for item in self._drops.unrecorded
            if item.task is not None and self._ledger.was_issued(item.task)
        )
        untrainable.count_dropped(dropped, waiting)
        if report := untrainable.due_report():
            await self._context.event("groups_untrainable", report, step=self._state.step)
        if (error := untrainable.error()) is not None:
            self._state.judged_seq = untrainable.give_up(self._intake.last_seq)
            await self._save()
            raise error

    async def _wait_for_groups(self) -> None:
        """Wait for a group, a request, or at most one second."""
        if self._saver.missing:
            await self._wait_for_room()
            return
        if (error := self._failures.idle()) is not None:
            await self._save()
            raise error
        missing = self._config.training.batch_size - len(self._intake.candidates())
        with self._named_wait(max(missing, 0)):
            await self._wait_or_poll(self._intake.changed)

    def _named_wait(self, missing: int) -> AbstractContextManager[None]:
        """Name the wait for missing groups, with its start if only external actors can end it."""
        name, useless = self._issuer.waits_for(missing), self._untrainable.wait
        if not self._issuer.is_left_alone:
            if not useless:
                self._left_alone = None
                return self._context.waiting(name)
            name = useless
        self._left_alone = self._left_alone or time.time()
        return self._context.missing(name, self._left_alone)

    async def _wait_for_room(self) -> None:
        """Wait for room for a checkpoint, and retry it.

        Without a checkpoint the log is not trimmed, and the groups of the next step may wait for
        room in it: the job is not idle.
        """
        self._failures.note_progress()
        if self._saver.is_to_be_tried_again:
            await self._begin_save()
        with self._context.missing(self._saver.missing or "a checkpoint"):
            await self._wait_or_poll(self._intake.changed)

    async def _stay_paused(self) -> None:
        """Wait until the job is resumed, or at most one second."""
        self._control_changed.clear()
        self._context.set_state("paused")  # any running step has ended
        named = self._context.waiting("somebody to resume the run")
        with named, self._time_use.doing("paused"):
            await self._wait_or_poll(self._control_changed)
        self._failures.note_progress()

    async def _wait_or_poll(self, event: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._context.unless_stopping(event.wait(), None)

    # -- train, publish ------------------------------------------------------------------------

    async def _record(self, entries: list[CheckedEntry]) -> BatchRecord:
        """Record the groups of the next step before it is trained."""
        presence = self._context.presence
        record = BatchRecord(
            step=self._state.step + 1,
            seqs=[entry.seq for entry in entries],
            tasks=[
                entry.candidate.number for entry in entries if entry.candidate.number is not None
            ],
            dropped=self._drops.take_unrecorded(),
            oldest=oldest_trained(self._state.step, self._config.training),
            seed=self._config.seed,
            microbatch_tokens=self._compute.passes.now,
            digest=batch_digest(entries),
            learner=f"{self._context.name}@{presence.host}:{presence.pid}",
            time=time.time(),
        )
        await self._recorded.append(record)
        return record

    async def _train(
        self, entries: list[CheckedEntry], record: BatchRecord, *, is_new: bool
    ) -> None:
        """Train one recorded step, publish its version, report it, and save it if due.

        `is_new`: it was not recorded before a restart.
        """
        formed, step = time.time(), record.step
        groups = [entry.group for entry in entries if entry.group is not None]
        async with self._compute.gpu.training():
            with self._time_use.doing("train"):
                report = await self._compute.train(groups, record)
            self._note_trained(entries, groups, record.oldest)
            await asyncio.to_thread(self._order.learn, groups)  # a function of the user may hang
            if is_new:
                self._context.progressed()
            self._intake.note_version(step)
            with self._time_use.doing("publish"):
                await self._publish()
        if is_new or await self._publisher.has(step):
            await self._request_evaluation()
        bound = float(self._issuer.staleness.now)
        report.numbers.update({**self._order.numbers(), "staleness/bound": bound})
        spent = self._time_use.take()
        trace = self._reporter.tracer.trace(step, entries, formed, spent, self._publisher.send_s)
        if is_new:
            self._issuer.staleness.adapt(trace)
        await self._reporter.report(
            step, groups, report, trace, self._intake, self._drops, record.oldest
        )
        if self._saver.is_due:
            await self._begin_save()

    def _note_trained(self, entries: list[CheckedEntry], groups: list[Group], oldest: int) -> None:
        self._state.step += 1
        self._context.step = self._state.step
        self._context.set_state("working", version=self._state.step)
        self._ledger.train(entry.number for entry in entries if entry.number is not None)
        self._failures.note_progress()
        self._untrainable.stepped()
        for group in groups:
            self._drops.waste.add(group, trained=True, oldest=oldest)
        self._intake.forget(entry.seq for entry in entries)

    async def _publish(self) -> None:
        """Copy the weights; they are sent while the next batch is trained.

        Versions of an SFT job are published if they are evaluated or saved.
        """
        step, last, evaluations = self._state.step, self._state.total_steps, self._evaluations
        is_kept = step == 0 or self._saver.is_due or evaluations.is_due(step, last)
        if is_kept or not self._config.sft.data:
            needed = set(opponent_versions(self._config.self_play, step))
            needed |= {step} if is_kept else set()
            await self._publisher.publish(
                step, self._compute.read_weights, keep=lambda: evaluations.open_versions | needed
            )
            evaluations.note_version(step)

    async def _request_evaluation(self) -> None:
        """Request an evaluation of the current version, if due."""
        if await self._evaluations.request_due(self._state.step, self._state.total_steps):
            self._publisher.pin(self._state.step)

    # -- save, finish --------------------------------------------------------------------------

    async def _save(self) -> str | None:
        """Write a checkpoint and wait for it; return its folder, None if there is no room."""
        await self._begin_save()
        with self._time_use.doing("checkpoint"):
            return await self._saver.finish()

    async def _begin_save(self) -> None:
        """Copy a checkpoint, to be written while training continues."""
        await self._recorded.refuse_if_replaced()
        self._note_arrivals()
        with self._time_use.doing("checkpoint"):
            await self._saver.begin()

    async def _finish(self) -> None:
        """Write the last checkpoint, wait for the last evaluation, close the trackers."""
        self._note_arrivals()
        await self._drops.report_drops(now=True)
        self._compute.tracer.finish()
        await self._recorded.refuse_if_replaced()
        self._answer_checkpoints(await self._saver.save_at_the_end())
        await self._publisher.wait()
        if not self._is_done:
            await self._context.event("training_stopped", step=self._state.step)
            return
        longest_s = self._config.evaluation.deadline_s + _EVALUATION_S
        try:
            with self._context.waiting(self._evaluations.named_wait):
                async with asyncio.timeout(longest_s):
                    await self._context.unless_stopping(self._evaluations.wait_all(), None)
        except TimeoutError:
            await self._context.event("evaluation_missing", f"no result in {longest_s:.0f} s")
        await asyncio.to_thread(self._checkpoints.remove_old)
        await self._reporter.finish()
        await self._context.event("training_completed", step=self._state.step)

    # -- control requests ----------------------------------------------------------------------

    async def _serve_control(self) -> None:
        """Answer on `ctl.learner`, `ctl.learner.reserve` and `ctl.learner.tasks`."""
        context = self._context
        await context.serve_control(self._control)
        subject = context.scope.control(context.name)
        await context.service.endpoint(
            "reserve", f"{subject}.reserve", control.ReserveRequest, self._reserve
        )
        await context.service.endpoint(
            "tasks", f"{subject}.tasks", control.PublishTasksRequest, self._publish_tasks
        )

    async def _control(self, request: control.ControlRequest) -> dict[str, Any]:
        context = self._context
        if request.verb == "stop":
            context.stop_asked = True
            context.stopping.set()
        elif request.verb in ("pause", "resume"):
            before, self._is_paused = self._is_paused, request.verb == "pause"
            context.set_state("paused" if self._is_paused else "working")
            if self._is_paused != before:  # a request may be repeated
                await context.event(f"training_{request.verb}d", request.reason)
        elif request.verb == "checkpoint":
            future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._wanted_checkpoints.append(future)
            self._wake()
            async with asyncio.timeout(_CONTROL_S):
                return {"folder": await future}
        elif request.verb == "repeat":
            await self._repeat_failed()
        elif request.verb == "profile":
            async with asyncio.timeout(_CONTROL_S):
                return {"files": await self._compute.tracer.trace_steps(request.steps)}
        self._wake()
        return {"paused": self._is_paused}

    def _wake(self) -> None:
        self._control_changed.set()
        self._intake.changed.set()

    def _answer_checkpoints(self, folder: str | None) -> None:
        waiting, self._wanted_checkpoints = self._wanted_checkpoints, []
        for future in waiting:
            if not future.done():
                future.set_result(folder)

    async def _reserve(self, request: control.ReserveRequest) -> control.ReserveReply:
        await self._issuer.check_owner()
        return control.ReserveReply(
            tasks=self._issuer.reserve(request, self._intake.max_version),
            group_size=self._config.rollout.group_size,
            version=self._intake.max_version,
            vocab_size=self._compute.vocab_size,
            max_tokens=self._config.rollout.max_tokens,
        )

    async def _publish_tasks(
        self, request: control.PublishTasksRequest
    ) -> control.PublishTasksReply:
        queued = await self._issuer.publish_for_client(request, self._intake.max_version)
        return control.PublishTasksReply(queued=queued)
