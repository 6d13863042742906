"""Programs that are cancelled at any await leave no process, file or place."""

import asyncio
import itertools
from pathlib import Path

import pytest
from tinkermq.envs.agents.programs.agent_run import AgentRun
from tinkermq.envs.running.episodes import Opening

from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import PATIENCE_S, until

from .conftest import hosting

pytestmark = pytest.mark.full
ASKS = "ask(); post('/episode/reward', reward=1.0)"


async def test_a_program_cancelled_at_any_await_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("its own")
    numbers = itertools.count()
    async with hosting(ASKS, files=str(tmp_path), setup=["true"]) as host:
        runner, launcher, tasks = host.runner, host.runner._launcher, host.runner._environments
        assert launcher is not None
        assert tasks is not None
        folders = launcher.folders.path
        before = set(folders.iterdir())

        async def play() -> None:
            opening = Opening(f"e{next(numbers)}", 0)
            run = AgentRun(runner._config, launcher, host.endpoint, opening, tasks, max_tries=1)
            assert (await run.play(lambda: None)).reward == 1.0

        async def given_back() -> None:
            await until(
                lambda: set(folders.iterdir()) == before and not host.endpoint.episodes,
                "its folder and its key to be given back",
            )

        assert await cancel_everywhere(play, given_back) > 8


async def test_an_episode_dropped_while_its_program_starts_frees_its_place() -> None:
    async with hosting(ASKS, per_host=1) as host:
        for pause_s in (0.0, 0.05, 0.2):
            begun = asyncio.ensure_future(host.runner.reset(Opening(f"dropped-{pause_s}", 0)))
            await asyncio.wait({begun}, timeout=pause_s)
            begun.cancel()
            await asyncio.wait({begun})
        assert (await asyncio.wait_for(host.play("last"), PATIENCE_S)).reward == 1.0
