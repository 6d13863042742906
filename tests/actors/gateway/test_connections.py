"""Connections of a gateway: what is beyond the bound is told so, and nobody takes all of them."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tinkermq.actors.gateway.limits import (
    MAX_CONNECTIONS,
    MAX_OF_HOLDER,
    MAX_RUNNING,
    NUM_RESERVED,
    gateway_connections,
)
from tinkermq.actors.gateway.tinker.routes import SAMPLES_AT_ONCE
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.catalogue_service import CatalogueService
from tinkermq.actors.tinker.models import Models
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.http_server import ConnectionBounds, give_connection_to
from tinkermq.schemas.tinker.operation import OperationResult, TrainerOffer, TrainerOffers
from tinkermq.schemas.tinker.sampling import AwaitSample, SampleRequest, SampleTaken
from tinkermq.schemas.wire.errors import BusyError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.gateway import Gateway, run_gateway
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """A server with these bounds, on a real port."""

    port: int
    release: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets those go that wait for an answer."""
    num_waiting: int = 0
    clients: list[Client] = field(default_factory=list[Client])

    async def open(self, request: str = "", body: bytes = b"") -> Client:
        """Open a connection; send a request line, if one is given."""
        client = await asyncio.open_connection("127.0.0.1", self.port)
        self.clients.append(client)
        if request:
            self.ask(client, request, body)
        return client

    def ask(self, client: Client, request: str, body: bytes = b"", **headers: str) -> None:
        """Send a request."""
        lines = [f"{request} HTTP/1.1", "host: a", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        client[1].write("\r\n".join([*lines, "", ""]).encode() + body)

    async def hold(self, num: int, **headers: str) -> None:
        """Let so many further requests wait for their answers."""
        wanted = self.num_waiting + num
        for _ in range(num):
            self.ask(await self.open(), "GET /v1/wait", b"", **headers)
        await until(lambda: self.num_waiting == wanted, "the requests to wait")


@contextlib.asynccontextmanager
async def served(
    most: int = MAX_CONNECTIONS,
    of_address: int = MAX_OF_HOLDER,
    of_user: int = MAX_OF_HOLDER,
    reserved: int = NUM_RESERVED,
) -> AsyncIterator[Served]:
    """Serve with connections of these bounds."""

    async def wait(request: Request) -> Response:
        if (user := request.headers.get("user")) is not None:
            try:
                give_connection_to(user, request.scope)
            except BusyError as error:
                return PlainTextResponse(error.message, 429)
        here.num_waiting += 1
        await here.release.wait()
        return PlainTextResponse("waited")

    async def page(_: Request) -> Response:
        return PlainTextResponse("a page")

    async def read(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    routes = [
        Route("/v1/wait", wait),
        Route("/v1/read", read, methods=["POST"]),
        Route("/tinker/api/v1/session_heartbeat", read, methods=["POST"]),
        Route("/{path:path}", page, methods=["GET", "POST"]),
    ]
    connections = gateway_connections(ConnectionBounds(most, of_address, of_user, reserved))
    config = uvicorn.Config(
        Starlette(routes=routes),
        port=0,
        lifespan="off",
        log_config=None,
        ws="none",
        http=cast("Any", connections.protocol),
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve(), name="server")
    watching = asyncio.create_task(connections.watch(), name="watch")
    try:
        await until(lambda: server.started, "the server to listen")
        here = Served(server.servers[0].sockets[0].getsockname()[1])
        yield here
    finally:
        here.release.set()
        for _, writer in here.clients:
            writer.close()
        watching.cancel()
        server.force_exit = server.should_exit = True
        await running


async def answer_of(client: Client) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the next answer on a connection."""
    async with asyncio.timeout(PATIENCE_S):
        head = (await client[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lines = [line.partition(": ") for line in head[1:] if line]
        headers = {name.lower(): value for name, _, value in lines}
        body = await client[0].readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


async def is_closed(client: Client) -> bool:
    """Whether the other side ends the connection."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            return await client[0].read() == b""
    return True


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    """What is logged meanwhile."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /v1/wait",
        "POST /v1/read",
        "POST /tinker/api/v1/asample",
        "POST /tinker/api/v1/retrieve_future",
        "GET /e/key/v1/models",
    ],
)
async def test_a_request_beyond_the_bound_is_told_so_in_json_and_when_to_come_again(
    request_line: str, logged: list[Any]
) -> None:
    async with served(of_address=3) as here:
        await here.hold(3)
        status, headers, body = await answer_of(await here.open(request_line, b"x" * 300_000))
        assert (status, headers["retry-after"], headers["connection"]) == (503, "5", "close")
        assert headers["content-type"] == "application/json"
        told = json.loads(body)
        assert "3 connections are open from 127.0.0.1" in told["error"]["message"]
        assert told["error"]["code"] == "busy"
        assert told["detail"].startswith(told["error"]["message"])
    refused = [one for one in logged if one["event"] == "connections_refused"]
    assert [(one["holder"], one["num"]) for one in refused] == [("127.0.0.1", 1)]


@pytest.mark.parametrize(
    "request_line",
    [
        "GET /healthz",
        "GET /",
        "GET /jobs?state=RUNNING",
        "GET /api/v1/jobs",
        "GET /static/style.css",
        "POST /login",
        "GET /metrics",
        "POST /tinker/api/v1/session_heartbeat",
    ],
)
async def test_pages_health_and_heartbeats_have_a_reserve(request_line: str) -> None:
    async with served(of_address=3) as here:
        await here.hold(3)
        for _ in range(5):
            client = await here.open(request_line, b"{}" if "POST" in request_line else b"")
            status, headers, _ = await answer_of(client)
            assert (status, headers["connection"]) == (200, "close")
            assert await is_closed(client)


async def test_the_reserve_is_for_no_stream() -> None:
    async with served(of_address=1) as here:
        await here.hold(1)
        client = await here.open()
        here.ask(client, "GET /api/v1/jobs/a/stream", accept="text/event-stream")
        assert (await answer_of(client))[0] == 503


async def test_of_the_reserve_half_is_for_one_address_and_silence_is_not_waited_for(
    logged: list[Any],
) -> None:
    async with served(of_address=1, reserved=4) as here:
        await here.hold(1)
        silent = [await here.open() for _ in range(2)]
        status, headers, body = await answer_of(await here.open())
        assert (status, headers["retry-after"]) == (503, "5")
        assert json.loads(body)["error"]["code"] == "busy"
        for client in silent:  # they are told so, too, once they have asked for nothing
            assert (await answer_of(client))[0] == 503
        client = await here.open("GET /healthz")
        assert (await answer_of(client))[0] == 200
    refused = [one for one in logged if one["event"] == "connections_refused"]
    assert len(refused) == 1, "one line for the address and minute"


async def test_the_connection_that_is_idle_longest_makes_room() -> None:
    async with served(of_address=3) as here:
        clients = [await here.open("POST /v1/read", b"ab") for _ in range(2)]
        for client in clients:
            assert (await answer_of(client))[2] == b"2"
        await here.hold(1)
        here.ask(clients[0], "POST /v1/read", b"abc")
        assert (await answer_of(clients[0]))[2] == b"3"
        new = await here.open("POST /v1/read", b"abcd")
        assert (await answer_of(new))[2] == b"4"
        assert await is_closed(clients[1])
        here.ask(clients[0], "POST /v1/read", b"abcde")
        assert (await answer_of(clients[0]))[2] == b"5"
        here.release.set()
        assert (await answer_of(here.clients[2]))[2] == b"waited", "who waits is not closed"


async def test_users_behind_one_address_do_not_take_each_others_connections() -> None:
    async with served(of_address=3, of_user=3) as here:
        for user in ("alice", "bob", "carol"):
            await here.hold(3, user=user)
        fourth = await here.open()
        here.ask(fourth, "GET /v1/wait", user="alice")
        status, headers, body = await answer_of(fourth)
        assert (status, headers["connection"]) == (429, "close")
        assert b"4 connections of yours are open" in body
        await here.hold(1, user="dave")


async def test_once_they_are_scarce_each_has_an_equal_share() -> None:
    async with served(most=12, of_address=3, of_user=12) as here:
        await here.hold(9, user="alice")
        greedy = await here.open()
        here.ask(greedy, "GET /v1/wait", user="alice")
        assert (await answer_of(greedy))[0] == 429
        await here.hold(3, user="bob")
        here.release.set()
        for client in here.clients[:9]:
            assert (await answer_of(client))[2] == b"waited"
        here.ask(here.clients[8], "GET /v1/wait", user="alice")
        assert (await answer_of(here.clients[8]))[0] == 200
        for client in here.clients[:4]:  # until they are no longer scarce
            assert await is_closed(client), "of who has too many the idle ones are closed"
        here.ask(here.clients[4], "GET /v1/wait", user="alice")
        assert (await answer_of(here.clients[4]))[0] == 200


async def test_an_idle_connection_of_who_has_most_makes_room_for_another() -> None:
    async with served(most=4, of_address=2, of_user=4) as here:
        await here.hold(3, user="alice")
        await here.hold(1, user="bob")
        client = await here.open("GET /v1/wait")
        assert (await answer_of(client))[0] == 503, "nobody is idle"
        here.release.set()
        for idle in here.clients[:4]:
            assert (await answer_of(idle))[2] == b"waited"
        new = await here.open("POST /v1/read", b"ab")
        assert (await answer_of(new))[2] == b"2"
        assert await is_closed(here.clients[0]), "alice has most, and this is idle longest"


async def test_a_proxy_in_front_may_have_all_of_them() -> None:
    async with served(most=6, of_address=6) as here:
        await here.hold(6)
        assert (await answer_of(await here.open("GET /v1/wait")))[0] == 503
        assert (await answer_of(await here.open("GET /healthz")))[0] == 200


# -- 400 samples at once ---------------------------------------------------------------------------

SDK = {"x-api-key": "tml-any", "user-agent": "AsyncTinker/Python 0.38.0"}
REFUSALS = {
    503: ("connections are open from 127.0.0.1", "5"),
    429: ("too many requests under way", "1"),
}
"""By their status, the words of refusals and the seconds after which to come again."""
OF_CLIENT = 50
"""Requests of one HTTP client of the SDK at a time."""


@dataclass
class Samplers:
    """Stands for a pool with one sampler, which answers once it is let go."""

    release: asyncio.Event = field(default_factory=asyncio.Event)
    taken: set[str] = field(default_factory=set[str])

    async def offers(self, _: Empty) -> TrainerOffers:
        offer = TrainerOffer(job="j1", base="org/base", max_context=64, max_rank=8)
        return TrainerOffers(offers=[offer])

    async def sample(self, request: SampleRequest) -> SampleTaken:
        self.taken.add(request.request)
        return SampleTaken(actor="s1", num_samples=1)

    async def sampled(self, request: AwaitSample) -> OperationResult:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.wait_s):
                await self.release.wait()
                return OperationResult(state="done", body=b'{"sequences": []}')
        return OperationResult(state="pending")


@contextlib.asynccontextmanager
async def pool_with_sampler(broker: Broker, folder: Path) -> AsyncIterator[Samplers]:
    """Answer what the gateway asks a pool, each actor of which bounds a user's requests."""
    samplers = Samplers()
    async with (
        await Service.start(broker, name="scheduler", description="offers") as scheduler,
        await Service.start(broker, name="trainer", description="sessions") as trainer,
        await Service.start(broker, name="sampler", description="samples") as sampler,
    ):
        offers = rpc("*", "scheduler", "trainers")
        await scheduler.endpoint("trainers", offers, Empty, samplers.offers)
        catalogue = CatalogueService(Catalogue(folder), Models())
        await catalogue.open(trainer, JobScope("local", "j1"))
        subject = rpc("*", "tinker-j1", "sample")
        await sampler.endpoint("sample", subject, SampleRequest, samplers.sample)
        subject = rpc("*", "tinker-j1", "sampled-s1")
        await sampler.endpoint("sampled", subject, AwaitSample, samplers.sampled)
        yield samplers


class SdkClients:
    """HTTP clients as the SDK has them: as many as it has requests, each for fifty."""

    def __init__(self, url: str) -> None:
        self._api = f"{url}/tinker/api/v1"
        self._clients: list[httpx.AsyncClient] = []
        self._running: list[int] = []
        self.refusals: list[httpx.Response] = []

    async def post(self, path: str, body: Any) -> httpx.Response:
        """Send a request; what is refused is sent again."""
        place = next((at for at, num in enumerate(self._running) if num < OF_CLIENT), None)
        if place is None:
            limits = httpx.Limits(max_connections=1000, max_keepalive_connections=20)
            self._clients.append(httpx.AsyncClient(headers=SDK, limits=limits, timeout=PATIENCE_S))
            self._running.append(0)
            place = len(self._running) - 1
        self._running[place] += 1
        try:
            while True:
                try:
                    answer = await self._clients[place].post(f"{self._api}/{path}", json=body)
                except (httpx.NetworkError, httpx.RemoteProtocolError):
                    # refused, or closed for another, while it was being sent: no answer
                    await asyncio.sleep(0.2)
                    continue
                if answer.status_code not in (429, 503):
                    return answer
                self.refusals.append(answer)
                await asyncio.sleep(0.2)
        finally:
            self._running[place] -= 1

    async def good(self, path: str, body: Any) -> Any:
        """Return the answer to a request that is answered."""
        answer = await self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


async def sample_at_once(
    clients: SdkClients, num: int, at_once: int, meanwhile: Callable[[], Awaitable[None]]
) -> None:
    """Have so many samples under way, `at_once` at a time; each waits on its own connection."""
    begun = await clients.good("create_session", {"type": "create_session", "tags": []})
    body = {"session_id": begun["session_id"], "sampling_session_seq_id": 0}
    sampler = await clients.good("create_sampling_session", {**body, "base_model": "org/base"})
    places = asyncio.Semaphore(at_once)

    async def one(seq: int) -> None:
        async with places:
            asked = {"sampling_session_id": sampler["sampling_session_id"], "seq_id": seq}
            taken = await clients.good("asample", {**asked, "prompt": {}, "num_samples": 1})
            while True:
                told = {"request_id": taken["request_id"]}
                answer = await clients.post("retrieve_future", told)
                if answer.status_code != 408:
                    assert answer.json() == {"sequences": []}
                    return

    async def heartbeat() -> None:
        await clients.good("session_heartbeat", {"session_id": begun["session_id"]})

    async with asyncio.TaskGroup() as tasks:
        for seq in range(num):
            tasks.create_task(one(seq))
        await meanwhile()
        await heartbeat()


@pytest.mark.parametrize(
    ("num", "limited"),
    [
        pytest.param(400, True, id="as told"),
        pytest.param(MAX_OF_HOLDER + NUM_RESERVED, False, id="all"),
    ],
)
async def test_hundreds_of_samples_at_once_leave_room_for_health_and_pages(
    own_server: NatsServer, own_broker: Broker, tmp_path: Path, num: int, limited: bool
) -> None:
    async with (
        pool_with_sampler(own_broker, tmp_path) as samplers,
        run_gateway(own_server.url, tmp_path) as gateway,
    ):
        clients, began = SdkClients(gateway.url), time.monotonic()
        told = await clients.good("client/config", {"sdk_version": "0.38.0"})
        assert told["sample_max_concurrent_requests"] == SAMPLES_AT_ONCE < MAX_RUNNING
        at_once = told["sample_max_concurrent_requests"] if limited else num

        async def others() -> None:
            few = min(at_once, MAX_OF_HOLDER) - 8  # those of the clients themselves are among them
            await until(lambda: len(samplers.taken) >= few or bool(clients.refusals), "samples")
            if not limited:
                await until(lambda: bool(clients.refusals), "a refusal")
            await assert_answers(gateway)
            samplers.release.set()

        try:
            await sample_at_once(clients, num, at_once, others)
        finally:
            await clients.close()
        assert len(samplers.taken) == num
        refused = [line for line in log_of(gateway) if line["event"] == "connections_refused"]
        minutes = int(time.monotonic() - began) // 60
        assert not refused if limited else 1 <= len(refused) <= 1 + minutes
        assert bool(clients.refusals) is not limited
        for one in clients.refusals:  # by the sampler as well, once more often asked than in time
            words, again_s = REFUSALS[one.status_code]
            assert words in one.json()["detail"]
            assert one.headers["retry-after"] == again_s
        assert limited or 503 in {one.status_code for one in clients.refusals}


async def assert_answers(gateway: Gateway) -> None:
    """Health, pages and the REST interface answer."""
    for path in ("/healthz", "/tinker", "/login", "/api/v1/tinker"):
        answer = await gateway.get(path, x_api_key="tml-any")
        assert answer.status in (200, 303), (path, answer)


def log_of(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the lines of a gateway's log."""
    lines = gateway.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
