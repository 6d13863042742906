"""Operations on jobs, for the forms of the pages and the REST interface."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema

from ...broker.calls import TAKEOVER_S, SchedulerCalls, decide_failed, write_checkpoint
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import parse_config, parse_yaml, with_overrides
from ...schemas.config.sections import MAX_NOTES, MAX_TAGS, Label
from ...schemas.job import FINAL_STATES, JobRecord, Priority
from ...schemas.task import Decision
from ...schemas.wire.codec import merged
from ...schemas.wire.errors import AuthError, ConfigError, MessageError, did_you_mean
from ...schemas.wire.field_docs import described
from ...schemas.wire.message import Message, summarize
from .limits import Share
from .sessions import Visitor

# -- requests to the scheduler for one visitor
# --------------------------------------------------------

R = TypeVar("R", bound=Message)

LIST_AGE_S = 1.0


class Scheduler(SchedulerCalls):
    """The scheduler, with one visitor's rights."""

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(visitor.broker)
        self._visitor = visitor
        self.share = visitor.share

    async def get(self, job: str) -> JobRecord:
        """Return a job of the visitor; raises NotFoundError, AuthError for another user's job.

        The scheduler shows it to admins, but this connection cannot read the job's stored data.
        """
        record = await super().get(job)
        if record.user != self._visitor.user:
            raise AuthError(
                f"job {record.job} is {record.user}'s, and only its owner can open it here",
                hint=f"as an admin: TINKERMQ_AS={record.user} tinkermq logs {record.name}",
            )
        return record

    async def list_jobs(self, *, archived: bool = False) -> list[JobRecord]:
        """Return all jobs of the visitor, newest first; at most a second old.

        Archived jobs are included only with `archived`: there may be many.
        """
        if archived:
            return await self.all_jobs(archived=True)
        cached = self._visitor.listed
        if cached is not None and cached[0] + LIST_AGE_S > time.monotonic():
            return cached[1]
        records = await self.all_jobs()
        self._visitor.listed = (time.monotonic(), records)
        return records

    async def _call_scheduler(
        self, method: str, request: Message, reply: type[R], absent_s: float = TAKEOVER_S
    ) -> R:
        if method not in ("get", "list", "nodes", "trainers"):
            self._visitor.listed = None
        return await super()._call_scheduler(method, request, reply, absent_s)


B = TypeVar("B", bound=BaseModel)

MAX_YAML = 64_000
"""Characters of a configuration with its overrides."""
MAX_OVERRIDE = 2000


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return described(cls, core_schema, handler)


class SubmitBody(Body):
    """A job to be submitted."""

    config: dict[str, Any] | Annotated[str, Field(max_length=MAX_YAML)]
    """The configuration, as an object or as YAML text."""
    overrides: list[Annotated[str, Field(max_length=MAX_OVERRIDE)]] = Field(
        default_factory=list[str], max_length=500
    )
    """Keys that differ: `learner.lr=1e-5`."""
    kind: Literal["train", "infer", "eval", "sft", "tinker"] = "train"
    """What the job does."""
    fork_of: str | None = None
    """`run@step` whose checkpoint the job starts from, `run@last` or `run@best`."""
    weights_only: bool = False
    """Start a new run with that checkpoint's weights instead of `model.path`."""
    adapters: list[str] = Field(default_factory=list[str], max_length=64)
    """LoRA checkpoints (`run@step`) that an inference job serves beside its model."""
    priority: Priority = 0
    """Jobs of a higher priority are placed first."""
    request_id: str | None = Field(default=None, min_length=1, max_length=64)
    """Made by the caller; the same id returns the same job."""


class StopBody(Body):
    """How to stop a job."""

    now: bool = False
    """Do not wait for a checkpoint."""
    complete: bool = False
    """End as COMPLETED instead of CANCELLED."""


class ScaleBody(Body):
    """How many actors of a role a job should have."""

    role: Literal["generator", "environment", "server"]
    """The role."""
    count: int = Field(ge=0, le=1024)
    """The number of actors."""


class PriorityBody(Body):
    """A job's place in the queue."""

    priority: Priority
    """Jobs of a higher priority are placed first."""


def _words(value: Any) -> Any:
    """Return the words of a text; forms send lists like this."""
    return value.replace(",", " ").split() if isinstance(value, str) else value


class LabelBody(Body):
    """Tags, group and notes of a job."""

    tags: Annotated[list[Label], Field(max_length=MAX_TAGS), BeforeValidator(_words)] | None = None
    """Replaces its tags: a list, or words; left out: unchanged."""
    group: Label | Literal[""] | None = None
    """Its group; empty: none; left out: unchanged."""
    notes: Annotated[str, Field(max_length=MAX_NOTES)] | None = None
    """Its notes; left out: unchanged."""


class FailedBody(Body):
    """What is decided about tasks that failed for good."""

    decision: Decision
    """repeat: issue them again, each once; drop: take them off the list."""
    tasks: Annotated[list[int], Field(max_length=10_000), BeforeValidator(_words)] = Field(
        default_factory=list[int]
    )
    """Their numbers; none: all that are listed."""


class EmptyBody(Body):
    """An empty body."""


BODIES: dict[str, type[Body]] = {
    "stop": StopBody,
    "checkpoint": EmptyBody,
    "pause": EmptyBody,
    "resume": EmptyBody,
    "scale": ScaleBody,
    "priority": PriorityBody,
    "label": LabelBody,
    "failed": FailedBody,
    "archive": EmptyBody,
    "unarchive": EmptyBody,
    "delete": EmptyBody,
}


async def act(scheduler: Scheduler, job: str, action: str, body: Body) -> JobRecord:
    """Perform one of `BODIES` on a job; raises the scheduler's errors."""
    if isinstance(body, StopBody):
        return await scheduler.stop(job, now=body.now, complete=body.complete)
    if isinstance(body, ScaleBody):
        return await scheduler.scale(job, body.role, body.count)
    if isinstance(body, PriorityBody):
        return await scheduler.priority(job, body.priority)
    if isinstance(body, LabelBody):
        return await scheduler.label(job, tags=body.tags, group=body.group, notes=body.notes)
    if isinstance(body, FailedBody):
        record = await scheduler.get(job)
        await decide_failed(scheduler.broker, record, body.tasks, body.decision)
        return record
    if action == "checkpoint":
        record = await scheduler.get(job)
        await write_checkpoint(scheduler.broker, record)
        return record
    plain = {
        "pause": scheduler.pause,
        "resume": scheduler.resume,
        "archive": scheduler.archive,
        "unarchive": scheduler.unarchive,
        "delete": scheduler.delete,
    }
    return await plain[action](job)


async def submit(scheduler: Scheduler, body: SubmitBody) -> JobRecord:
    """Submit a job; raises ConfigError and the scheduler's errors."""
    config, _ = await checked_config(scheduler.share, body)
    return await scheduler.submit(config, **body.model_dump(exclude={"config", "overrides"}))


async def serve_checkpoint(scheduler: Scheduler, record: JobRecord, step: int) -> JobRecord:
    """Serve a checkpoint with one server; returns the job that serves it already, if any.

    Raises NotFoundError with the available steps, and the errors of `submit`.
    """
    what = f"{record.name}@{step}"
    return await _living(scheduler, "infer", what) or await scheduler.submit(
        merged(record.settings, {"generator": {"count": 1}}),
        kind="infer",
        fork_of=f"{record.job}@{step}",
    )


async def evaluate_checkpoint(scheduler: Scheduler, record: JobRecord, step: int) -> JobRecord:
    """Evaluate a checkpoint on its run's validation set; raises as `serve_checkpoint`."""
    what = f"{record.name}@{step}"
    return await _living(scheduler, "eval", what) or await scheduler.submit(
        record.settings, kind="eval", fork_of=f"{record.job}@{step}"
    )


async def _living(scheduler: Scheduler, kind: str, what: str) -> JobRecord | None:
    """Return the live job that serves or evaluates `run@step`."""
    for job in await scheduler.list_jobs():
        named = job.serves if kind == "infer" else job.fork_of
        if job.kind == kind and named == what and job.state not in FINAL_STATES:
            return job
    return None


async def checked_config(share: Share, body: SubmitBody) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of a submission, as given and with its defaults.

    Raises ConfigError with the key.
    """
    num_chars = len(body.config) if isinstance(body.config, str) else 0
    if num_chars + sum(map(len, body.overrides)) > MAX_YAML:
        raise ConfigError(
            f"configuration and overrides have more than {MAX_YAML:,} characters",
            hint="put large values into a data file",
        )
    return await share.in_thread(_read_config, body)  # reading YAML is slow


def _read_config(body: SubmitBody) -> tuple[dict[str, Any], dict[str, Any]]:
    source = body.config
    config = parse_yaml(source, "the configuration") if isinstance(source, str) else dict(source)
    config = with_overrides(config, [item for item in map(str.strip, body.overrides) if item])
    return config, parse_config(config).model_dump(mode="json")


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its defaults; unchanged if it cannot be parsed."""
    try:
        parsed: JobConfig = parse_config(dict(config))
    except ConfigError:
        return dict(config)
    return parsed.model_dump(mode="json")


def body_of(model: type[B], fields: Mapping[str, Any]) -> B:
    """Validate the body of a request; raises MessageError that names the field."""
    if unknown := set(fields) - set(model.model_fields):
        raise MessageError(
            f"the request is malformed: unknown field {min(unknown)!r}",
            hint=did_you_mean(min(unknown), model.model_fields, otherwise="see /api"),
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise MessageError(
            f"the request is malformed: {summarize(error)}", hint="see /api"
        ) from error
