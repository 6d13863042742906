"""httpx transports that follow the proxies of the environment (`schemas/local/proxies.py`)."""

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import httpx

from ..schemas.local.proxies import Proxy, proxy_of
from ..schemas.wire.errors import ConfigError


class ProxiedTransport(httpx.AsyncBaseTransport):
    """Sends each request directly, or through the proxy of its URL."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `httpx.AsyncHTTPTransport`."""
        self._options = options
        self._transports: dict[Proxy | None, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; an error of one through a proxy names the variable."""
        proxy = proxy_of(str(request.url))
        transport = self._transports.get(proxy)
        if transport is None:
            transport = httpx.AsyncHTTPTransport(**self._options, proxy=_usable(proxy))
            self._transports[proxy] = transport
        with _naming(proxy):
            return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.aclose()


def _usable(proxy: Proxy | None) -> httpx.Proxy | None:
    """Return a proxy for httpx; ConfigError, naming the variable, for an unusable one."""
    if proxy is None:
        return None
    try:
        if proxy.url.startswith("socks"):
            import_module("socksio")  # what httpx needs
        return httpx.Proxy(proxy.url)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the proxy of ${proxy.variable} cannot be used: {error}",
            hint="set the variable to http://HOST:PORT, or name hosts to reach without it in "
            "$NO_PROXY",
        ) from error


@contextlib.contextmanager
def _naming(proxy: Proxy | None) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        if proxy is None:
            raise
        raise type(error)(f"{error} ({proxy.shown})") from error
