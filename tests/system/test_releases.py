"""Processes of another release in a pool: what differs is named, and who is to be updated."""

import asyncio
import json
from pathlib import Path

import pytest
from tinkermq.broker.presence import presences
from tinkermq.schemas.version import VERSION

from tests.clients.command import tinkermq
from tests.support.releases import other_release
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def test_nodes_and_clients_of_another_release_are_told_so(
    stack: Stack, tmp_path: Path
) -> None:
    beside = other_release(tmp_path / "beside", "0.99.0")
    newer = other_release(tmp_path / "newer", "99.0.0", schema_version=2)
    nodes = {"beside": beside, "newer": newer}
    for name, variables in nodes.items():
        stack.start("node", name, variables)
    try:

        async def both_beat() -> bool:
            entries, damaged = await presences(stack.broker).read_all("pool")
            return {f"pool.{name}" for name in nodes} <= {one.key for one in (*entries, *damaged)}

        await eventually(both_beat, "heartbeats of both nodes")
        url = ("--nats-url", stack.server.url)
        doctor = await asyncio.to_thread(tinkermq, "doctor", "--json", *url)
        found = {check["name"]: check for check in json.loads(doctor.out)["checks"]}
        assert found["releases"]["detail"] == "beside runs 0.99.0"
        assert f"this client is tinkermq {VERSION}" in found["releases"]["hint"]
        words = f"schema version 2, of a newer tinkermq; {VERSION} reads 1"
        assert f"pool.newer of tmq-actors: Presence has {words}" in found["records"]["detail"]
        client = await asyncio.to_thread(tinkermq, "pool", *url, env=newer)
    finally:
        for name in nodes:
            stack.terminate(name)
    assert client.code == 1
    assert words.replace(VERSION, "99.0.0") not in client.err
    assert f"schema version 2, of a newer tinkermq; {VERSION} reads 1" in client.err
