"""A dry run asks the pool: what a submission would be told, for each thing who says it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.schemas.job import JobList, ListRequest

from tests.clients.command import Outcome, tinkermq
from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def dry_run(
    stack: Stack, folder: Path, config: dict[str, Any], *words: str, url: str = ""
) -> Outcome:
    """Try a job from `folder`, where nothing of this checkout can be imported."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(folder / "runs"), **config}))
    line = ("train", str(file), "--dry-run", "--nats-url", url or stack.server.url, *words)
    return await asyncio.to_thread(tinkermq, *line, cwd=folder)


def rows(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    return file


async def test_each_thing_is_told_with_who_said_it_and_nothing_is_submitted(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    before = await _jobs(stack)
    env = {"game": "addition", "train_data": [str(rows(tmp_path))], "num_val": 0}
    told = await dry_run(stack, tmp_path, small_job(model, env=env), "--json")
    assert told.code == 0, told.out + told.err
    checks = json.loads(told.out)["checks"]
    assert all(check["ok"] for check in checks)
    said = {(check["check"], check["by"]) for check in checks}
    here, node = "this machine", "node node"
    assert said == {
        ("model", here),
        ("game", here),
        ("model", node),
        ("data", node),
        ("game", node),
        ("slots", "scheduler"),
    }
    assert not (tmp_path / "runs").exists()
    assert await _jobs(stack) <= before


async def _jobs(stack: Stack) -> set[str]:
    """Return the ids of all jobs; what they are changes while other tests' jobs end."""
    listed = await stack.ask("list", ListRequest(all=True), JobList)
    return {one.job for one in listed.records}


async def test_what_nodes_and_scheduler_lack_is_all_told_and_the_first_is_the_error(
    stack: Stack, tmp_path: Path
) -> None:
    config = small_job(
        Path("/no/such/model"),
        env={"game": "none.such:Game", "train_data": ["/no/rows.jsonl"], "num_val": 0},
        generator={"count": 1000},
    )
    told = await dry_run(stack, tmp_path, config)
    assert told.code == 2
    assert told.out.count("fail") == 6, told.out
    assert "/no/such/model" in told.out
    assert "there is no file /no/rows.jsonl  (node node)" in told.out
    assert "there is no module 'none' for game 'none.such:Game'  (node node)" in told.out
    assert "the job needs 1001 slots" in told.out


async def test_a_name_that_is_taken_or_a_run_that_is_not_there_is_the_schedulers_to_tell(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    told = await dry_run(stack, tmp_path, small_job(model), "--from", "no-such-run@40")
    assert told.code == 2
    assert "fail job    user 'local' has no job or run 'no-such-run'  (scheduler)" in told.out


@asynccontextmanager
async def from_elsewhere(url: str) -> AsyncIterator[str]:
    """Yield an address under which a broker of this machine is one of another."""
    port = int(url.rpartition(":")[2])

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
        target.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to), pump(there, writer), return_exceptions=True)

    async with await asyncio.start_server(relay, "127.0.0.2", 0) as server:
        host, own_port = server.sockets[0].getsockname()
        yield f"nats://{host}:{own_port}"


@pytest.mark.long
async def test_a_pool_elsewhere_may_have_what_this_machine_lacks(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    config = small_job(model, env={"game": "tests.support.games:SlowBandit", "num_val": 0})
    here = await dry_run(stack, tmp_path, config)
    assert here.code == 2
    assert "fail game" in here.out
    async with from_elsewhere(stack.server.url) as url:
        told = await dry_run(stack, tmp_path, config, url=url)
    assert told.code == 0, told.out + told.err
    assert "lack game" in told.out
    assert "ok   game   tests.support.games:SlowBandit: its package is there" in told.out
