"""Whatever is sent to any route of the gateway, it answers, and never with an error of its own."""

import asyncio
import http.client
import json
import os
import random
import re
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import quote, urlencode

import pytest
import pytest_asyncio
from pydantic import BaseModel, Field
from starlette.routing import Route
from tinkermq.actors.gateway import openai, rest
from tinkermq.actors.gateway.pages import routes as pages
from tinkermq.actors.gateway.rest import OPERATIONS

from tests.fuzz.payloads import Hostile, Schemas
from tests.support.gateway import Gateway, run_gateway
from tests.support.processes import peak_mb
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

FEW, MANY = 4, 10_000
MAX_MB = 500
AT_ONCE = 8
SEED = int(os.environ.get("TMQ_FUZZ_SEED", "1"))


class CommonFields(BaseModel):
    """What requests of Chat Completions and Completions have in common."""

    model: str
    n: int = Field(default=1, ge=1, le=4)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    response_format: dict[str, Any] | None = None


class ChatFields(CommonFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)


class CompletionFields(CommonFields):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True


BODIES = {
    **{(one.method, one.path): one.body for one in OPERATIONS},
    ("POST", "/v1/chat/completions"): ChatFields,
    ("POST", "/v1/completions"): CompletionFields,
}
TEXTS = (
    *("", "x", "0", "-1", "1" * 30, "9" * 5000, "\u00e4\u20ac", "\x00"),
    *("a/b", "..", "%", "'", "<b>", "x" * 3000),
)
QUERY = ("limit", "state", "of", "from", "before", "step", "sort", "errors", "next", "like")
FORM = ("key", "config", "overrides", "priority", "do", "now", "role", "count", "user", "x")
ODD = (
    *("authorization", "cookie", "last-event-id", "accept-encoding", "range", "traceparent"),
    *("host", "origin", "sec-fetch-site"),
)
ODD_VALUES = ("Bearer ", "Bearer x", "1", "9" * 40, "=;=", "\xff", "http://[", "[", "-1")
NO_JSON = (b"[" * 10_000, b"{", b"\xff", b"null", b"[1]", b"1e999", b'{"a":NaN}')
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**70, 1.5, float("nan"), float("inf"), "", "x" * 3000, "&a [*a]"),
    *([], {}, [[[]]] * 500, {"a": {"b": "\ud800"}}, [None], [{"role": "user"}]),
    *(["a=&a [*a]", "=", "a.b=1"], ["env.kwargs={a: &a 1, b: *a}"]),
)


def all_routes() -> list[tuple[str, str]]:
    """Every route of the gateway: those of the interface, of OpenAI, of users, and the pages."""
    found = [(one.method, one.path) for one in OPERATIONS]
    more: list[Route] = [
        *openai.routes(cast("Any", None), cast("Any", None)),
        *rest.user_routes(),
        *pages.routes(),
    ]
    for route in more:
        found += [(method, route.path) for method in sorted(set(route.methods or ()) - {"HEAD"})]
    return [*found, ("GET", "/healthz"), ("GET", "/metrics"), ("GET", "/api/openapi.json")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(shared_stack: Stack) -> AsyncIterator[Gateway]:
    """A gateway to a pool without keys: everything is allowed to everybody."""
    async with run_gateway(shared_stack.server.url, shared_stack.folder) as running:
        yield running


class Sender:
    """Makes the requests of one route, and sends them over one connection."""

    def __init__(self, gateway: Gateway, method: str, path: str, number: int = 0) -> None:
        self._rng = random.Random(f"{SEED} {method} {path} {number}")
        self._hostile = Hostile(self._rng)
        self._schemas = Schemas(self._rng, {"max_tokens": (1, 2)})
        self._method, self._path = method, path
        self._url = gateway.url.rpartition("//")[2]

    def send(self, count: int) -> None:
        """Send so many; raises AssertionError for a bad answer."""
        for _ in range(count):
            self._send()

    def _send(self) -> None:
        path, body, headers = self._made()
        connection = http.client.HTTPConnection(self._url, timeout=PATIENCE_S)
        try:
            connection.request(self._method, path, body, headers)
            reply = connection.getresponse()
            if "event-stream" in reply.headers.get("content-type", ""):
                return
            text = reply.read()
        finally:
            connection.close()
        told = (
            f"{self._method} {path[:300]} {(body or b'')[:300]!r}: {reply.status} {text[-500:]!r}"
        )
        assert reply.status < 500, told
        if reply.status >= 400 and path.startswith(("/api/", "/v1/")):
            error = json.loads(text)["error"]
            assert error["message"], told

    def _made(self) -> tuple[str, bytes | None, dict[str, str]]:
        rng = self._rng

        def filled(_: object) -> str:
            return quote(rng.choice((*TEXTS, "1")), safe="")

        path = re.sub(r"{\w+(:\w+)?}", filled, self._path)
        if rng.random() < 0.4:
            query = {rng.choice(QUERY): rng.choice(TEXTS) for _ in range(2)}
            path += f"?{urlencode(query)}"
        headers = {"content-type": rng.choice(("application/json",) * 4 + ("text/plain", ""))}
        if rng.random() < 0.3:
            headers[rng.choice(ODD)] = rng.choice(ODD_VALUES)
        if self._method == "GET":
            return path, None, headers
        return path, self._body(headers), headers

    def _body(self, headers: dict[str, str]) -> bytes:
        rng, model = self._rng, BODIES.get((self._method, self._path))
        if model is None:  # a form
            headers["content-type"] = "application/x-www-form-urlencoded"
            form = {rng.choice(FORM): rng.choice((*TEXTS, "a: 1", "[" * 2000)) for _ in range(4)}
            return urlencode(form).encode() if rng.random() < 0.8 else rng.randbytes(200)
        fields: Any = self._schemas.valid(cast("Any", model))
        fields.pop("v")
        choice = rng.randrange(6)
        if choice == 0:
            return json.dumps(fields, default=str).encode()
        if choice == 1:
            return rng.choice(NO_JSON)
        if choice == 2:
            return json.dumps(fields, default=str).encode()[: rng.randrange(1, 40)]
        name = rng.choice([*model.model_fields, "model", "__class__"])
        return json.dumps({**fields, name: rng.choice(VALUES)}, default=str).encode()


async def fuzz(gateway: Gateway, method: str, path: str, count: int) -> None:
    each = max(1, count // AT_ONCE)
    senders = [Sender(gateway, method, path, number) for number in range(min(AT_ONCE, count))]
    await asyncio.gather(*(asyncio.to_thread(sender.send, each) for sender in senders))


@pytest.mark.parametrize(("method", "path"), all_routes())
async def test_every_route_answers_whatever_it_is_sent(
    gateway: Gateway, method: str, path: str
) -> None:
    await fuzz(gateway, method, path, FEW)
    assert (await gateway.get("/healthz")).json["status"] == "ok"


async def test_after_all_of_it_the_gateway_has_grown_by_little(gateway: Gateway) -> None:
    assert peak_mb(gateway.process.pid) < MAX_MB


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("method", "path"), all_routes())
async def test_every_route_answers_ten_thousand_requests(
    gateway: Gateway, method: str, path: str
) -> None:
    await fuzz(gateway, method, path, MANY)
    assert (await gateway.get("/healthz")).json["status"] == "ok"
