"""The broker of `up` whose disk was full stores again, by itself, once there is room."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.clients.home import Home, StackState

from tests.clients.conftest import Cli
from tests.support.disks import fill, small_disk
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full


async def _stores(broker: Broker, subject: str) -> bool:
    try:
        await broker.request(subject, bytes(2**16), timeout_s=1)
    except TimeoutError:
        return False
    return True


async def _fill_stream(url: str, disk: Path) -> Path:
    async with await connect(url, name="test") as broker:
        config = {"name": "big", "subjects": ["big.>"], "storage": "file", "max_bytes": 2**30}
        await broker.api("STREAM.CREATE.big", config)
        assert await _stores(broker, "big.first")
        ballast = fill(disk)
        while await _stores(broker, "big.more"):
            pass
        return ballast


async def _goes_on(url: str) -> bool:
    async with await connect(url, name="test") as broker:
        return await _stores(broker, "big.last")


def test_a_broker_whose_disk_was_full_is_started_again_once_there_is_room(
    tmp_path: Path, cli: Cli
) -> None:
    with small_disk(tmp_path / "home", 64) as disk:
        try:
            up = cli("up", "--port", "0", "--slots", "1", "--json")
            assert up.code == 0, up.err
            state = StackState.model_validate_json(up.out)
            pids = dict(state.children)
            ballast = asyncio.run(_fill_stream(state.url, disk))
            findings = _until_told(cli)
            assert "the disk of nats-server is full" in findings["detail"]
            assert "make room and restart it" in findings["hint"]
            ballast.unlink()
            deadline = time.monotonic() + PATIENCE_S
            while (state := Home(disk).read_running_stack()) is None or state.restarts[
                "broker"
            ] != 1:
                assert time.monotonic() < deadline, "the broker was not started again"
                time.sleep(0.1)
            assert asyncio.run(_goes_on(state.url))
            changed = {name for name, pid in pids.items() if state.children[name] != pid}
            assert changed == {"broker"}
        finally:
            cli("down")


def _until_told(cli: Cli) -> dict[str, str]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for one in json.loads(cli("doctor", "--json").out)["checks"]:
            if one["name"] == "going on" and not one["ok"]:
                return one
    raise AssertionError("doctor does not tell that the broker is in trouble")
