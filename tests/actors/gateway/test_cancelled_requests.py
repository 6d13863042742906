"""A request to a served model that ends at any await, or whose client goes away, leaves nothing."""

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Message
from tinkermq.actors.gateway.limits import TAKEN, Share
from tinkermq.actors.gateway.openai import routes
from tinkermq.actors.gateway.tinker.trainers import Trainers
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import canned_server
from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import until

pytestmark = pytest.mark.full

MODEL: dict[str, Any] = {"model": "my-run@4"}
ASKED: Any = [{"role": "user", "content": "hi"}]
REQUESTS: list[Any] = [
    pytest.param("/v1/chat/completions", {"messages": ASKED, "stream": True}, id="chat"),
    pytest.param("/v1/responses", {"input": "hi", "stream": True}, id="responses"),
    pytest.param(
        "/v1/messages", {"messages": ASKED, "max_tokens": 9, "stream": True}, id="messages"
    ),
    pytest.param("/v1/chat/completions", {"messages": ASKED}, id="whole"),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_request_that_ends_at_any_await_leaves_no_answer_and_no_subscription(
    path: str, body: dict[str, Any], broker: Broker, scope: JobScope
) -> None:
    async def of_everybody(_: Request) -> Broker:
        return broker

    app = Starlette(routes=routes(of_everybody, Trainers()))
    share = Share()
    async with canned_server(broker, scope) as server:
        server.hang = True  # only the client's leaving ends an answer

        async def leave(after: int) -> None:
            """Ask, and go away after so many pieces of the answer."""
            num_sent, incoming = -1, [json.dumps({**MODEL, **body}).encode()]
            leaves = asyncio.Event()

            async def receive() -> Message:
                if incoming:
                    return {"type": "http.request", "body": incoming.pop(), "more_body": False}
                await leaves.wait()
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                nonlocal num_sent
                await asyncio.sleep(0)
                num_sent += 1
                if num_sent >= after:
                    leaves.set()

            if not (after and body.get("stream")):
                leaves.set()
            kind = {
                "type": "http",
                "method": "POST",
                "path": path,
                "headers": [],
                "query_string": b"",
            }
            with share.taken() as taken:
                await app({**kind, TAKEN: taken}, receive, send)

        async def play() -> None:
            for after in range(4):
                await leave(after)

        await play()  # the first request also subscribes for the server
        await until(lambda: not server.parts.num_running, "the server to stop answering")
        num_subscriptions = len(broker.nc._subs)

        async def given_back() -> None:
            await until(lambda: not server.parts.num_running, "the server to stop answering")
            await until(lambda: len(broker.nc._subs) <= num_subscriptions, "the inbox to be closed")

        assert await cancel_everywhere(play, given_back) > 10
