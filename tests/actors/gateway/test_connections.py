"""Hundreds of requests at once at a gateway: pages and health are still answered."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinkermq.actors.gateway.limits import MAX_LOCAL_REQUESTS, MAX_RUNNING, http_bounds
from tinkermq.actors.gateway.tinker.routes import SAMPLES_AT_ONCE
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.catalogue_service import CatalogueService
from tinkermq.actors.tinker.models import Models
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.tinker.operation import OperationResult, TrainerOffer, TrainerOffers
from tinkermq.schemas.tinker.sampling import AwaitSample, SampleRequest, SampleTaken
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.gateway import Gateway, run_gateway
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("path", "accept", "is_light"),
    [
        ("/healthz", "", True),
        ("/", "", True),
        ("/api/v1/jobs", "", True),
        ("/static/style.css", "", True),
        ("/login", "", True),
        ("/metrics", "", True),
        ("/tinker/api/v1/session_heartbeat", "", True),
        ("/api/v1/jobs/a/stream", "text/event-stream", False),
        ("/v1/chat/completions", "", False),
        ("/tinker/api/v1/asample", "", False),
        ("/tinker/api/v1/retrieve_future", "", False),
        ("/e/key/v1/models", "", False),
    ],
)
def test_pages_health_and_heartbeats_are_answered_however_many_requests_run(
    path: str, accept: str, is_light: bool
) -> None:
    scope = {"path": path, "headers": [(b"accept", accept.encode())]}
    assert http_bounds().is_light(scope) is is_light


# -- 400 samples at once ---------------------------------------------------------------------------

SDK = {"x-api-key": "tml-any", "user-agent": "AsyncTinker/Python 0.38.0"}
REFUSALS = {
    503: ("requests run, as many as this gateway serves at once", "5"),
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
        pytest.param(400, True, id="as told", marks=pytest.mark.long),
        pytest.param(MAX_LOCAL_REQUESTS + 64, False, id="all"),
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
            few = (
                min(at_once, MAX_LOCAL_REQUESTS) - 8
            )  # those of the clients themselves are among them
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
        refused = [line for line in log_of(gateway) if line["event"] == "requests_refused"]
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
