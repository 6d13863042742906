"""What clients ask the scheduler for, over one connection.

Changes are requests to the scheduler; what is known is read from the job records themselves, so
that looking works while the scheduler is down.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from ..broker.connection import Broker
from ..broker.jobs import JobStore
from ..broker.rpc import call
from ..schemas.errors import BrokerError, MessageError, NotFoundError
from ..schemas.ids import new_id
from ..schemas.job import (
    FINAL_STATES,
    ConfigureRequest,
    JobRecord,
    JobReply,
    JobRequest,
    PriorityRequest,
    ScaleRequest,
    StopRequest,
    SubmitRequest,
)
from ..schemas.message import Empty, Message
from ..schemas.node import NodeList
from ..schemas.secret import SealingKey, SecretName, SecretsRequest
from ..schemas.subjects import JobScope, rpc, token
from .names import did_you_mean
from .secrets import sealed

R = TypeVar("R", bound=Message)

TIMEOUT_S = 30.0


def new_request_id() -> str:
    """Return an id under which a submission can be sent again without making a second job."""
    return new_id()


class Pool:
    """The scheduler and its jobs, on behalf of the connection's user."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._jobs = JobStore(broker)

    async def submit(
        self,
        config: Mapping[str, Any],
        *,
        kind: Literal["train", "infer", "eval", "sft"] = "train",
        configured: bool = True,
        fork_of: str | None = None,
        follow: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        secrets: Mapping[SecretName, str] | None = None,
    ) -> JobRecord:
        """Submit a job; the same `request_id` returns the same job.

        `secrets` travel and are kept sealed, and are removed when the job ends.
        """
        request = SubmitRequest(
            request_id=request_id or new_request_id(),
            kind=kind,
            config=dict(config),
            configured=configured,
            fork_of=fork_of,
            follow=follow,
            priority=priority,
            sealed=await self._sealed(secrets) if secrets else b"",
        )
        return await self._change("submit", request)

    async def hand_over(self, job: str, secrets: Mapping[SecretName, str]) -> JobRecord:
        """Give a job secrets, beside those that it has."""
        request = SecretsRequest(job=job, sealed=await self._sealed(secrets))
        return await self._change("secrets", request)

    async def _sealed(self, secrets: Mapping[SecretName, str]) -> bytes:
        key = await self._ask("key", Empty(), SealingKey)
        return sealed(key.public, self.broker.user, secrets)

    async def configure(self, job: str, config: Mapping[str, Any], *, start: bool) -> JobRecord:
        """Lay keys over the configuration of a job that has not started; maybe start it."""
        return await self._change(
            "configure", ConfigureRequest(job=job, config=dict(config), start=start)
        )

    async def stop(self, job: str, *, now: bool = False, complete: bool = False) -> JobRecord:
        """Stop a job, with a checkpoint unless `now`."""
        return await self._change("stop", StopRequest(job=job, now=now, complete=complete))

    async def pause(self, job: str) -> JobRecord:
        """Let a running job stand still; `resume` lets it go on."""
        return await self._change("pause", JobRequest(job=job))

    async def resume(self, job: str) -> JobRecord:
        """Let a paused job go on, and one that has ended, from its last checkpoint."""
        return await self._change("resume", JobRequest(job=job))

    async def scale(
        self, job: str, role: Literal["generator", "environment", "server"], count: int
    ) -> JobRecord:
        """Change the number of generators, environment hosts or servers."""
        return await self._change("scale", ScaleRequest(job=job, role=role, count=count))

    async def priority(self, job: str, priority: int) -> JobRecord:
        """Change the priority of a job that waits."""
        return await self._change("priority", PriorityRequest(job=job, priority=priority))

    async def nodes(self) -> NodeList:
        """Return the nodes of the pool."""
        return await self._ask("nodes", Empty(), NodeList)

    async def find(self, name: str) -> JobRecord:
        """Return a job by its id or the name of its run.

        Raises NotFoundError that names the closest run.
        """
        record = await self._jobs.find(self.broker.user, name) if is_token(name) else None
        if record is not None:
            return record
        records = await self.list_jobs(all=True)
        known = [known for record in records for known in (record.name, record.job)]
        raise NotFoundError(
            f"there is no run {name!r}",
            hint=did_you_mean(name, known, otherwise="list them with `tinkermq ps --all`"),
        )

    async def list_jobs(self, *, all: bool = False) -> list[JobRecord]:
        """Return the jobs that have not ended, or all, newest first."""
        records = await self._jobs.list_jobs(self.broker.user)
        return [record for record in records if all or record.state not in FINAL_STATES]

    def scope(self, record: JobRecord) -> JobScope:
        """Return the names of a job."""
        return JobScope(record.user, record.job)

    async def _change(self, method: str, request: Message) -> JobRecord:
        return (await self._ask(method, request, JobReply)).record

    async def _ask(self, method: str, request: Message, reply: type[R]) -> R:
        subject = rpc(self.broker.user, "scheduler", method)
        try:
            return await call(
                self.broker,
                subject,
                request,
                reply,
                timeout_s=TIMEOUT_S,
                waiting_for="the scheduler",
                idempotent=True,
            )
        except NotFoundError as error:
            if subject not in error.message:
                raise  # the scheduler tells of somebody else who is not there
            raise BrokerError(
                f"no scheduler is connected to the broker at {self.broker.url}",
                hint="start one: `tinkermq up`, or `python -m tinkermq.actors.scheduler`",
            ) from error


def is_token(name: str) -> bool:
    """Whether a name can be that of a run at all."""
    try:
        token(name, what="run")
    except MessageError:
        return False
    return True
