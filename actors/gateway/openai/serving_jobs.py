"""Which inference jobs of a user answer now, and which of them a model's name means."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from ....broker.client.connection import Broker
from ....broker.client.parts import ask_parts
from ....broker.jobs import JobStore
from ....broker.presence import presences
from ....schemas.infer import CancelInference, ChatRequest, CompletionRequest, InferPart
from ....schemas.job import JobRecord
from ....schemas.wire.errors import NotFoundError

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
