"""A machine whose clock is hours off trains as any other, and is told."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.clients.pool import Pool

from tests.support.configs import REPOSITORY
from tests.support.on_cluster import OnCluster, job_is
from tests.support.waiting import PATIENCE_S, eventually

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not LIBRARY.exists(), reason="no libfaketime: apt-get install faketime"),
]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node."""
    pool = OnCluster(tmp_path, {"kind": "none"}, {})
    yield pool
    await pool.down()


def start_node(url: str, offset: str, log: Path) -> "subprocess.Popen[bytes]":
    """Start a node all of whose processes see a clock that is off; time passes as it does."""
    fake = {"LD_PRELOAD": str(LIBRARY), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tinkermq.actors.node", "--nats", url, "--name", "odd"],
            stdout=file,
            stderr=file,
            cwd=REPOSITORY,
            env={**os.environ, **fake, "OMP_NUM_THREADS": "1"},
        )


@pytest.mark.parametrize(("offset", "told"), [("+3h", "ahead of"), ("-3h", "behind")])
async def test_a_job_on_a_machine_whose_clock_is_hours_off_ends_as_it_should(
    pool: OnCluster, tmp_path: Path, model: Path, offset: str, told: str
) -> None:
    up = await pool.command("up", "--on", "none", "--port", "0", "--no-gateway", "--json")
    assert up.code == 0, up.err
    url = pool.url()
    node = start_node(url, offset, tmp_path / "node.log")
    try:
        async with await connect(url, name="test") as broker:
            jobs = Pool(broker)
            job = await pool.submit(jobs, model)
            done = await job_is(jobs, job.job, "COMPLETED", "FAILED")
            assert done.state == "COMPLETED", done.reason
            assert done.losses == 0

            async def shown() -> bool:
                return told in (await pool.command("pool")).err

            await eventually(shown, "the clock")
            found = await pool.command("doctor")
            off = rf"the clock of odd is (10800\.0|10799\.\d) s {told}\s+the\s+scheduler's"
            assert re.search(off, found.out)
    finally:
        node.send_signal(signal.SIGTERM)
        await asyncio.to_thread(node.wait, PATIENCE_S)
