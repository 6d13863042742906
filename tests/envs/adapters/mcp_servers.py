"""MCP servers of the real package, for tests: `python mcp_servers.py NAME [PORT …]`."""

import asyncio
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.streamable_http import EventMessage, EventStore


def shop() -> MCPServer:
    """Hold a basket: a server with state, a resource and a prompt."""
    server = MCPServer("shop", instructions="Buy what is asked for.")
    baskets: dict[str, list[str]] = {}

    def basket_of(context: Context[Any, Any]) -> list[str]:
        session = (context.headers or {}).get("mcp-session-id", "the only one")
        return baskets.setdefault(session, [])

    @server.tool()
    def add(item: str, context: Context[Any, Any], count: int = 1) -> str:
        """Put something into the basket."""
        basket = basket_of(context)
        basket.extend([item] * count)
        return f"{len(basket)} in the basket"

    @server.tool()
    def basket_content(context: Context[Any, Any]) -> list[str]:
        """Return what is in the basket."""
        return basket_of(context)

    @server.tool()
    def fail(reason: str) -> str:
        """Fail."""
        raise ValueError(reason)

    @server.tool()
    def repeat(text: str, times: int) -> str:
        """Repeat a text."""
        return text * times

    @server.tool(name="price.of")
    def price_of(item: str) -> int:
        """Return the price of something."""
        return len(item)

    @server.resource("shop://rules")
    def rules() -> str:
        """The rules of the shop."""
        return "One basket each."

    @server.prompt()
    def greeting(name: str) -> str:
        """Greet a customer."""
        return f"You serve {name}."

    return server


def slow() -> MCPServer:
    """Wait, and count the calls that were cancelled meanwhile."""
    server = MCPServer("slow")
    waits = [0, 0]

    @server.tool()
    async def wait() -> str:
        """Wait for an hour."""
        waits[0] += 1
        try:
            await asyncio.sleep(3600)
        finally:
            waits[1] += 1
        return "an hour has passed"

    @server.tool(name="waits")
    def count_waits() -> str:
        """Return how many waits have begun, and how many were cancelled."""
        return str(waits)

    return server


def clock() -> MCPServer:
    """Tell the time, which is always the same; `add` is a name that `shop` has, too."""
    server = MCPServer("clock")

    @server.tool()
    def now() -> str:
        """Tell the time."""
        return "noon"

    @server.tool()
    def add(hours: int) -> str:
        """Tell the time some hours later."""
        return f"{hours} past noon"

    return server


class Events(EventStore):
    """The events of all streams, numbered."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Keep an event and return its id."""
        self._events.append((stream_id, message))
        return str(len(self._events))

    async def replay_events_after(self, last_event_id: str, send_callback: Any) -> str:
        """Send what follows an event in its stream."""
        number = int(last_event_id)
        stream_id = self._events[number - 1][0]
        for place, (stream, message) in enumerate(self._events[number:], number + 1):
            if stream == stream_id and message is not None:
                await send_callback(EventMessage(message, str(place)))
        return stream_id


def lets_go() -> MCPServer:
    """Close the stream of each call before it is answered; count the calls."""
    server = MCPServer("lets-go")
    num_calls = 0

    @server.tool()
    async def count(pauses: int, context: Context[Any, Any]) -> str:
        """Return the number of calls so far, some pauses later."""
        nonlocal num_calls
        num_calls += 1
        for _ in range(pauses):
            await context.close_sse_stream()
            await asyncio.sleep(0.2)
        return f"{num_calls} calls"

    return server


def main() -> None:
    """Serve over stdio, or at a port: `NAME PORT [json] [stateless]`."""
    server = {"shop": shop, "slow": slow, "clock": clock, "lets_go": lets_go}[sys.argv[1]]()
    if len(sys.argv) > 2:
        server.run(
            "streamable-http",
            host="127.0.0.1",
            port=int(sys.argv[2]),
            json_response="json" in sys.argv,
            stateless_http="stateless" in sys.argv,
            event_store=Events() if sys.argv[1] == "lets_go" else None,
            retry_interval=50,
        )
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
