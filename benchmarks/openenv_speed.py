"""Environments of OpenEnv's servers: steps per second as a game, against OpenEnv's own client.

Both play 64 sessions on the same server, one after the other and in turns; a step goes through what
a host plays its games with. Then many sessions play on ten servers at once. The servers and the own
client run in the environment that `make extras` makes, which has the package openenv.

    python -m benchmarks.openenv_speed [--quick]
"""

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tinkermq.envs.adapters.openenv import StartedServer, launch_package
from tinkermq.envs.running.episodes import Opening
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


async def as_a_game(
    urls: Sequence[str], num_sessions: int, num_episodes: int, num_steps: int
) -> float:
    """Return the steps per second through the game."""
    kwargs = {"url": list(urls), "wait_s": WAIT_S}
    runner = make_runner(PATIENCE.model_copy(update={"kwargs": kwargs}))
    await runner.start()
    try:
        begun = time.perf_counter()
        sessions = (play(runner, n, num_episodes, num_steps) for n in range(num_sessions))
        await asyncio.gather(*sessions)
        return num_sessions * num_episodes * num_steps / (time.perf_counter() - begun)
    finally:
        await runner.stop()


async def play(runner: Runner, session: int, num_episodes: int, num_steps: int) -> None:
    """Play some episodes, each on a session of its own."""
    for number in range(num_episodes):
        episode = f"{session}-{number}"
        await runner.reset(Opening(episode, number))
        for _ in range(num_steps):
            await runner.step(episode, "hello")
        runner.drop(episode)


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
        for _ in range(rounds):
            own.append(own_client(urls[0], sessions, episodes, steps))
            ours.append(asyncio.run(as_a_game(urls[:1], sessions, episodes, steps)))
        spread = asyncio.run(as_a_game(urls, many, 1, steps))
    rows = [
        [f"own client, {sessions} sessions, one server", f"{statistics.median(own):,.0f}"],
        [f"as a game, {sessions} sessions, one server", f"{statistics.median(ours):,.0f}"],
        [f"as a game, {many} sessions, {num_servers} servers", f"{spread:,.0f}"],
    ]
    report.table(f"Steps per second, medians of {rounds}", ["", "steps/s"], rows)
    ratio = statistics.median(one / other for one, other in zip(ours, own, strict=True))
    report.at_least("steps/s as a game, against the own client", ratio, 0.9)
    report.at_least(f"{many} sessions on {num_servers} servers", spread, None, "steps/s")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
