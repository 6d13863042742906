"""A host's programs, run for real in real sandboxes, and a look at what is left of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs import StepResult
from tinkermq.envs.agents.programs.runner import ProgramRunner
from tinkermq.envs.running.episodes import Opening
from tinkermq.schemas.config.agent import AgentConfig

from tests.support.harbor_tasks import forget_tasks
from tests.support.model_endpoint import ModelEndpoint
from tests.support.processes import Below
from tests.support.waiting import PATIENCE_S, until

PRELUDE = """
import http.client, json, os, signal, subprocess, sys, time
from urllib.parse import urlsplit

def post(path, **body):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc, timeout=600)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + path, json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())

def ask(text="2 + 2?"):
    messages = [{"role": "user", "content": text}]
    status, answer = post("/chat/completions", model="policy", messages=messages)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]
"""
LIMITS: dict[str, Any] = {
    "memory_mb": 128,
    "disk_mb": 16,
    "processes": 16,
    "grace_s": 0.2,
    "timeout_s": PATIENCE_S,
    "idle_s": PATIENCE_S,
    "per_host": 4,
}


class Host:
    """A runner, and episodes of it."""

    def __init__(self, runner: ProgramRunner, endpoint: ModelEndpoint) -> None:
        self.runner, self.endpoint = runner, endpoint

    async def begin(self, episode: str = "e-1", **opening: Any) -> list[dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.runner.reset(Opening(episode, opening.pop("seed", 0), **opening))

    async def end(self, episode: str = "e-1") -> StepResult:
        async with asyncio.timeout(PATIENCE_S):
            return await self.runner.step(episode, "")

    async def play(self, episode: str = "e-1", **opening: Any) -> StepResult:
        await self.begin(episode, **opening)
        try:
            return await self.end(episode)
        finally:
            self.runner.drop(episode)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def left_over(below: Below) -> list[str]:
    """Describe the processes that a test left, and all open files."""
    found = [Path(f"/proc/{pid}/stat").read_text()[:200] for pid in below.pids()]
    return found + [str(file.readlink()) for file in Path("/proc/self/fd").iterdir()]


@contextlib.asynccontextmanager
async def hosting(
    code: str = "",
    *,
    max_tries: int = 1,
    private: tuple[Path, ...] = (),
    has_tasks: bool = False,
    may_read: Callable[[Path], None] = lambda _: None,
    **config: Any,
) -> AsyncIterator[Host]:
    """Host a Python program; afterwards no process and no folder of it may be left."""
    below, files = Below(), num_open_files()
    settings = {"command": ["{python}", "-S", "-c", PRELUDE + code], **LIMITS, **config}
    endpoint = ModelEndpoint()
    runner = ProgramRunner(
        AgentConfig(**settings),
        endpoint,
        max_tries=max_tries,
        private=private,
        has_tasks=has_tasks,
        may_read=may_read,
    )
    try:
        await runner.start()
        yield Host(runner, endpoint)
    finally:
        folders = runner._launcher and runner._launcher.folders.path
        await runner.stop()
        forget_tasks()
        assert not (folders and folders.exists())
    try:
        await until(lambda: not below.pids() and num_open_files() <= files, "rest")
    except TimeoutError:
        raise AssertionError(f"left over: {left_over(below)}") from None


@pytest.fixture
def play() -> Callable[..., Any]:
    """Host a program for one episode and return what its end told."""

    async def play_one(code: str, episode: str = "e-1", **config: Any) -> StepResult:
        opening = config.pop("opening", {})
        async with hosting(code, **config) as host:
            return await host.play(episode, **opening)

    return play_one
