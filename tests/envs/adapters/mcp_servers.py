"""MCP servers of the real package, for tests: `python mcp_servers.py NAME [PORT]`."""

import sys
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context


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


def main() -> None:
    """Serve over stdio, or at a port."""
    server = {"shop": shop, "clock": clock}[sys.argv[1]]()
    if len(sys.argv) > 2:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")


if __name__ == "__main__":
    main()
