"""Environment steps per second: the broker against FastAPI + uvicorn with pooled aiohttp.

The same trivial game is stepped by 32 episodes at once, each waiting for its answer before its
next action, once through an environment host and NATS, once through an HTTP server built as the
field's game servers are: one process, handlers that call the game directly, one client session
with as many pooled connections as episodes. Server and client are processes of their own on both
sides, both on uvloop (uvicorn with httptools), in turns of the same run.

    python -m benchmarks.environment [--episodes 32] [--seconds 4] [--rounds 3]
"""

# FastAPI and aiohttp are of the `bench` extra, which development does without.
# pyright: reportMissingImports=false

import argparse
import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import uvloop
from tinkermq.broker.client.connection import connect
from tinkermq.broker.programs.server import NatsServer
from tinkermq.envs.serving.host import EnvironmentHost
from tinkermq.envs.serving.remote import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.report import Report, parser
from benchmarks.trivial_game import TURNS, TrivialGame

SCOPE = JobScope("local", "bench")
ACTION = "move 3"
Isolation = Literal["thread", "process"]
Play = Callable[[str], Awaitable[int]]


async def serve_nats(url: str, isolation: Isolation) -> None:
    """Host the game over NATS until killed."""
    async with await connect(url, name="host") as broker:
        config = EnvConfig(game="benchmark", isolation=isolation)
        host = EnvironmentHost(broker, SCOPE, config, game_class=TrivialGame)
        await host.run(asyncio.Event())


def serve_http(port: int) -> None:
    """Host the game over HTTP until killed."""
    import uvicorn
    from fastapi import FastAPI, HTTPException
    from pydantic import BaseModel

    class Reset(BaseModel):
        instance_id: str
        job_id: str = "default"

    class Step(Reset):
        action: str

    app = FastAPI()
    games: dict[str, TrivialGame] = {}

    @app.post("/reset")
    async def reset(request: Reset) -> dict[str, Any]:
        game = games[request.instance_id] = TrivialGame()
        return {"observation": game.reset(), "system_prompt": game.get_system_prompt()}

    @app.post("/step")
    async def step(request: Step) -> dict[str, Any]:
        game = games.get(request.instance_id)
        if game is None:
            raise HTTPException(404)
        result = game.step(request.action)
        if result.done:
            del games[request.instance_id]
        return vars(result)

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


async def measure_nats(url: str, num_episodes: int, seconds: float) -> float:
    """Return steps per second through NATS."""
    async with await connect(url, name="client") as broker:
        config = EnvConfig(game="benchmark")
        hosts = Environments(broker, SCOPE, config, lambda _: contextlib.nullcontext())
        start = Start("train", None, 1)

        async def play(episode: str) -> int:
            host = (await hosts.reset(episode, start)).host
            for turn in range(TURNS):
                await hosts.step(host, episode, turn, ACTION)
            return TURNS

        await hosts.describe()
        return await _steps_per_second(play, num_episodes, seconds)


async def measure_http(port: int, num_episodes: int, seconds: float) -> float:
    """Return steps per second through HTTP."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=num_episodes)
    base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with session.post(base + path, json=body) as response:
                return await response.json()

        async def play(episode: str) -> int:
            await ask("/reset", {"instance_id": episode})
            for _ in range(TURNS):
                await ask("/step", {"instance_id": episode, "action": ACTION})
            return TURNS

        return await _steps_per_second(play, num_episodes, seconds)


async def _steps_per_second(play: Play, num_episodes: int, seconds: float) -> float:
    end = time.perf_counter() + seconds

    async def one_after_another(number: int) -> int:
        steps = episode = 0
        while time.perf_counter() < end:
            steps += await play(f"e{number}-{episode}-{time.monotonic_ns()}")
            episode += 1
        return steps

    started = time.perf_counter()
    steps = sum(await asyncio.gather(*(one_after_another(n) for n in range(num_episodes))))
    return steps / (time.perf_counter() - started)


def compare(num_episodes: int, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Measure all in turns; return steps per second."""
    rates: dict[str, list[float]] = {"http": [], "thread": [], "process": []}
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        port = _free_port()
        for _ in range(rounds):
            with _Serving("--serve-http", str(port)):
                _wait_for(port)
                rates["http"].append(uvloop.run(measure_http(port, num_episodes, seconds)))
            for isolation in ("thread", "process"):
                with _Serving("--serve-nats", server.url, "--isolation", isolation):
                    rate = uvloop.run(measure_nats(server.url, num_episodes, seconds))
                    rates[isolation].append(rate)
    return rates


def tell(rates: dict[str, list[float]], num_episodes: int, report: Report) -> None:
    """Print the table and the ratios."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    names = {"http": "FastAPI + uvicorn, aiohttp", "thread": "NATS", "process": "NATS, processes"}
    rows = [
        [
            names[name],
            f"{medians[name]:,.0f}",
            " ".join(f"{value:,.0f}" for value in values),
            f"{medians[name] / medians['http']:.2f}",
        ]
        for name, values in rates.items()
    ]
    columns = ["way", "steps/s", "runs", "ratio"]
    report.table(f"Environment steps, {num_episodes} episodes at once", columns, rows)
    report.at_least("games in threads, against HTTP", medians["thread"] / medians["http"], 4.0)
    report.at_least("games in processes, against HTTP", medians["process"] / medians["http"], None)


class _Serving:
    """A server process of this script, ended with the block."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.environment", *arguments]
        )

    def __enter__(self) -> "_Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    """Parse the arguments; serve, or compare and print."""
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=32)
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--serve-nats", help=argparse.SUPPRESS)
    options.add_argument("--serve-http", type=int, help=argparse.SUPPRESS)
    options.add_argument("--isolation", default="thread", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve_nats:
        uvloop.run(serve_nats(arguments.serve_nats, arguments.isolation))
    elif arguments.serve_http:
        serve_http(arguments.serve_http)
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Compare, print and write."""
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.5, 1
    report = Report("environment", "Environment steps against HTTP", quick=arguments.quick)
    rates = compare(arguments.episodes, arguments.seconds, arguments.rounds)
    tell(rates, arguments.episodes, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
