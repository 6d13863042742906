"""A broker that is away for long: whoever is there waits for it, and nobody counts that as a crash.

At default limits, with real processes: the job's own and those of the pool, a game that a client
hosts, and somebody who watches. Some are killed meanwhile, so that they start while it is away.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import connect
from tinkermq.envs.host import EnvironmentHost
from tinkermq.schemas.config.load_config import parse_config

from tests.support.configs import REPOSITORY, small_job
from tests.support.gate import Gate
from tests.support.processes import alive
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.faults, pytest.mark.full]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("away_s", [45, pytest.param(450, marks=pytest.mark.long)])
async def test_a_job_goes_on_after_its_broker_was_away(
    away_s: float, tmp_path: Path, model: Path, gate: Gate
) -> None:
    config = small_job(
        model,
        env={**gate.env(4), "num_val": 4, "hosts": 1},
        training={"num_steps": 30, "test_freq": 10, "validate_before_training": True},
        generator={"count": 2},
    )
    async with Stack(tmp_path) as stack:
        job = await stack.submit(config)
        await job.until_step(3)
        killed = [await job.pid(name) for name in ("generator-0", "environment-0")]
        kept = [await job.pid(name) for name in ("learner", "generator-1")]
        watching = _watch(stack, job.record.name)
        stopping = asyncio.Event()
        async with await connect(stack.server.url, name="client") as client:
            host = EnvironmentHost(client, job.scope, parse_config(job.record.config).env)
            hosting = asyncio.create_task(host.run(stopping))
            await host.ready.wait()
            assert watching.stdout is not None
            heard = await asyncio.to_thread(watching.stdout.readline)
            stack.server.kill()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(away_s)
            assert [pid for pid in [*kept, *stack.pids] if not alive(pid)] == []
            assert not hosting.done()
            stack.server.start()
            gate.open()
            ended = await job.until("COMPLETED")
            stopping.set()
            await hosting
        assert (ended.attempt, ended.losses) == (1, 0)
        assert {one.name: one.restarts for one in ended.actors if one.restarts} == {
            "generator-0": 1,
            "environment-0": 1,
        }
        rest, _ = await asyncio.to_thread(watching.communicate, timeout=PATIENCE_S)
        told = heard + rest
        assert watching.returncode == 0, told
        assert "broker_away: waiting for the broker" in told
        assert "COMPLETED" in told
        await assert_every_task_once(job)
        await assert_replay_is_identical(job)


def _watch(stack: Stack, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [f"{sys.prefix}/bin/tinkermq", "watch", name, "--nats-url", stack.server.url],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
