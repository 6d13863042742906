"""Calls of MCP tools per second: through the game, and through the package's client alone.

A server of the real package answers over HTTP, by streams and with sessions or by JSON and without
them, and a small program over stdio. As many sessions
are open at once on both sides, each with one call after the other; whatever a turn of the policy
costs the game is in its figure: reading the call, checking its arguments, the answer.

    python -m benchmarks.mcp_speed [--sessions 64] [--seconds 8]
"""

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tinkermq.envs.adapters.mcp import McpGame
from tinkermq.envs.adapters.mcp_client import close_all

from benchmarks.report import Report, parser

GOAL = 0.9
CALL = '<tool_call>{"name": "repeat", "arguments": {"text": "What is 2 + 2?"}}</tool_call>'
ARGUMENTS = {"text": "What is 2 + 2?"}
SCRIPT = """
import json, sys
tool = {"name": "repeat", "inputSchema": {"type": "object", "required": ["text"],
        "properties": {"text": {"type": "string"}}}}
for line in sys.stdin:
    message = json.loads(line)
    method, result = message.get("method"), {"tools": [tool]}
    if "id" not in message:
        continue
    if method == "initialize":
        result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {},
                  "serverInfo": {"name": "repeat", "version": "1"}}
    elif method == "tools/call":
        text = message["params"]["arguments"]["text"]
        result = {"content": [{"type": "text", "text": text}]}
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\\n")
    sys.stdout.flush()
"""
Turn = Callable[[], Awaitable[Any]]
"""Makes one call."""


def serve(port: int, *, plain: bool) -> None:
    """Serve one tool of the real package over HTTP; plain: JSON without sessions."""
    from mcp.server import MCPServer

    server = MCPServer("repeat", log_level="ERROR")

    @server.tool()
    def repeat(text: str) -> str:
        """Return a text."""
        return text

    server.run(
        "streamable-http", host="127.0.0.1", port=port, json_response=plain, stateless_http=plain
    )


@contextlib.asynccontextmanager
async def by_game(settings: dict[str, Any], sessions: int) -> AsyncIterator[list[Turn]]:
    """Open episodes of the game."""
    games = [McpGame([settings], ["127.0.0.1"]) for _ in range(sessions)]
    try:
        for game in games:
            await game.reset(ground_truth="4")
            await game.step(CALL)  # which opens its session
        yield [lambda game=game: game.step(CALL) for game in games]
    finally:
        for game in games:
            game.close()
        await asyncio.sleep(0)
        await close_all()


@contextlib.asynccontextmanager
async def by_package(settings: dict[str, Any], sessions: int) -> AsyncIterator[list[Turn]]:
    """Open sessions of the package's client."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async with contextlib.AsyncExitStack() as stack:
        clients: list[Any] = []
        for _ in range(sessions):
            server: Any = settings.get("url")
            if server is None:
                words = StdioServerParameters(command=sys.executable, args=settings["args"])
                server = stdio_client(words)
            clients.append(await stack.enter_async_context(Client(server, mode="legacy")))
        for client in clients:
            await client.call_tool("repeat", ARGUMENTS)
        yield [lambda client=client: client.call_tool("repeat", ARGUMENTS) for client in clients]


async def rate(
    opened: contextlib.AbstractAsyncContextManager[list[Turn]], seconds: float
) -> tuple[float, float]:
    """Return calls per second, and CPU milliseconds of this process per call."""
    async with opened as turns:
        end = time.perf_counter() + seconds
        started, used = time.perf_counter(), time.process_time()

        async def go(turn: Turn) -> int:
            num_calls = 0
            while time.perf_counter() < end:
                await turn()
                num_calls += 1
            return num_calls

        num_calls = sum(await asyncio.gather(*map(go, turns)))
        took, cpu = time.perf_counter() - started, time.process_time() - used
    return num_calls / took, 1000 * cpu / num_calls


def compare(
    report: Report, name: str, settings: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Measure both, one after the other, several times; tell the best of each."""
    rates: dict[str, list[tuple[float, float]]] = {"game": [], "package": []}
    for _ in range(arguments.rounds):
        for way, open_ in (("game", by_game), ("package", by_package)):
            opened = open_(settings, arguments.sessions)
            rates[way].append(asyncio.run(rate(opened, arguments.seconds)))
    best = {way: max(found) for way, found in rates.items()}
    rows = [[way, f"{calls:,.0f}", f"{cpu:.2f}"] for way, (calls, cpu) in best.items()]
    title = f"{arguments.sessions} sessions, {name}"
    report.table(title, ["through the", "calls/s", "CPU ms per call, of the client"], rows)
    ratio = best["game"][0] / best["package"][0]
    report.at_least(f"calls over {name}, the game over the package's client", ratio, GOAL)


def main() -> None:
    """Parse the arguments; serve, or compare and print."""
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, default=64)
    options.add_argument("--seconds", type=float, default=8.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(arguments.serve, plain=arguments.plain)
        return
    if arguments.quick:
        arguments.sessions, arguments.seconds, arguments.rounds = 4, 0.5, 1
    report = Report("mcp_speed", "Calls of MCP tools", quick=arguments.quick)
    for name, words in (("HTTP, streams", []), ("HTTP, JSON without sessions", ["--plain"])):
        with _served(*words) as url:
            compare(report, name, {"name": "repeat", "url": url}, arguments)
    with TemporaryDirectory() as folder:
        script = Path(folder, "repeat.py")
        script.write_text(SCRIPT)
        Path(folder).chmod(0o755)
        over_stdio = {"command": "{python}", "args": ["-S", str(script)], "read": [folder]}
        compare(report, "stdio", {"name": "repeat", "start_timeout_s": 60, **over_stdio}, arguments)
    report.finish(arguments.json)


@contextlib.contextmanager
def _served(*words: str) -> Any:
    """Serve in a process of this script until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.mcp_speed", "--serve", str(port), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        server.terminate()


if __name__ == "__main__":
    main()
