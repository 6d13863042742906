"""Environments of OpenEnv's servers: steps per second as a game, against OpenEnv's own client.

Both play 64 sessions in one event loop on the same server, in turns; then the game plays through
the runner of a host, which has a loop of its own for it, and many sessions play so on ten servers
at once. The servers and the own client run in the environment that `make test-openenv` makes, which
has the package openenv.

    python -m benchmarks.openenv_speed [--quick]
"""

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tinkermq.envs.adapters.openenv import OpenEnvGame, StartedServer, launch_package
from tinkermq.envs.running.episodes import Episodes, Opening
from tinkermq.envs.running.runners import Runner, make_runner
from tinkermq.schemas.config.job import EnvConfig

from benchmarks.report import Report, parser

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
START_S = 300.0
WAIT_S = 200.0
PATIENCE = EnvConfig(game="openenv", reset_timeout_s=START_S, step_timeout_s=START_S)


def started(number: int) -> StartedServer:
    """Return a server of OpenEnv's that does nothing."""
    variables = {"PYTHONPATH": str(ROOT)}

    def launch():
        return launch_package("benchmarks.openenv_peer:app", str(PYTHON), variables)

    return StartedServer(f"server {number}", launch, START_S)


def own_client(url: str, num_sessions: int, num_episodes: int, num_steps: int) -> float:
    """Return the steps per second of OpenEnv's own client."""
    counts = map(str, (num_sessions, num_episodes, num_steps))
    done = subprocess.run(
        [PYTHON, "-m", "benchmarks.openenv_peer", url, *counts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


class OneLoop:
    """Plays games in the event loop that runs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._episodes = Episodes(OpenEnvGame, {"url": list(urls), "wait_s": WAIT_S})
        self._episodes.probe()
        self.reset = self._episodes.reset_async
        self.step = self._episodes.step_async
        self.drop = self._episodes.drop


async def alone(urls: Sequence[str], *counts: int) -> float:
    """Return the steps per second of the game alone."""
    return await played(OneLoop(urls), *counts)


async def hosted(urls: Sequence[str], *counts: int) -> float:
    """Return the steps per second through the runner of a host."""
    kwargs = {"url": list(urls), "wait_s": WAIT_S}
    runner = make_runner(PATIENCE.model_copy(update={"kwargs": kwargs}))
    await runner.start()
    try:
        return await played(runner, *counts)
    finally:
        await runner.stop()


async def played(
    games: OneLoop | Runner, num_sessions: int, num_episodes: int, num_steps: int
) -> float:
    """Play with all sessions at once; return the steps per second."""
    begun = time.perf_counter()
    sessions = (play(games, n, num_episodes, num_steps) for n in range(num_sessions))
    await asyncio.gather(*sessions)
    return num_sessions * num_episodes * num_steps / (time.perf_counter() - begun)


async def play(games: OneLoop | Runner, session: int, num_episodes: int, num_steps: int) -> None:
    """Play some episodes, each on a session of its own."""
    for number in range(num_episodes):
        episode = f"{session}-{number}"
        await games.reset(Opening(episode, number))
        for _ in range(num_steps):
            await games.step(episode, "hello")
        games.drop(episode)


def main() -> None:
    """Parse the arguments, play, print and write."""
    arguments = parser(__doc__).parse_args()
    quick = arguments.quick
    report = Report("openenv_speed", "Environments of OpenEnv's servers", quick=quick)
    rounds, sessions, episodes, steps = (1, 8, 2, 5) if quick else (5, 64, 4, 25)
    num_servers, many = (2, 20) if quick else (10, 500)
    with contextlib.ExitStack() as ended:
        servers = [started(number) for number in range(num_servers)]
        for server in servers:
            ended.callback(server.stop)
        urls = [server.start() for server in servers]
        own: list[float] = []
        ours: list[float] = []
        through: list[float] = []
        for _ in range(rounds):
            own.append(own_client(urls[0], sessions, episodes, steps))
            ours.append(asyncio.run(alone(urls[:1], sessions, episodes, steps)))
            through.append(asyncio.run(hosted(urls[:1], sessions, episodes, steps)))
        spread = asyncio.run(hosted(urls, many, 1, steps))
    names = ("own client", "the game", "through a host's runner")
    rows = [
        [f"{name}, {sessions} sessions, one server", f"{statistics.median(rates):,.0f}"]
        for name, rates in zip(names, (own, ours, through), strict=True)
    ]
    rows.append([f"{names[2]}, {many} sessions, {num_servers} servers", f"{spread:,.0f}"])
    report.table(f"Steps per second, medians of {rounds}", ["", "steps/s"], rows)
    for name, rates, target in ((names[1], ours, 0.9), (names[2], through, None)):
        ratio = statistics.median(one / other for one, other in zip(rates, own, strict=True))
        report.at_least(f"steps/s of {name}, against the own client", ratio, target)
    report.at_least(f"{many} sessions on {num_servers} servers", spread, None, "steps/s")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
