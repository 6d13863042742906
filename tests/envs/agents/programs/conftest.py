"""A host's programs, run for real in real sandboxes, and a look at what is left of them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs import StepResult
from tinkermq.envs.agents.programs.runner import ProgramRunner
from tinkermq.envs.running.episodes import Opening
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.config.agent import AgentConfig

from tests.support.harbor_tasks import forget_tasks
from tests.support.model_endpoint import ModelEndpoint
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


def held(others: set[int]) -> tuple[set[int], int]:
    """Return the processes below this one that are not below `others`, and how many files it has.

    Others are those of other tests, which stay between them and start processes when they like: a
    browser, a stack.
    """
    theirs = {pid for other in others for pid in descendants(other)}
    return {*descendants(os.getpid())} - theirs, len(list(Path("/proc/self/fd").iterdir()))


def no_more_than(before: tuple[set[int], int]) -> bool:
    """Whether no process and no open file has come."""
    (pids, files), (then, most) = held(before[0] - {os.getpid()}), before
    return pids <= then and files <= most


def left_over(before: tuple[set[int], int]) -> list[str]:
    """Describe new processes, and all files if there are more of them."""
    (pids, files), (then, most) = held(before[0] - {os.getpid()}), before
    found = [Path(f"/proc/{pid}/stat").read_text()[:200] for pid in pids - then]
    if files > most:
        found += [str(file.readlink()) for file in Path("/proc/self/fd").iterdir()]
    return found


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
    before = held(set())
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
        await until(lambda: no_more_than(before), "rest")
    except TimeoutError:
        raise AssertionError(f"left over: {left_over(before)}") from None


@pytest.fixture
def play() -> Callable[..., Any]:
    """Host a program for one episode and return what its end told."""

    async def play_one(code: str, episode: str = "e-1", **config: Any) -> StepResult:
        opening = config.pop("opening", {})
        async with hosting(code, **config) as host:
            return await host.play(episode, **opening)

    return play_one
