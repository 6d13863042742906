"""Environment steps per second: the broker against FastAPI + uvicorn with pooled aiohttp.

The same game is stepped by 32 episodes at once, each waiting for its answer before its next
action, once through an environment host and NATS, once through an HTTP server built as the field's
game servers are: one process, handlers that call the game directly, one client session with as many
pooled connections as episodes. Server and client are processes of their own on both sides, both on
uvloop (uvicorn with httptools), in turns of the same run. One game costs nothing, the other is
Gomoku against an opponent that looks one move ahead, 0.1 to 0.2 ms of Python for each step.

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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import uvloop
from tinkermq.broker.client.connection import connect
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.game import AbstractGame
from tinkermq.envs.games.gomoku import GomokuGame
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.envs.prompt import open_game
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.processes import cpu
from benchmarks.report import Report, parser
from benchmarks.trivial_game import TURNS, TrivialGame

SCOPE = JobScope("local", "bench")
WARM_S = 2.0
GAMES: dict[str, type[AbstractGame]] = {"nothing": TrivialGame, "gomoku": GomokuGame}
ACTIONS = {
    "nothing": ["move 3"] * TURNS,
    "gomoku": [f"<move>{7 * n % 81 // 9},{7 * n % 9}</move>" for n in range(81)],
}
"""What every episode plays, until its game is done."""
Isolation = Literal["thread", "process"]
Play = Callable[[str], Awaitable[int]]


class Rate(NamedTuple):
    """What one run has shown."""

    steps_per_s: float
    """By the clock."""
    cpu_us: float
    """CPU time of all processes for a step: server, its workers, nats-server and the caller."""


async def serve_nats(url: str, game: str, isolation: Isolation) -> None:
    """Host the game over NATS until killed."""
    async with await connect(url, name="host") as broker:
        config = EnvConfig(game="benchmark", isolation=isolation)
        host = EnvironmentHost(broker, SCOPE, config, game_class=GAMES[game])
        await host.run(asyncio.Event())


def serve_http(port: int, name: str) -> None:
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
    games: dict[str, AbstractGame] = {}

    @app.post("/reset")
    async def reset(request: Reset) -> dict[str, Any]:
        game = games[request.instance_id] = GAMES[name]()
        return {"messages": open_game(game, seed=1, record=None, kwargs={})}

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


async def measure_nats(url: str, game: str, num_episodes: int, seconds: float) -> float:
    """Return steps per second through NATS."""
    async with await connect(url, name="client") as broker:
        config = EnvConfig(game="benchmark")
        hosts = Environments(broker, SCOPE, config, lambda _: contextlib.nullcontext())
        start = Start("train", None, 1)

        async def play(episode: str) -> int:
            host = (await hosts.reset(episode, start)).host
            for turn, action in enumerate(ACTIONS[game]):
                if (await hosts.step(host, episode, turn, action)).done:
                    return turn + 1
            raise AssertionError("the game did not end")

        await hosts.describe()
        return await _steps_per_second(play, num_episodes, seconds)


async def measure_http(port: int, game: str, num_episodes: int, seconds: float) -> float:
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
            for turn, action in enumerate(ACTIONS[game]):
                if (await ask("/step", {"instance_id": episode, "action": action}))["done"]:
                    return turn + 1
            raise AssertionError("the game did not end")

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


def compare(game: str, num_episodes: int, seconds: float, rounds: int) -> dict[str, list[Rate]]:
    """Measure all in turns."""
    rates: dict[str, list[Rate]] = {"http": [], "thread": [], "process": []}
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        assert server.pid is not None
        port = _free_port()
        for _ in range(rounds):
            with _Serving("--serve-http", str(port), "--game", game) as serving:
                _wait_for(port)
                run = partial(measure_http, port, game, num_episodes)
                rates["http"].append(_measured(run, seconds, [serving.pid]))
            for isolation in ("thread", "process"):
                of_game = ("--game", game, "--isolation", isolation)
                with _Serving("--serve-nats", server.url, *of_game) as serving:
                    run = partial(measure_nats, server.url, game, num_episodes)
                    pids = [serving.pid, server.pid]
                    rates[isolation].append(_measured(run, seconds, pids))
    return rates


def _measured(
    run: Callable[[float], Coroutine[Any, Any, float]], seconds: float, pids: Sequence[int]
) -> Rate:
    """Return the steps per second of a run, with the CPU time of it all.

    One that is not measured comes first: hosts start their workers when episodes come.
    """
    uvloop.run(run(min(seconds, WARM_S)))
    started, before = time.perf_counter(), _cpu_s(pids)
    steps_per_s = uvloop.run(run(seconds))
    cores = (_cpu_s(pids) - before) / (time.perf_counter() - started)
    return Rate(steps_per_s, 1e6 * cores / steps_per_s)


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time so far of this process, of those and of their children."""
    spent_s = time.process_time()
    for pid in pids:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            if (found := cpu(one)) is not None:
                spent_s += found.loop_s + found.other_s
    return spent_s


TARGETS = {
    "nothing": ("a game that costs nothing", 6.0, 4.0),
    "gomoku": ("Gomoku, opponent one_ply", 2.5, 3.0),
}
"""What each game is called, and what is wanted of it in threads and in processes."""


def tell(game: str, rates: dict[str, list[Rate]], num_episodes: int, report: Report) -> None:
    """Print the table and the ratios of one game."""
    names = {"http": "FastAPI + uvicorn, aiohttp", "thread": "NATS", "process": "NATS, processes"}
    speeds = {way: statistics.median(one.steps_per_s for one in rates[way]) for way in names}
    costs = {way: statistics.median(one.cpu_us for one in rates[way]) for way in names}
    rows = [
        [
            name,
            f"{speeds[way]:,.0f}",
            " ".join(f"{one.steps_per_s:,.0f}" for one in rates[way]),
            f"{speeds[way] / speeds['http']:.2f}",
            f"{costs[way]:,.0f}",
        ]
        for way, name in names.items()
    ]
    columns = ["way", "steps/s", "runs", "ratio", "CPU µs/step"]
    called, in_threads, in_processes = TARGETS[game]
    report.table(f"{called}, {num_episodes} episodes at once", columns, rows)
    for way, where, target in (
        ("thread", "threads", in_threads),
        ("process", "processes", in_processes),
    ):
        ratio = speeds[way] / speeds["http"]
        report.at_least(f"{called}, in {where}, against HTTP", ratio, target)
        saved = costs["http"] / costs[way]
        report.at_least(f"{called}, in {where}, CPU time of HTTP over it", saved, None)


class _Serving:
    """A server process of this script, ended with the block."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.environment", *arguments]
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

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
    options.add_argument("--game", choices=list(GAMES), help="only this one")
    options.add_argument("--serve-nats", help=argparse.SUPPRESS)
    options.add_argument("--serve-http", type=int, help=argparse.SUPPRESS)
    options.add_argument("--isolation", default="thread", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve_nats:
        uvloop.run(serve_nats(arguments.serve_nats, arguments.game, arguments.isolation))
    elif arguments.serve_http:
        serve_http(arguments.serve_http, arguments.game)
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Compare, print and write."""
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.5, 1
    report = Report("environment", "Environment steps against HTTP", quick=arguments.quick)
    for game in [arguments.game] if arguments.game else GAMES:
        rates = compare(game, arguments.episodes, arguments.seconds, arguments.rounds)
        tell(game, rates, arguments.episodes, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
