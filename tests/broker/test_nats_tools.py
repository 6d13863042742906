"""What the ordinary NATS tools ask for, sent as they send it, and what they would show.

`nats micro ls|info|stats`, `nats stream ls|info`, `nats consumer info`, `nats kv ls|get` and
`nats sub --translate`: everything of ours must have a name and a description there.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.feed import publish_event, publish_metric
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Event, Metric
from tinkermq.schemas.wire.subjects import TASK_CONSUMER

from tests.actors.scheduler.conftest import Stack
from tests.clients.command import tinkermq
from tests.support.gateway import run_gateway
from tests.support.secured import secured
from tests.support.waiting import PATIENCE_S, eventually

REQUESTS = "tinkermq-scheduler-requests"
SERVICES = {REQUESTS, "tinkermq-scheduler", "tinkermq-node", "tinkermq-gateway"}


pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Scheduler and node as processes."""
    folder = tmp_path_factory.mktemp("tools")
    with NatsServer(folder / "nats") as server:
        async with await connect(server.url, name="test") as broker:
            await create_shared(broker)
            pool = Stack(broker, folder)
            await pool.scheduler_process()
            await pool.node_process()
            await pool.until_nodes(1)
            yield pool
            await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(stack: Stack) -> JobRecord:
    """A job that runs."""
    return await stack.until(await stack.submit(), "RUNNING")


async def discovered(broker: Broker, verb: str, names: set[str]) -> dict[str, dict[str, Any]]:
    """Ask all services as `nats micro` does, until those with `names` have answered."""
    found: dict[str, dict[str, Any]] = {}
    inbox = broker.nc.new_inbox()

    def take(message: Any) -> None:
        answer = json.loads(message.data)
        found[answer["name"]] = answer

    listening = await broker.listen(inbox, take)

    async def ask() -> bool:
        await broker.nc.publish(f"$SRV.{verb}", b"", reply=inbox)
        await broker.nc.flush()
        await asyncio.sleep(0.1)
        return names <= set(found)

    await eventually(ask, f"{names} to answer $SRV.{verb}")
    await listening.stop()
    return found


async def js(broker: Broker, verb: str, **request: Any) -> dict[str, Any]:
    """Ask JetStream as the tools do."""
    payload = json.dumps(request).encode() if request else b""
    reply = await broker.nc.request(f"$JS.API.{verb}", payload, timeout=PATIENCE_S)
    answer: dict[str, Any] = json.loads(reply.data)
    assert "error" not in answer, (verb, answer)
    return answer


def check_services(kind: str, found: dict[str, dict[str, Any]]) -> None:
    for name, answer in found.items():
        assert name.startswith("tinkermq-"), name
        assert answer["type"] == f"io.nats.micro.v1.{kind}_response"
        assert answer["id"]
        assert answer["version"].count(".") == 2


async def test_micro_lists_describes_and_counts_every_service(stack: Stack, tmp_path: Path) -> None:
    async with run_gateway(stack.broker.url, tmp_path):
        check_services("ping", await discovered(stack.broker, "PING", SERVICES))
        infos = await discovered(stack.broker, "INFO", SERVICES)
        check_services("info", infos)
        for name, info in infos.items():
            assert len(info["description"]) > 10, name
            for endpoint in info["endpoints"]:
                assert endpoint["name"]
                assert endpoint["subject"].startswith("tmq.v1.")
        assert "submit" in {one["name"] for one in infos[REQUESTS]["endpoints"]}
        for tail in ("", f".{infos['tinkermq-node']['id']}"):
            one = await discovered(stack.broker, f"INFO.tinkermq-node{tail}", {"tinkermq-node"})
            assert set(one) == {"tinkermq-node"}
        stats = await discovered(stack.broker, "STATS", SERVICES)
        check_services("stats", stats)
        counted = {one["name"]: one for one in stats[REQUESTS]["endpoints"]}
        assert counted["nodes"]["num_requests"] > 0
        assert counted["nodes"]["num_errors"] == 0


async def test_every_stream_and_consumer_has_a_name_and_a_description(
    stack: Stack, job: JobRecord
) -> None:
    scope = job.scope
    listed = await js(stack.broker, "STREAM.LIST", offset=0, subject="")
    streams = {one["config"]["name"]: one for one in listed["streams"]}
    assert listed["total"] == len(streams)
    assert {scope.stream_task, scope.stream_rollout, scope.stream_feed} <= set(streams)
    for name, stream in streams.items():
        assert name.startswith(("tmq-", "KV_tmq-", "OBJ_tmq-"))
        assert len(stream["config"]["description"]) > 10, name
        assert stream["config"]["max_bytes"] > 0, name
        info = await js(stack.broker, f"STREAM.INFO.{name}")
        assert info["config"]["description"] == stream["config"]["description"]
        told = await js(stack.broker, f"CONSUMER.LIST.{name}", offset=0)
        for consumer in told["consumers"]:
            assert consumer["config"].get("description"), (name, consumer["name"])
    verb = f"CONSUMER.INFO.{scope.stream_task}.{TASK_CONSUMER}"
    assert scope.job in (await js(stack.broker, verb))["config"]["description"]
    subjects = await js(stack.broker, f"STREAM.INFO.{scope.stream_feed}", subjects_filter=">")
    assert scope.event in subjects["state"]["subjects"]


async def test_buckets_are_listed_and_a_value_is_read_as_text(stack: Stack, job: JobRecord) -> None:
    listed = await js(stack.broker, "STREAM.LIST", offset=0, subject="$KV.*.>")
    buckets = {one["config"]["name"] for one in listed["streams"]}
    assert {"KV_tmq-jobs", "KV_tmq-nodes", "KV_tmq-actors"} <= buckets
    info = await js(stack.broker, "STREAM.INFO.KV_tmq-jobs", subjects_filter="$KV.tmq-jobs.>")
    key = f"$KV.tmq-jobs.{job.scope.key}"
    assert key in info["state"]["subjects"]
    reply = await stack.broker.nc.request(
        f"$JS.API.DIRECT.GET.KV_tmq-jobs.{key}", b"", timeout=PATIENCE_S
    )
    shown = await asyncio.to_thread(tinkermq, "decode", stdin=reply.data)
    assert shown.code == 0
    assert job.name in shown.out
    assert "RUNNING" in shown.out


async def test_followed_messages_are_translated_one_by_one(stack: Stack, job: JobRecord) -> None:
    scope = job.scope
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    listening = await stack.broker.listen("tmq.v1.job.>", lambda one: heard.put_nowait(one.data))
    await publish_metric(stack.broker, scope, Metric(step=7, values={"reward": 0.5}, time=1.0))
    await publish_event(stack.broker, scope, Event(kind="told", source="test", time=1.0))
    texts = ""
    async with asyncio.timeout(PATIENCE_S):
        while "reward" not in texts or "told" not in texts:
            payload = await heard.get()
            shown = await asyncio.to_thread(tinkermq, "decode", stdin=payload)
            assert shown.code == 0, shown.err
            texts += shown.out
    await listening.stop()


async def test_a_pool_with_users_shows_the_same_to_its_operator(tmp_path: Path) -> None:
    async with secured(tmp_path) as pool:
        operator = await pool.service("scheduler")
        await create_shared(operator)
        await pool.job("ada", "01job")
        infos = await discovered(operator, "INFO", {"tinkermq-auth", "tinkermq-users"})
        check_services("info", infos)
        endpoints = {one["name"] for one in infos["tinkermq-users"]["endpoints"]}
        assert {"add", "revoke", "audit"} <= endpoints
        listed = await js(operator, "STREAM.LIST", offset=0)
        for stream in listed["streams"]:
            assert len(stream["config"].get("description", "")) > 10, stream["config"]["name"]
        assert "tmq-audit" in {one["config"]["name"] for one in listed["streams"]}
