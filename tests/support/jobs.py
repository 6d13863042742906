"""A submitted job as a test sees it: what the broker says of it, and what can be done to it."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tinkermq.broker.feed import follow, read_dead, read_events, read_metrics
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import list_presences
from tinkermq.broker.rollouts import BatchLog, LogEntry, RolloutLog
from tinkermq.schemas.job import (
    FINAL_STATES,
    JobRecord,
    JobReply,
    JobRequest,
    ScaleRequest,
    StopRequest,
)
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.task import BatchRecord, DeadLetter
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support import waiting
from tests.support.processes import alive

if TYPE_CHECKING:
    from tests.support.stack import Stack

DEADLINE_S = 2 * waiting.PATIENCE_S
_LOG_LINES = 25

T = TypeVar("T")


@dataclass
class Job:
    """One submitted job, as a test sees it."""

    stack: "Stack"
    record: JobRecord

    @property
    def scope(self) -> JobScope:
        """The names of the job."""
        return JobScope(self.record.user, self.record.job)

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.record.run_dir)

    @property
    def batches_log(self) -> BatchLog:
        """The job's batch records."""
        return BatchLog(self.stack.broker, self.scope)

    @property
    def rollout_log(self) -> RolloutLog:
        """The job's rollout log."""
        return RolloutLog(self.stack.broker, self.scope)

    # -- reading -----------------------------------------------------------------------------

    async def read(self) -> JobRecord:
        """Return the job's record as it is now."""
        self.record = await JobStore(self.stack.broker).get(self.record.user, self.record.job)
        return self.record

    async def batches(self) -> list[BatchRecord]:
        """Return all batch records, in order."""
        return [record for _, record in await self.batches_log.read_all()]

    async def entries(self, after: int = 0) -> list[LogEntry]:
        """Return what the rollout log holds now, behind a sequence."""
        last, found = await self.rollout_log.last_seq(), list[LogEntry]()
        if last <= after or last < await self.rollout_log.first_seq():
            return found
        async with aclosing(self.rollout_log.read(after + 1)) as entries:
            async for entry in entries:
                found.append(entry)
                if entry.seq >= last:
                    break
        return found

    async def metrics(self) -> list[Metric]:
        """Return all metrics of training steps, in order."""
        metrics = await read_metrics(self.stack.broker, self.scope)
        return [metric for metric in metrics if "training_step_reward" in metric.values]

    async def validations(self) -> dict[int, dict[str, float]]:
        """Return the results of the evaluations by step."""
        metrics = await read_metrics(self.stack.broker, self.scope)
        return {
            metric.step: metric.values for metric in metrics if "val/mean_score" in metric.values
        }

    async def events(self, kind: str = "") -> list[Event]:
        """Return the events of one kind, or all, in order."""
        record = await self.read()
        stored = await read_events(self.stack.broker, self.scope) if record.has_streams else []
        events = [*stored, *(event for event in record.untold if event not in stored)]
        return [event for event in events if kind in ("", event.kind)]

    async def dead(self) -> list[DeadLetter]:
        """Return the tasks that were given up."""
        return await read_dead(self.stack.broker, self.scope)

    async def actors(self) -> dict[str, Presence]:
        """Return the heartbeats of the actors whose processes live, by name."""
        entries = await list_presences(self.stack.broker, f"{self.scope.key}.")
        return {entry.value.actor: entry.value for entry in entries if alive(entry.value.pid)}

    async def pid(self, actor: str) -> int:
        """Return the process id of an actor, waiting until it is there."""

        async def there() -> int | None:
            presence = (await self.actors()).get(actor)
            return presence.pid if presence else None

        return await self.eventually(there, f"actor {actor}")

    # -- waiting -----------------------------------------------------------------------------

    async def until(self, *states: str, deadline_s: float = DEADLINE_S) -> JobRecord:
        """Wait for one of these states; another final one fails at once."""

        async def there() -> bool:
            record = await self.read()
            if record.state in FINAL_STATES and record.state not in states:
                raise AssertionError(f"the job is {record.state}\n{await self.story()}")
            return record.state in states

        await self.eventually(there, f"state {' or '.join(states)}", deadline_s)
        return self.record

    async def until_streams(self) -> None:
        """Wait until the job has started once: then its streams are there."""

        async def there() -> bool:
            return (await self.read()).has_streams

        await self.eventually(there, "the job's streams")

    async def until_step(self, step: int, deadline_s: float = DEADLINE_S) -> Metric:
        """Return the metrics of a training step as soon as they are told."""
        async with aclosing(self.follow(deadline_s)) as feed:
            async for message in feed:
                if (
                    isinstance(message, Metric)
                    and "training_step_reward" in message.values
                    and message.step >= step
                ):
                    return message
        raise AssertionError("the feed ended")

    async def until_event(self, kind: str, count: int = 1, deadline_s: float = DEADLINE_S) -> Event:
        """Return the `count`-th event of a kind as soon as it is told."""
        async with aclosing(self.follow(deadline_s)) as feed:
            async for message in feed:
                if isinstance(message, Event) and message.kind == kind:
                    count -= 1
                    if count == 0:
                        return message
        raise AssertionError("the feed ended")

    async def follow(self, deadline_s: float = DEADLINE_S) -> AsyncGenerator[Any, None]:
        """Yield metrics and events from the start; fails when the job fails or time runs out."""
        await self.until_streams()
        try:
            async with (
                asyncio.timeout(deadline_s),
                aclosing(follow(self.stack.broker, self.scope, ("metric", "event"))) as feed,
            ):
                async for message in feed:
                    yield message
                    if isinstance(message, Event) and message.kind == "job_failed":
                        raise AssertionError(f"the job failed\n{await self.story()}")
        except TimeoutError:
            raise AssertionError(f"it did not come\n{await self.story()}") from None

    async def eventually(
        self, attempt: Callable[[], Awaitable[T | None]], what: str, deadline_s: float = DEADLINE_S
    ) -> T:
        """Wait until `attempt` returns something true, telling the job's story if it never does."""
        try:
            return await waiting.eventually(attempt, what, deadline_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{await self.story()}") from None

    # -- doing -------------------------------------------------------------------------------

    async def kill(self, actor: str) -> int:
        """SIGKILL the process of an actor; return the id it had."""
        pid = await self.pid(actor)
        os.kill(pid, signal.SIGKILL)
        return pid

    async def stop(self, *, now: bool = False, complete: bool = False) -> None:
        """Ask for the job's end."""
        request = StopRequest(job=self.scope.job, now=now, complete=complete)
        await self.stack.ask("stop", request, JobReply)

    async def pause(self) -> None:
        """Let the job stand still."""
        await self.stack.ask("pause", JobRequest(job=self.scope.job), JobReply)

    async def resume(self) -> None:
        """Let the job go on after a pause or its end, once a learner that starts again listens."""

        async def asked() -> bool:
            try:
                await self.stack.ask("resume", JobRequest(job=self.scope.job), JobReply)
            except NotFoundError:
                return False
            return True

        await self.eventually(asked, "the learner to listen")

    async def scale(self, role: Literal["generator", "environment", "server"], count: int) -> None:
        """Change the number of generators or environment hosts."""
        request = ScaleRequest(job=self.scope.job, role=role, count=count)
        await self.stack.ask("scale", request, JobReply)

    # -- telling -----------------------------------------------------------------------------

    async def story(self) -> str:
        """Tell the job's record, its last events and the ends of its actors' logs."""
        record = await self.read()
        lines = [f"job {record.name} is {record.state}: {record.reason}"]
        lines += [
            f"  {event.kind} ({event.source}) {event.message[:500]}"
            for event in (await self.events())[-_LOG_LINES:]
        ]
        lines += [
            f"  {name} waits for {presence.waits_for!r}, is {presence.state}"
            for name, presence in (await self.actors()).items()
        ]
        for file in sorted(self.run_dir.glob("logs/*/*.log")):
            lines += [f"--- {file.relative_to(self.run_dir)}", *tail(file)]
        for file in sorted(self.stack.folder.glob("*.log")):
            lines += [f"--- {file.name}", *tail(file)]
        return "\n".join(lines)


def tail(file: Path) -> list[str]:
    """Return the last lines of a log."""
    return file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
