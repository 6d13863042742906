"""Requests to the scheduler, a job's learner and the auth service, for the connection's user."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import structlog

from ..schemas.checks import CheckReply, CheckResult
from ..schemas.job import (
    ConfigureRequest,
    JobList,
    JobRecord,
    JobReply,
    JobRequest,
    LabelRequest,
    ListRequest,
    PriorityRequest,
    ResumeRequest,
    ScaleRequest,
    StopRequest,
    SubmitRequest,
)
from ..schemas.user import ListUsers, UserInfo, UserList
from ..schemas.wire import errors
from ..schemas.wire.message import Empty, Message, new_id
from .client.connection import Broker
from .client.faults import shown_url
from .client.rpc import call
from .feed import publish_dead, read_failed

if TYPE_CHECKING:
    from ..schemas.control import ControlReply, ControlRequest
    from ..schemas.job import SecretName
    from ..schemas.machines import MachineList
    from ..schemas.node import DamagedRecords, NodeStatus
    from ..schemas.task import Decision
    from ..schemas.tinker.operation import TrainerOffer
    from ..schemas.user import QuotaReply


# A request that is repeated until it is answered, because another user's flood may drop it.
#
# A request is dropped with the connection that a flood has filled (`request_connection`), or waits
# behind the flood. So a request to such a service may be sent twice. While no service answers,
# another one may be about to take over.

R = TypeVar("R", bound=Message)
_log: structlog.stdlib.BoundLogger = structlog.get_logger()

ATTEMPT_S = 5.0
"""A request is sent again after this time; a late reply to an earlier attempt also counts."""
_REPORT_S = 6.0
"""How often a long wait for a service is reported."""
_LEAST_S = 0.1
_PAUSE_S = 0.1


async def call_service(
    broker: Broker,
    subject: str,
    request: Message,
    reply_model: type[R],
    *,
    timeout_s: float,
    absent_s: float,
    absent: errors.BrokerError,
    waiting_for: str,
) -> R:
    """Call a service of the pool; raises `absent` if nothing answers for `absent_s`."""
    patience, deadline = (time.monotonic() + seconds for seconds in (absent_s, timeout_s))
    report = time.monotonic() + min(_REPORT_S, absent_s)
    while True:
        try:
            return await repeated_call(
                broker, subject, request, reply_model, deadline=deadline, waiting_for=waiting_for
            )
        except errors.NobodyAnswersError as error:
            now = time.monotonic()
            if now >= patience:
                raise absent from error
            if now >= report:
                report = now + _REPORT_S
                _log.warning("service_is_away", waits_for=waiting_for, most_s=round(patience - now))
            await asyncio.sleep(_PAUSE_S)


async def repeated_call(
    broker: Broker,
    subject: str,
    request: Message,
    reply_model: type[R],
    *,
    deadline: float,
    waiting_for: str,
    attempt_s: float = ATTEMPT_S,
) -> R:
    """Return the first reply to a request that is sent every `attempt_s`.

    `deadline` is a value of `time.monotonic`. Raises what `call` raises.
    """
    sent: set[asyncio.Task[R]] = set()
    try:
        while True:
            asking = call(
                broker,
                subject,
                request,
                reply_model,
                timeout_s=max(deadline - time.monotonic(), _LEAST_S),
                waiting_for=waiting_for,
                idempotent=True,
            )
            sent.add(asyncio.create_task(asking, name=subject))
            answered, _ = await asyncio.wait(
                sent, timeout=attempt_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answered:
                return answered.pop().result()
    finally:
        for attempt in sent:
            attempt.cancel()
        await asyncio.gather(*sent, return_exceptions=True)


TIMEOUT_S = 30.0
TAKEOVER_S = 6.0
SUBMIT_S = 60.0
"""How long a submission waits for a scheduler, which may be starting again."""


def new_request_id() -> str:
    """Return an id that makes a repeated submission return the same job."""
    return new_id()


class SchedulerCalls:
    """Requests to the leading scheduler; every request may be repeated."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def get(self, job: str) -> JobRecord:
        """Return one job by its id or its run's name; raises NotFoundError."""
        return await self._change("get", JobRequest(job=job))

    async def all_jobs(self, *, widest: bool = False, archived: bool = False) -> list[JobRecord]:
        """Return all jobs, newest first, with the queue position of waiting jobs.

        `widest` includes all users' jobs (admins only), `archived` includes archived jobs.
        """
        records: list[JobRecord] = []
        after = ""
        while True:
            request = ListRequest(all=True, widest=widest, archived=archived, after=after)
            page = await self._call_scheduler("list", request, JobList)
            records += page.records
            if not page.after:
                return records
            after = page.after

    async def submit(
        self,
        config: Mapping[str, Any],
        *,
        kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train",
        configured: bool = True,
        fork_of: str | None = None,
        weights_only: bool = False,
        follow: str | None = None,
        adapters: Sequence[str] = (),
        request_id: str | None = None,
        priority: int = 0,
        secrets: "Mapping[SecretName, str] | None" = None,
    ) -> JobRecord:
        """Submit a job; the same `request_id` returns the same job.

        Waits up to a minute (`SUBMIT_S`) for a scheduler, and logs it (`service_is_away`).
        `secrets` are sealed in transit and in storage, and are removed when the job ends.
        """
        request = SubmitRequest(
            request_id=request_id or new_request_id(),
            kind=kind,
            config=dict(config),
            configured=configured,
            fork_of=fork_of,
            weights_only=weights_only,
            follow=follow,
            adapters=list(adapters),
            priority=priority,
            sealed=await self._sealed(secrets) if secrets else b"",
        )
        answer = await self._call_scheduler("submit", request, JobReply, absent_s=SUBMIT_S)
        return answer.record

    async def try_out(
        self,
        config: Mapping[str, Any],
        *,
        kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train",
        fork_of: str | None = None,
        weights_only: bool = False,
    ) -> list[CheckResult]:
        """Return the checks of scheduler and nodes for a job without submitting it."""
        request = SubmitRequest(
            request_id=new_request_id(),
            kind=kind,
            config=dict(config),
            fork_of=fork_of,
            weights_only=weights_only,
        )
        return (await self._call_scheduler("try", request, CheckReply)).results

    async def hand_over(self, job: str, secrets: "Mapping[SecretName, str]") -> JobRecord:
        """Add secrets to those of a job."""
        from ..schemas.job import SecretsRequest

        request = SecretsRequest(job=job, sealed=await self._sealed(secrets))
        return await self._change("secrets", request)

    async def inspect_model(self, config: Mapping[str, Any]) -> list[CheckResult]:
        """Return the results of a node that inspects a job's model with the code of the run.

        It inspects model, template, adapter and conversations; the list is empty if no node can.
        Raises what `submit` raises for such a job.
        """
        from ..schemas.node import InspectRequest

        request = InspectRequest(request_id=new_request_id(), config=dict(config))
        while True:
            reply = await self._call_scheduler("inspect", request, CheckReply)
            if reply.done:
                return reply.results

    async def _sealed(self, secrets: "Mapping[SecretName, str]") -> bytes:
        from ..schemas.job import JobSecrets, SealingKey
        from .credentials import close_seal  # the cryptography is imported only for secrets

        key = await self._call_scheduler("key", Empty(), SealingKey)
        return close_seal(key.public, JobSecrets(user=self.broker.user, values=dict(secrets)))

    async def configure(self, job: str, config: Mapping[str, Any], *, start: bool) -> JobRecord:
        """Change keys of the configuration of a job that has not started; optionally start it."""
        return await self._change(
            "configure", ConfigureRequest(job=job, config=dict(config), start=start)
        )

    async def stop(self, job: str, *, now: bool = False, complete: bool = False) -> JobRecord:
        """Stop a job, with a final checkpoint unless `now`."""
        return await self._change("stop", StopRequest(job=job, now=now, complete=complete))

    async def pause(self, job: str) -> JobRecord:
        """Pause a running job until `resume`."""
        return await self._change("pause", JobRequest(job=job))

    async def archive(self, job: str) -> JobRecord:
        """Move the streams of an ended job into its run folder."""
        return await self._change("archive", JobRequest(job=job))

    async def unarchive(self, job: str) -> JobRecord:
        """Restore the streams of an archived job."""
        return await self._change("unarchive", JobRequest(job=job))

    async def delete(self, job: str) -> JobRecord:
        """Delete an ended job with all its stored data."""
        return await self._change("delete", JobRequest(job=job))

    async def resume(self, job: str, config: Mapping[str, Any] | None = None) -> JobRecord:
        """Continue a paused or ended job from its last checkpoint.

        `config` changes the configuration of an ended job, and is refused for other jobs.
        """
        return await self._change("resume", ResumeRequest(job=job, config=dict(config or {})))

    async def scale(
        self, job: str, role: Literal["generator", "environment", "server"], count: int
    ) -> JobRecord:
        """Change the number of generators, environment hosts or servers."""
        return await self._change("scale", ScaleRequest(job=job, role=role, count=count))

    async def priority(self, job: str, priority: int) -> JobRecord:
        """Change the priority of a waiting job."""
        return await self._change("priority", PriorityRequest(job=job, priority=priority))

    async def label(
        self,
        job: str,
        *,
        tags: Sequence[str] | None = None,
        group: str | None = None,
        notes: str | None = None,
    ) -> JobRecord:
        """Change tags, notes or group of a job; None keeps a value, an empty group removes it.

        Raises MessageError for invalid tags and groups.
        """
        named = None if tags is None else list(tags)
        request = LabelRequest(job=job, tags=named, group=group, notes=notes)
        return await self._change("label", request)

    async def nodes(self) -> "list[NodeStatus]":
        """Return the nodes of the pool, by name."""
        from ..schemas.node import NodeList

        return (await self._call_scheduler("nodes", Empty(), NodeList)).nodes

    async def machines(self) -> "MachineList":
        """Return the state of the requests for cluster machines."""
        from ..schemas.machines import MachineList

        return await self._call_scheduler("machines", Empty(), MachineList)

    async def trainers(self) -> "list[TrainerOffer]":
        """Return the base models that users may train through the Tinker API."""
        from ..schemas.tinker.operation import TrainerOffers

        return (await self._call_scheduler("trainers", Empty(), TrainerOffers)).offers

    async def damaged(self) -> "DamagedRecords":
        """Return the user's unreadable records, or those of the whole pool for admins."""
        from ..schemas.node import DamagedRecords

        return await self._call_scheduler("damaged", Empty(), DamagedRecords)

    async def trouble(self) -> str:
        """Return the scheduler's description of what blocks the pool; empty if nothing does."""
        from ..schemas.node import NodeList

        return (await self._call_scheduler("nodes", Empty(), NodeList)).trouble

    async def quota(self) -> "QuotaReply":
        """Return the user's quota and its usage."""
        from ..schemas.user import QuotaReply

        return await self._call_scheduler("quota", Empty(), QuotaReply)

    async def _change(self, method: str, request: Message) -> JobRecord:
        return (await self._call_scheduler(method, request, JobReply)).record

    async def _call_scheduler(
        self, method: str, request: Message, reply: type[R], absent_s: float = TAKEOVER_S
    ) -> R:
        """Call a method of the leading scheduler; repeat the call while it is busy."""
        patience = time.monotonic() + absent_s
        while True:
            try:
                return await call_service(
                    self.broker,
                    self.broker.rpc("scheduler", method),
                    request,
                    reply,
                    timeout_s=max(TIMEOUT_S, 1.5 * absent_s),
                    absent_s=absent_s,
                    absent=errors.BrokerError(
                        f"no scheduler is connected to the broker at {shown_url(self.broker.url)}",
                        hint="start one: `tinkermq up`, or `python -m tinkermq.actors.scheduler`",
                    ),
                    waiting_for="the scheduler",
                )
            except errors.BusyError as error:
                if time.monotonic() + error.retry_after_s > patience:
                    raise
                await asyncio.sleep(error.retry_after_s)


# Requests of a job's owner to its learner.

DEADLINE_S = 600.0
_LIVE = frozenset({"RUNNING", "PAUSED"})


async def write_checkpoint(broker: Broker, record: JobRecord) -> str:
    """Request a checkpoint from a job's learner between two steps; return its folder there.

    Raises StateError for a job that does not train, StorageError for a full disk, DeadlineError
    after ten minutes.
    """
    _refuse_idle(
        record,
        "checkpoint to write",
        "ask while a run trains; one that ends has written its last checkpoint",
    )
    from ..schemas.control import ControlRequest  # `tinkermq ps` does not need it

    request = ControlRequest(verb="checkpoint", reason="asked for")
    reply = await _control_learner(broker, record, request, "checkpoint")
    folder = reply.detail["folder"]
    if folder is None:
        raise errors.StorageError(
            f"the learner of {record.name} could not write a checkpoint",
            hint=f"its last event says why: `tinkermq watch {record.name}`",
        )
    return str(folder)


async def trace_steps(broker: Broker, record: JobRecord, steps: int) -> list[str]:
    """Request torch traces of the next steps from a job's learner; return their files there.

    There are fewer when the run ends before. Raises ConfigError for too many, StateError for a job
    that does not train, StorageError for a full disk, DeadlineError after ten minutes.
    """
    from ..schemas.control import MAX_TRACED_STEPS, ControlRequest

    if not 1 <= steps <= MAX_TRACED_STEPS:
        raise errors.ConfigError(
            f"{steps} steps cannot be traced at a time",
            hint=f"ask for 1 to {MAX_TRACED_STEPS}: --steps 3",
        )
    _refuse_idle(record, "step to trace", "ask while a run trains")
    request = ControlRequest(verb="profile", reason="asked for", steps=steps)
    reply = await _control_learner(broker, record, request, "next steps")
    return [str(file) for file in reply.detail["files"]]


async def decide_failed(
    broker: Broker, record: JobRecord, numbers: Sequence[int], decision: "Decision"
) -> list[int]:
    """Have failed tasks of a run repeated, or dropped from the list; return their numbers.

    No `numbers`: all of `read_failed`. The decision is stored; a learner issues the tasks again as
    soon as the staleness gate admits them, or once the run is resumed, each once. Raises
    NotFoundError for a number that is not in the list.
    """
    failed = {letter.task.task: letter for letter in await read_failed(broker, record.scope)}
    if unknown := [number for number in numbers if number not in failed]:
        raise errors.NotFoundError(
            f"task {unknown[0]} of {record.name} is not among those that failed for good",
            hint=f"`tinkermq failed {record.name}` lists them; decided ones are not listed",
        )
    chosen = list(dict.fromkeys(numbers)) or list(failed)
    for number in chosen:
        letter = failed[number].model_copy(update={"decision": decision, "time": time.time()})
        await publish_dead(broker, record.scope, letter)
    if decision == "repeat" and record.state in _LIVE:
        from ..schemas.control import ControlRequest

        request = ControlRequest(verb="repeat", reason="asked for")
        with contextlib.suppress(errors.NobodyAnswersError):  # a learner that starts reads them
            await _control_learner(broker, record, request, "answer about failed tasks")
    return chosen


_MEMORY_S = 10.0


async def read_memory(broker: Broker, record: JobRecord) -> "dict[str, ControlReply]":
    """Return the memory of each actor of a job; actors that do not answer are omitted.

    A reply's detail has `memory`, as Linux counts it, and `parts`, as the actor counts it. Raises
    StateError for a job that does not run.
    """
    if record.state not in _LIVE:
        raise errors.StateError(
            f"run {record.name} is {record.state}, so it has no processes",
            hint="ask while it runs",
        )
    from ..schemas.control import ControlReply, ControlRequest

    async def ask(name: str) -> ControlReply | None:
        request = ControlRequest(verb="memory", reason="asked for")
        try:
            return await call(
                broker,
                broker.control(record.scope, name),
                request,
                ControlReply,
                timeout_s=_MEMORY_S,
                waiting_for=f"the memory of {name}",
            )
        except (errors.DeadlineError, errors.NobodyAnswersError):
            return None

    names = [actor.name for actor in record.actors]
    replies = await asyncio.gather(*(ask(name) for name in names))
    return {name: reply for name, reply in zip(names, replies, strict=True) if reply is not None}


def _refuse_idle(record: JobRecord, result: str, hint: str) -> None:
    if not record.trains or record.state not in _LIVE:
        what = f"is {record.state}" if record.trains else "trains nothing"
        raise errors.StateError(f"run {record.name} {what}, so there is no {result}", hint=hint)


async def _control_learner(
    broker: Broker, record: JobRecord, request: "ControlRequest", what: str
) -> "ControlReply":
    from ..schemas.control import ControlReply

    return await call(
        broker,
        broker.control(record.scope, "learner"),
        request,
        ControlReply,
        timeout_s=DEADLINE_S,
        waiting_for=f"the learner's {what} of {record.name}",
    )


# Requests about users to the auth service, on behalf of the connection's user.

USERS_TIMEOUT_S = 20.0
_BACK_S = 6.0
"""How long the auth service of a pool with users may be absent."""


async def ask_users(broker: Broker, method: str, request: Message, reply: type[R]) -> R:
    """Send a request on `rpc.<user>.users.<method>`; repeat it until it is answered.

    Raises AuthError for requests that only admins may send, BrokerError in a pool without users.
    """
    return await call_service(
        broker,
        broker.rpc("users", method),
        request,
        reply,
        timeout_s=USERS_TIMEOUT_S,
        absent_s=_BACK_S if broker.is_limited else 0.0,
        absent=errors.BrokerError(
            f"the pool at {shown_url(broker.url)} has no users: no auth service answers",
            hint="`tinkermq init` makes the secrets of a pool with authentication; where "
            "it has them, see `tinkermq doctor`",
        ),
        waiting_for="the auth service",
    )


async def all_users(broker: Broker) -> list[UserInfo]:
    """Return all users by name, for admins."""
    users: list[UserInfo] = []
    while True:
        after = users[-1].user if users else ""
        page = await ask_users(broker, "list", ListUsers(after=after), UserList)
        users += page.users
        if not page.more or not page.users:
            return users
