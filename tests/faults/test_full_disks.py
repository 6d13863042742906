"""A job whose disk is full waits, says so, and goes on when there is room; nothing is lost."""

import asyncio
import json
from pathlib import Path

import pytest
from tinkermq.schemas.local.disk import append_lines

from tests.clients.command import tinkermq_here
from tests.support.configs import small_job
from tests.support.disks import fill, small_disk
from tests.support.gate import Gate
from tests.support.jobs import Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.full]


async def until_printed(stack: Stack, text: str, *commands: str) -> None:
    """Wait until each command prints a text, whether all is well or not."""
    for command in commands:

        async def is_printed(command: str = command) -> bool:
            words = (command, "--nats-url", stack.server.url)
            done = await asyncio.to_thread(tinkermq_here, *words)
            return text in done.out + done.err

        await eventually(is_printed, f"{command} to say {text!r}")


async def assert_complete(job: Job, rewound: int = 0) -> None:
    """Check a run that has ended; its learner went back `rewound` times to what the broker had."""
    ended = await job.until("COMPLETED")
    assert (ended.attempt, ended.losses) == (1, 0)
    restarts = {"learner": rewound} if rewound else {}
    assert {one.name: one.restarts for one in ended.actors if one.restarts} == restarts
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def test_a_run_whose_folder_has_no_room_waits_and_goes_on(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    with small_disk(tmp_path / "runs", 64) as disk:
        async with Stack(tmp_path) as stack:
            job = await stack.submit(small_job(model, env=gate.env(4), training={"num_steps": 20}))
            await job.until_step(4)
            ballast = fill(disk)
            gate.let(12)
            await until_printed(stack, "room on the disk for", "ps", "doctor")
            ballast.unlink()
            gate.open()
            await assert_complete(job)
            kinds = [event.kind for event in await job.events()]
            assert {"disk_full", "checkpoint_failed"} & set(kinds)
            lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in lines] == list(range(1, 21))


async def test_a_line_of_metrics_that_a_death_has_cut_swallows_no_other(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    async with Stack(tmp_path) as stack:
        job = await stack.submit(small_job(model, env=gate.env(4)))
        await job.until_step(4)
        await job.kill("learner")
        file = job.run_dir / "metrics.jsonl"
        with file.open("a") as metrics:
            metrics.write('{"step": 5, "training/glo')
        gate.open()
        await job.until("COMPLETED")
        whole = [line for line in file.read_text().splitlines() if line.endswith("}")]
        steps = [json.loads(line)["step"] for line in whole]
        assert sorted(set(steps)) == list(range(1, 13))
        append_lines(file, [])


async def test_a_broker_without_room_is_waited_for_and_told(
    tmp_path: Path, model: Path, gate: Gate
) -> None:
    with small_disk(tmp_path / "nats", 48) as disk:
        async with Stack(tmp_path) as stack:
            job = await stack.submit(small_job(model, env=gate.env(4), training={"num_steps": 20}))
            await job.until_step(4)
            ballast = fill(disk)
            gate.let(12)
            await until_printed(stack, "the disk of nats-server is full", "doctor", "ps")
            gate.open()
            ballast.unlink()
            await stack.restart("nats-server")  # as the operator does, and `tinkermq up`
            await job.until("COMPLETED")
            # what the server confirmed before it found its disk full may be gone with the restart
            log = (job.run_dir / "logs/attempt_1/learner.log").read_text().splitlines()
            rewound = sum('"store_rewound"' in line and '"hint"' in line for line in log)
            await assert_complete(job, rewound)
