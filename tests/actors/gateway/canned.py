"""A server behind the gateway that says what a test wants."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.parts import PartsService, Tell
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import presences
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.infer import (
    CancelInference,
    ChatRequest,
    CompletionRequest,
    InferPart,
)
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.subjects import JobScope


class Canned:
    """A server that says what the test wants, and remembers what it was asked."""

    def __init__(self, model: str = "my-run@4") -> None:
        self.model = model
        self.words = ["Hel", "lo"]
        self.asked: list[ChatRequest | CompletionRequest] = []
        self.error: Exception | None = None
        self.fails_late: Exception | None = None
        self.hang = False
        self.stop = ""
        self.cancelled = asyncio.Event()
        self.parts: PartsService
        """Its requests; set as it starts."""

    async def answer(
        self, request: ChatRequest | CompletionRequest, tell: Tell[InferPart]
    ) -> InferPart:
        """Tell the words one by one."""
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        told: dict[str, Any] = {"prompt_tokens": 3}
        if request.token_ids:
            told["prompt_token_ids"] = [[5, 6, 7]]
        for number, word in enumerate(self.words):
            named: dict[str, Any] = {}
            if request.logprobs:
                named = {"tokens": [word], "logprobs": [-0.5 * number]}
                named["token_bytes"] = [word.encode()]
            delta = Delta(choice=0, text=word, token_ids=[number], **named)
            await tell(InferPart(model=self.model, deltas=[delta], **told))
            told.pop("prompt_token_ids", None)
        if self.fails_late is not None:
            raise self.fails_late
        try:
            await asyncio.sleep(3600 if self.hang else 0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        end = Delta(choice=0, finish="stop", stop=self.stop)
        return InferPart(model=self.model, deltas=[end], **told)


@pytest.fixture
async def canned(broker: Broker, scope: JobScope) -> AsyncIterator[Canned]:
    """A job that serves my-run@4, with a canned server."""
    async with canned_server(broker, scope) as server:
        yield server


@contextlib.asynccontextmanager
async def canned_server(
    broker: Broker,
    scope: JobScope,
    model: str = "my-run@4",
    answering: Any = None,
    *,
    actor: str = "server-0",
    joins: bool = False,
) -> AsyncIterator[Canned]:
    """Serve a model as a job of this scope, from this process; `answering` answers in its place.

    With `joins` it is another server of a job that is there.
    """
    record = serving_record(scope, model)
    if not joins:
        await JobStore(broker).create(record, "test")
    presence = Presence(
        actor=actor, role="server", host="h", pid=1, state="working", version=4, time=0
    )
    beating = asyncio.create_task(_beat(broker, f"{scope.key}.{actor}", presence))
    server = Canned(model)
    async with await Service.start(broker, name="canned", description="canned") as service:
        parts = server.parts = PartsService(broker, service)
        for verb, asked in (("chat", ChatRequest), ("complete", CompletionRequest)):
            answer = answering or server.answer
            await parts.endpoint(verb, scope.infer(verb), asked, InferPart, answer)
            own = scope.infer_at(actor, verb)
            await parts.endpoint(f"{verb}-here", own, asked, InferPart, answer)
        listening = await broker.listen(
            scope.infer("cancel"),
            lambda message: parts.cancel(CancelInference.from_bytes(message.data).request),
        )
        yield server
        await listening.stop()
    beating.cancel()
    if not joins:
        await JobStore(broker).transition(record, "COMPLETED", "the test is over", "test")


def serving_record(scope: JobScope, model: str = "my-run@4") -> JobRecord:
    """Return the record of a job that serves a model."""
    return JobRecord(
        job=scope.job,
        name=f"serves-{scope.job}",
        user=scope.user,
        kind="infer",
        state="RUNNING",
        config={},
        fork_of=model,
        serves=model,
        adapters={"other-run@2": "/pool/adapters/other-run@2"},
        created=time.time(),
    )


async def _beat(broker: Broker, key: str, presence: Presence) -> None:
    while True:
        await presences(broker).put(key, presence)
        await asyncio.sleep(3)
