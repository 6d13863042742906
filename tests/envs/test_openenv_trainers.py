"""OpenEnv's own package plays our games, validates them, and runs agents for us."""

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinkermq.clients.cli.new_package import write_environment
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import EnvConfig

from tests.clients.command import tinkermq
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.openenv

CHECKOUT = Path(__file__).parents[2]
OPENENV = str(Path(sys.executable).with_name("openenv"))
AGENT = """
import json, os, sys, urllib.request

def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]

for line in sys.stdin:
    print(json.dumps(ask(line.strip())), flush=True)
"""
HARNESS = """
import json, os, sys
from openenv.core.harness import (
    AgenticHarnessAdapter, HarnessConfig, HarnessEnvironment, HarnessEvent, HarnessEventType,
    HarnessProcess,
)
from openenv.core.rubrics import Rubric

class Adapter(AgenticHarnessAdapter):
    async def start(self, working_directory):
        self.process = HarnessProcess(self.config.command, working_directory)
        await self.process.start()
    async def stop(self):
        if getattr(self, "process", None):
            await self.process.stop()
    async def inject_tools(self, tools, bridge_url=None):
        assert not tools
    async def send_message_streaming(self, message):
        await self.process.write_line(message)
        said = json.loads(await self.process.read_line(timeout_s=60))
        yield HarnessEvent(type=HarnessEventType.TURN_COMPLETE, data={"response": said})
    async def is_alive(self):
        return self.process.is_running()

class Length(Rubric):
    def forward(self, action, observation):
        return float(bool(observation.metadata["response"]))

def make():
    command = [sys.executable, os.path.abspath("my_agent.py")]
    config = HarnessConfig(name="mine", command=command, working_directory=os.getcwd())
    return HarnessEnvironment(Adapter(config), rubric=Length())
"""


@contextlib.asynccontextmanager
async def serving(game: str, **bounds: Any) -> AsyncIterator[str]:
    module: Any = importlib.import_module("tinkermq.envs.openenv_server")
    server = module.OpenEnvServer(EnvConfig(game=game), bounds=module.ServerBounds(**bounds))
    async with server.listening() as port:
        yield f"http://127.0.0.1:{port}"


def client_of(url: str, module: str = "generic_client", name: str = "GenericEnvClient") -> Any:
    """Return a client of OpenEnv's package, which only the environment of these tests has."""
    return getattr(importlib.import_module(f"openenv.core.{module}"), name)(base_url=url)


async def run(*words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(
        lambda: subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=cwd
        )
    )


@pytest.mark.parametrize("game", ["guess", "tool_games:Adding"])
async def test_a_served_game_is_a_valid_environment(game: str) -> None:
    async with serving(game) as url:
        done = await run(OPENENV, "validate", "--url", url, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["passed"], report["mode"]) == (True, "simulation")
    assert report["standard_profile"] == "openenv-http/1.x"


async def test_the_generic_client_plays_whole_episodes() -> None:
    async with serving("guess") as url, client_of(url) as client:
        for seed in range(3):
            result = await client.reset(seed=seed)
            tries = 0
            while not result.done:
                result = await client.step({"text": str(tries)})
                tries += 1
            state: Any = await client.state()
            assert (state["seed"], state["step_count"]) == (seed, tries)
            assert state["episode_return"] == result.reward


async def test_the_tool_client_plays_whole_episodes() -> None:
    async with (
        serving("tool_games:Adding") as url,
        client_of(url, "mcp_client", "MCPToolClient") as client,
    ):
        for _ in range(2):
            await client.reset(seed=1)
            names = [tool.name for tool in await client.list_tools()]
            assert names == ["add", "repeat", "stop"]
            assert await client.call_tool("add", value=2) == "sum 2"
            assert await client.call_tool("add", value=3) == "sum 5"
            assert (await client.call_tool("add", value="x")).startswith("Error: add")
            with pytest.raises(RuntimeError, match="Tool not found: sub"):
                await client.call_tool("sub")
            result: Any = await client.step(Text(text="5"))
            assert (result.reward, result.done) == (1.0, True)


class Text:
    """An action of a text, as a typed client has one."""

    def __init__(self, text: str) -> None:
        self.text = text

    def model_dump(self) -> dict[str, Any]:
        return {"text": self.text, "metadata": {}}


async def test_a_full_server_is_said_to_be_full() -> None:
    async with (
        serving("guess", max_sessions=1) as url,
        client_of(url) as first,
    ):
        await first.reset(seed=1)
        async with client_of(url) as second:
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                await second.reset(seed=1)


# -- what `env new --kind openenv` writes ----------------------------------------------------------


@contextlib.contextmanager
def running(words: Sequence[str], cwd: Path, **variables: str) -> Iterator[None]:
    process = subprocess.Popen(words, cwd=cwd, env={**os.environ, **variables})
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def test_a_new_environment_is_valid_and_plays_here(tmp_path: Path, unused_port: int) -> None:
    folder = write_environment("my-env", tmp_path, "openenv")
    static = await run(OPENENV, "validate", str(folder), "--level", "static", "--skip-build")
    assert static.returncode == 0, static.stdout + static.stderr
    url = f"http://127.0.0.1:{unused_port}"
    with running([sys.executable, "-m", "server.app"], folder, PORT=str(unused_port)):
        await until(lambda: answers(url), "the server")
        valid = await run(OPENENV, "validate", "--url", url)
        assert valid.returncode == 0, valid.stdout + valid.stderr
        checked = await asyncio.to_thread(
            lambda: tinkermq("env", "check", "train.yaml", f"env.kwargs.url={url}", cwd=folder)
        )
    assert checked.code == 0, checked.out + checked.err
    assert "Answer with a number." in checked.out


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


# -- harness environments --------------------------------------------------------------------------


async def test_the_agent_of_a_harness_environment_asks_the_model_of_the_episode(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "my_agent.py").write_text(AGENT)
    (program / "my_env.py").write_text(HARNESS)
    turns = [{"role": "user", "content": text} for text in ("hello", "and again")]
    write_rows(tmp_path / "tasks.jsonl", [{"prompt": turns}])
    command = ["{python}", "-m", "tinkermq.envs.adapters.openenv_program", "my_env:make"]
    config = {
        "model": {"path": "none"},
        "env": {"train_data": [str(tmp_path / "tasks.jsonl")]},
        # the package is installed here as a link to this checkout, which the sandbox has to show
        "agent": {"command": command, "files": str(program), "read": [str(CHECKOUT)]},
    }
    (tmp_path / "agent.yaml").write_text(json.dumps(config))
    done = await asyncio.to_thread(
        lambda: tinkermq("agent", "check", "agent.yaml", "--json", cwd=tmp_path)
    )
    report = json.loads(done.out)
    assert report["endpoints"] == {"POST /v1/chat/completions": 2}
    assert report["outcome"] == "done", done.out
    assert report["reward"] == 2.0
