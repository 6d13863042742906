"""Agent programs while generators, their own host and others die: no call is lost, none twice."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.clients.base import JobAddress

from tests.support.killed_generator import job_of_long_calls, open_streams_go_on
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.faults, pytest.mark.asyncio(loop_scope="session")]


async def test_an_open_stream_goes_on_when_its_generator_is_killed(
    stack: Stack, model: Path
) -> None:
    await open_streams_go_on(stack, job_of_long_calls(model))


_HOST = """
import pathlib, sys, time
from tinkermq.clients import AgentEnvironment

url, mark = sys.argv[1], pathlib.Path(sys.argv[2])

async def program(task, model):
    messages = [{"role": "user", "content": f"seed {model.seed}"}]
    for turn in range(3):
        async with model.async_openai() as client:
            answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        if turn == 1 and not mark.exists():
            mark.write_text("two calls were answered")
            time.sleep(600)  # and everything in this process stands still
    return float(len(text) % 2)

with AgentEnvironment(program, {"agent": {"timeout_s": 120}}) as env:
    env.setup(url)
    time.sleep(600)
"""


async def test_a_program_whose_host_is_killed_is_answered_as_it_was(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    job = await stack.submit(job_of_long_calls(model))
    await job.until("RUNNING")
    mark = tmp_path / "mark"
    url = JobAddress(stack.server.url, job.scope).server_url

    def host() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", _HOST, url, str(mark)])

    with host() as first:
        try:
            await eventually(lambda: asyncio.to_thread(mark.exists), "two calls to be answered")
        finally:
            first.kill()
    with host() as second:
        try:
            await job.until("COMPLETED")
        finally:
            second.kill()
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows = [row for group in groups for row in group.trajectories]
    assert all(row.num_tries == 1 and row.info["agent"]["calls"] == 3 for row in rows)
    assert sum(row.info["agent"]["replayed_tokens"] for row in rows) > 0
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
