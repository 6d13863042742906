"""What the name of a model means: a job that serves it, or a checkpoint of a Tinker service."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ....broker.client.connection import Broker
from ....broker.client.parts import ask_parts
from ....broker.jobs import JobStore
from ....broker.presence import presences
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
from ....schemas.job import JobRecord
from ....schemas.tinker.names import is_path
from ....schemas.wire.errors import ConfigError, NotFoundError
from ..tinker.trainers import Trainers

_FRESH_S = 2.0


@dataclass(frozen=True)
class Serving:
    """A job whose servers answer."""

    record: JobRecord
    version: int | None
    adapter: str = ""
    """Which of its further adapters, as `run@step`; empty: what it serves first."""

    @property
    def model(self) -> str:
        """The name of what is served: `run@step`, or the job's."""
        record = self.record
        if self.adapter:
            return self.adapter
        if record.follow is not None and self.version is not None:
            return f"{record.serves}@{self.version}"
        return record.serves or record.name

    def is_called(self, name: str) -> bool:
        """Whether a model's name means this job: job, run, or `run@step` of what is served."""
        record = self.record
        if self.adapter:
            return name == self.adapter
        return name in (record.name, record.job, self.model, record.serves)

    def ask(
        self, broker: Broker, query: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[InferPart, None]:
        """Ask one of the job's servers; closing the generator cancels the work."""
        scope = self.record.scope
        verb = "chat" if isinstance(query, ChatRequest) else "complete"
        return ask_parts(
            broker,
            scope.infer(verb),
            query,
            InferPart,
            waiting_for=f"a server of {self.record.name}",
            cancel=(scope.infer("cancel"), CancelInference(request=query.request)),
        )

    def shown(self) -> dict[str, Any]:
        """Return it as the list of models tells of it."""
        record = self.record
        return {
            "id": self.model,
            "object": "model",
            "created": int(record.created),
            "owned_by": record.user,
            "job": record.job,
            "name": record.name,
        }


class ServingJobs:
    """The serving jobs of each user, read anew every few seconds."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[Serving]]] = {}

    async def list(self, broker: Broker) -> list[Serving]:
        """Return the jobs of the connection's user that answer now, newest first."""
        read, serving = self._known.get(broker.user, (0.0, []))
        if not read or time.monotonic() - read > _FRESH_S:
            serving = await _read(broker)
            self._known[broker.user] = (time.monotonic(), serving)
        return serving

    async def find(self, broker: Broker, name: str) -> Serving:
        """Return the job that a model's name means.

        Raises NotFoundError that names the models there are.
        """
        for fresh in (False, True):
            if fresh:
                self._known.pop(broker.user, None)
            for serving in await self.list(broker):
                if serving.is_called(name):
                    return serving
        there = ", ".join(serving.model for serving in await self.list(broker))
        raise NotFoundError(
            f"no model {name!r} is served to user {broker.user!r}",
            hint=f"there are: {there}" if there else "serve one: `tinkermq serve RUN@STEP`",
        )


async def _read(broker: Broker) -> list[Serving]:
    records = [
        record
        for record in await JobStore(broker).list_jobs(broker.user)
        if record.kind == "infer" and record.state == "RUNNING"
    ]
    found = await asyncio.gather(*(_serving(broker, record) for record in records))
    return [
        replace(serving, adapter=adapter)
        for serving in found
        if serving is not None
        for adapter in ("", *serving.record.adapters)
    ]


async def _serving(broker: Broker, record: JobRecord) -> Serving | None:
    entry = await presences(broker).find(f"{record.scope.key}.server-0")
    if entry is None or entry.value.state != "working":
        return None
    return Serving(record, entry.value.version)


class ServedModel(Protocol):
    """Something that answers."""

    @property
    def adapter(self) -> str:
        """What a request names, so that it is answered with that."""
        ...

    def ask(
        self, broker: Broker, query: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[InferPart, None]:
        """Have a request answered; closing the generator cancels the work."""
        ...

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI tells of a model."""
        ...


@dataclass(frozen=True)
class SampledPath:
    """A checkpoint that the samplers of a Tinker service answer with."""

    adapter: str
    """Its path."""
    job: str
    """The service."""
    trainers: Trainers

    def ask(
        self, broker: Broker, query: ChatRequest | CompletionRequest
    ) -> AsyncGenerator[InferPart, None]:
        """Ask one of the samplers; closing the generator cancels the work."""
        return self.trainers.answer(broker.user, broker, self.job, query)

    def shown(self) -> dict[str, Any]:
        """Return it as OpenAI tells of a model."""
        model = {"id": self.adapter, "object": "model", "created": 0}
        return {**model, "owned_by": "tinker", "job": self.job}


class ServedModels:
    """The models of each user."""

    def __init__(self, trainers: Trainers) -> None:
        """Find checkpoints at `trainers`."""
        self.serving = ServingJobs()
        """The jobs that serve."""
        self._trainers = trainers

    async def find(self, broker: Broker, name: str) -> ServedModel:
        """Return what answers under a name; raises NotFoundError, NobodyAnswersError."""
        if is_path(name):
            for serving in await self.serving.list(broker):
                if serving.is_called(name):
                    return serving
            return await self._sampled(broker, name)
        return await self.serving.find(broker, name)

    async def _sampled(self, broker: Broker, path: str) -> SampledPath:
        name = await self._trainers.source(broker, path)
        if name.kind == "external_weights":
            raise ConfigError(
                f"{path} was saved to be downloaded, and is not sampled from",
                hint="save the model with save_weights_for_sampler, and name that path",
            )
        job = await self._trainers.job_of_checkpoint(broker.user, broker, name)
        return SampledPath(str(name), job, self._trainers)
