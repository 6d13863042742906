"""What the gateway asks the scheduler for, on behalf of one visitor."""

import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ...broker.rpc import call
from ...schemas.errors import BrokerError, NotFoundError
from ...schemas.job import (
    JobList,
    JobRecord,
    JobReply,
    JobRequest,
    ListRequest,
    PriorityRequest,
    ScaleRequest,
    StopRequest,
    SubmitRequest,
)
from ...schemas.message import Empty, Message
from ...schemas.node import NodeList, NodeStatus
from ...schemas.subjects import JobScope, rpc
from .sessions import Visitor

R = TypeVar("R", bound=Message)

TIMEOUT_S = 20.0
LIST_AGE_S = 1.0


class Scheduler:
    """The scheduler, as one visitor sees it."""

    def __init__(self, visitor: Visitor) -> None:
        self._visitor = visitor

    async def list_jobs(self) -> list[JobRecord]:
        """Return all jobs of the visitor, newest first; as of a second ago at the oldest."""
        kept = self._visitor.listed
        if kept is not None and kept[0] + LIST_AGE_S > time.monotonic():
            return kept[1]
        records = (await self._ask("list", ListRequest(all=True), JobList)).records
        self._visitor.listed = (time.monotonic(), records)
        return records

    async def get(self, job: str) -> JobRecord:
        """Return one job, by its id or the name of its run; raises NotFoundError."""
        return await self._change("get", JobRequest(job=job))

    async def submit(
        self,
        config: Mapping[str, Any],
        *,
        kind: Literal["train", "infer", "eval", "sft"] = "train",
        fork_of: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
    ) -> JobRecord:
        """Submit a job; the same `request_id` returns the same one."""
        return await self._change(
            "submit",
            SubmitRequest(
                request_id=request_id or uuid.uuid4().hex,
                kind=kind,
                config=dict(config),
                fork_of=fork_of,
                priority=priority,
            ),
        )

    async def stop(self, job: str, *, now: bool = False) -> JobRecord:
        """Stop a job, with a checkpoint unless `now`."""
        return await self._change("stop", StopRequest(job=job, now=now))

    async def pause(self, job: str) -> JobRecord:
        """Let a running job stand still."""
        return await self._change("pause", JobRequest(job=job))

    async def resume(self, job: str) -> JobRecord:
        """Let a paused job go on, and one that has ended, from its last checkpoint."""
        return await self._change("resume", JobRequest(job=job))

    async def scale(
        self, job: str, role: Literal["generator", "environment"], count: int
    ) -> JobRecord:
        """Change the number of generators or environment hosts."""
        return await self._change("scale", ScaleRequest(job=job, role=role, count=count))

    async def prioritize(self, job: str, priority: int) -> JobRecord:
        """Change a job's place in the queue."""
        return await self._change("priority", PriorityRequest(job=job, priority=priority))

    async def nodes(self) -> list[NodeStatus]:
        """Return the nodes of the pool, by name."""
        nodes = (await self._ask("nodes", Empty(), NodeList)).nodes
        return sorted(nodes, key=lambda node: node.node)

    async def _change(self, method: str, request: Message) -> JobRecord:
        record = (await self._ask(method, request, JobReply)).record
        if method != "get":
            self._visitor.listed = None
        return record

    async def _ask(self, method: str, request: Message, reply: type[R]) -> R:
        subject = rpc(self._visitor.user, "scheduler", method)
        try:
            return await call(
                self._visitor.broker,
                subject,
                request,
                reply,
                timeout_s=TIMEOUT_S,
                waiting_for="the scheduler",
                idempotent=True,
            )
        except NotFoundError as error:
            if subject not in error.message:
                raise  # the scheduler tells of a job that is not there
            raise BrokerError(
                f"no scheduler answers {method!r}",
                hint="see whether one runs: `nats micro ls`, `tinkermq doctor`",
            ) from error


def scope_of(record: JobRecord) -> JobScope:
    """Return the names of a job."""
    return JobScope(record.user, record.job)
