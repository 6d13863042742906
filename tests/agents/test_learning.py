"""A program of openai-agents learns to call its tool, as well as the game of the same task does."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tinkermq.clients import AgentEnvironment, AgentEpisode
from tinkermq.clients.base import JobAddress
from tinkermq.envs.registry import companion, load_game

from benchmarks.calling_model import LIMITS, calling_model
from tests.agents.published import AGENTS, PROGRAMS
from tests.support.configs import example
from tests.support.stack import Stack
from tests.support.stack_fixtures import WARM_MODELS, warm_model

LACKING = not (AGENTS / "openai-agents.stamp").exists()
pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(
        LACKING, reason="openai-agents is not installed: make agents AGENTS=openai-agents"
    ),
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]


class Asked:
    """The program, which answers many questions at a time: it takes seconds to start."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def read(self) -> None:
        """Take its answers."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            self._waiting.pop(told["id"]).set_result(told["answer"])
        for waiting in self._waiting.values():
            waiting.set_exception(RuntimeError("the program has ended"))

    async def answer(self, question: str, episode: AgentEpisode) -> str:
        """Let it answer a question in an episode."""
        assert self._process.stdin is not None
        waiting = self._waiting[episode.id] = asyncio.get_running_loop().create_future()
        asked = {
            "id": episode.id,
            "question": question,
            "base_url": episode.openai_base_url,
            "api_key": episode.api_key,
        }
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        return await waiting


@asynccontextmanager
async def asking() -> AsyncIterator[Asked]:
    """Run the program with its own interpreter, as `make agents` has installed it."""
    process = await asyncio.create_subprocess_exec(
        AGENTS / "openai-agents" / "bin" / "python",
        PROGRAMS / "calculator_with_openai_agents.py",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={
            "PATH": os.environ["PATH"],
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "NO_PROXY": "127.0.0.1",
        },
    )
    asked = Asked(process)
    reading = asyncio.create_task(asked.read())
    try:
        yield asked
    finally:
        process.kill()
        await process.wait()
        await reading


def validations(results: dict[int, dict[str, float]]) -> tuple[float, float]:
    """Return the mean scores before and after."""
    return results[0]["val/mean_score"], results[max(results)]["val/mean_score"]


async def test_a_program_of_openai_agents_learns_to_call_its_tool(
    stack: Stack, tmp_path: Path
) -> None:
    train, val = companion(load_game("calculator"), "make_data")(tmp_path)
    config = example("calculator", f"model.path={warm_model('calculator')}")
    config["env"] |= {"train_data": [str(train)], "val_data": [str(val)]}
    game = await stack.submit(config)
    await game.until("COMPLETED", deadline_s=600)
    program: dict[str, Any] = {
        **config,
        "model": {"path": str(calling_model(WARM_MODELS))},
        "agent": {"client": True, "timeout_s": 120, "per_host": 512},
        "rollout": {"group_size": config["rollout"]["group_size"], **LIMITS},
        "env": {key: config["env"][key] for key in ("train_data", "val_data", "num_val")},
    }
    program["env"]["hosts"] = 0
    job = await stack.submit(program)
    await job.until("RUNNING")
    loop = asyncio.get_running_loop()
    async with asking() as asked:

        async def calculator(task: dict[str, Any], model: AgentEpisode) -> float:
            question = str(model.prompt[-1]["content"])
            answering = asyncio.run_coroutine_threadsafe(asked.answer(question, model), loop)
            left, right = question.split("*")
            said = await asyncio.wrap_future(answering)
            return float(said.strip() == str(int(left) * int(right)))

        with AgentEnvironment(calculator, program) as environment:
            url = JobAddress(stack.server.url, job.scope).server_url
            await asyncio.to_thread(environment.setup, url)
            await job.until("COMPLETED", deadline_s=1200)
    (before, after), (as_game_before, as_game) = (
        validations(await job.validations()),
        validations(await game.validations()),
    )
    print(f"program {before:.3f} -> {after:.3f}, game {as_game_before:.3f} -> {as_game:.3f}")
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows = [row for group in groups[-20:] for row in group.trajectories]
    assert before < 0.6
    assert after > 0.75
    assert abs(after - as_game) < 0.12  # as far as seeds of the game are apart
    assert all(len(group.episodes) == len(group.trajectories) for group in groups), "one row each"
    assert max(len(row.turn_ends) for row in rows) == 2, "the tool was called"
