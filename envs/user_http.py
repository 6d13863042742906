"""HTTP for users: which addresses a job's configuration may name, and clients that go nowhere else.

In a pool with users a URL of a job (rewards, judges, teachers, MCP and OpenEnv servers,
notifications) may lead to what only the pool's machines reach. Its host is resolved, each address
is checked, and the connection made to a checked one. Loopback, link-local, private and other
addresses that are not public are refused, unless the operator's `$TINKERMQ_GAME_URLS` names them.
The node sets this variable, even if empty, for the processes of a pool with users. Where it is not
set, as in a user's own process, every address may be used.
"""

import asyncio
import ipaddress
import os
import socket
import ssl
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httpcore
import httpx

from ..schemas.wire.errors import ConfigError
from .proxies import ProxiedTransport

VARIABLE = "TINKERMQ_GAME_URLS"
"""Variable with what users may reach besides public addresses, joined by commas: URLs and what is
below them, hosts, `host:port`, and networks as 10.1.0.0/16."""
_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_SHOWN = 300
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")
_IPV4_BITS = 0xFFFF_FFFF
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)
"""Bits 32 to 63 of an IPv6 address that tunnels to the IPv4 address in its last bits."""
_UNICAST = ipaddress.ip_network("2000::/3")
_SPECIAL = [ipaddress.ip_network(n) for n in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")]
"""Special purposes that this Python's `is_global` may not know."""
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressRefused(ConfigError):
    """A URL of a job leads to an address that users of this pool may not reach."""


@dataclass(frozen=True)
class Reachable:
    """What users of a pool reach besides public addresses."""

    networks: Sequence[IpNetwork] = ()
    hosts: frozenset[tuple[str, int | None]] = frozenset()
    """Hosts, with a port or all of them."""
    urls: Sequence[tuple[str, str, int, str]] = ()
    """Schemes, hosts, ports, and paths that end with a slash."""

    @classmethod
    def read(cls, text: str) -> "Reachable":
        """Read the operator's list; raises ConfigError for an entry of no known form."""
        networks: list[IpNetwork] = []
        hosts: set[tuple[str, int | None]] = set()
        urls: list[tuple[str, str, int, str]] = []
        for entry in filter(None, (part.strip() for part in text.split(","))):
            try:
                if "://" in entry:
                    parts = urlsplit(entry)
                    port = parts.port or _PORTS[parts.scheme]
                    path = f"{parts.path.rstrip('/')}/"
                    urls.append((_secure(parts.scheme), parts.hostname or "", port, path))
                elif "/" in entry:
                    networks.append(ipaddress.ip_network(entry))
                else:
                    parts = urlsplit(f"//{entry}")
                    hosts.add((parts.hostname or "", parts.port))
            except (ValueError, KeyError) as error:
                raise ConfigError(
                    f"{VARIABLE} has {entry!r:.200}, which cannot be read: {error}",
                    hint="write https://host:port/path, host, host:port or 10.1.0.0/16, joined "
                    "by commas",
                ) from error
        return cls(networks, frozenset(hosts), urls)

    def names(self, host: str, port: int) -> bool:
        """Return whether the operator names a host, by itself or in a URL."""
        host = host.strip("[]").lower()
        of_urls = ((url_host, url_port) for _, url_host, url_port, _ in self.urls)
        return not self.hosts.isdisjoint({(host, port), (host, None)}) or (host, port) in of_urls

    def allows_address(self, address: str) -> bool:
        """Return whether an address is public, or in a network that the operator names."""
        parsed = _inner(ipaddress.ip_address(address.partition("%")[0]))
        return is_public(parsed) or any(parsed in network for network in self.networks)

    def check_path(self, scheme: str, host: str, port: int, path: str) -> None:
        """Raise AddressRefused for a host of which the operator names only other URLs."""
        if not self.hosts.isdisjoint({(host, port), (host, None)}):
            return
        below = [url for url in self.urls if url[:3] == (_secure(scheme), host, port)]
        is_plain = ".." not in path and "%" not in path and "\\" not in path
        if (below or self.names(host, port)) and not any(
            is_plain and f"{path}/".startswith(url[3]) for url in below
        ):
            raise _refused(f"{scheme}://{host}:{port}{path}")

    def checked(self, host: str, port: int, addresses: Iterable[str]) -> list[str]:
        """Return the addresses of a host that may be used; AddressRefused without any."""
        known = list(addresses)
        if self.names(host, port):
            return known
        allowed = [address for address in known if self.allows_address(address)]
        if not allowed:
            raise _refused(f"{host}:{port}")
        return allowed


def reachable() -> Reachable | None:
    """Return what jobs of this process may reach; None: every address."""
    text = os.environ.get(VARIABLE)
    return None if text is None else Reachable.read(text)


def is_public(address: IpAddress) -> bool:
    """Return whether an address, or the IPv4 address in it, belongs to the public internet."""
    address = _inner(address)
    is_unicast = address.version == 4 or address in _UNICAST
    is_special = address.is_multicast or any(address in network for network in _SPECIAL)
    return address.is_global and is_unicast and not is_special


def _inner(address: IpAddress) -> IpAddress:
    """Return the IPv4 address in a mapped, translated or tunnelled one, else the address."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    is_inner = address in _NAT64 or (address in _COMPATIBLE and int(address) > 1)
    if is_inner or int(address) >> 32 & _IPV4_BITS in _ISATAP:
        return ipaddress.IPv4Address(int(address) & _IPV4_BITS)
    tunnelled = None if address.teredo is None else address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or tunnelled or address


def _secure(scheme: str) -> str:
    return {"ws": "http", "wss": "https"}.get(scheme, scheme)


def _refused(place: str) -> AddressRefused:
    return AddressRefused(
        f"{place[:_SHOWN]} leads to an address that users of this pool may not reach",
        hint=f"name a public address; the operator may name others in ${VARIABLE} of the nodes",
    )


def shown_body(text: str) -> str:
    """Return the begin of an answer for an error; in a pool with users its length only."""
    if reachable() is not None:
        return f"({len(text):,} characters, not shown in a pool with users)"
    return text[:_SHOWN]


# -- clients ---------------------------------------------------------------------------------------


def http_client(
    *,
    headers: dict[str, str] | None = None,
    timeout: float | httpx.Timeout | None = 5.0,
    limits: httpx.Limits = _LIMITS,
    verify: bool | ssl.SSLContext = True,
) -> httpx.AsyncClient:
    """Return a client for URLs of jobs, which follows no redirects.

    Proxies of the environment are not used where addresses are checked, see also `proxies`.
    """
    make = partial(httpx.AsyncClient, headers=headers, timeout=timeout, limits=limits)
    context = httpx.create_ssl_context(verify=verify)
    if (allowed := reachable()) is not None:
        return make(transport=_CheckedTransport(allowed, limits, context))
    return make(transport=ProxiedTransport(limits=limits, verify=context))


class _CheckedTransport(httpx.AsyncHTTPTransport):
    """Checks the path of each request, and the address of each connection."""

    def __init__(self, allowed: Reachable, limits: httpx.Limits, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, limits=limits)
        self._allowed = allowed
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_CheckedNetwork(allowed),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; raises AddressRefused."""
        url = request.url
        port = url.port or _PORTS.get(url.scheme, 0)
        self._allowed.check_path(url.scheme, url.host, port, url.raw_path.decode().split("?")[0])
        return await super().handle_async_request(request)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses only."""

    def __init__(self, allowed: Reachable) -> None:
        self._allowed = allowed
        self._network: Any = cast("Any", httpcore).AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that answers; raises AddressRefused."""
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in await _resolved(self._allowed, host, port):
            try:
                return await self._network.connect_tcp(
                    address,
                    port,
                    timeout=timeout,
                    local_address=local_address,
                    socket_options=socket_options,
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def sleep(self, seconds: float) -> None:
        """Wait, for httpcore's repeated attempts."""
        await asyncio.sleep(seconds)


async def _resolved(allowed: Reachable, host: str, port: int) -> list[str]:
    """Return the checked addresses of a host; raises AddressRefused, httpcore.ConnectError."""
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error
    return allowed.checked(host, port, dict.fromkeys(str(entry[4][0]) for entry in answers))


async def checked_socket(url: str, timeout_s: float) -> socket.socket | None:
    """Return a connection to the host of a URL, for a library that resolves hosts by itself.

    None where every address may be used. Raises AddressRefused, and OSError for a host that does
    not answer.
    """
    allowed, parts = reachable(), urlsplit(url)
    if allowed is None:
        return None
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    allowed.check_path(parts.scheme, host, port, parts.path)
    failure = OSError(f"{host} has no address")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        try:
            addresses = await _resolved(allowed, host, port)
        except httpcore.ConnectError as error:
            raise OSError(str(error)) from error
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.setblocking(False)
            try:
                await loop.sock_connect(connection, (address, port))
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
    raise failure


# -- a whole process -------------------------------------------------------------------------------


def guard_process(allowed: Reachable) -> None:
    """Let this process connect to checked addresses only, whatever library connects.

    Python tells of each connection before it is made. Libraries resolve a host and connect to its
    address; one that names the host itself is refused, since it would be resolved unseen. Hosts
    that the operator names are resolved through `socket.getaddrinfo`, and their addresses known.
    """
    named: set[tuple[str, int]] = set()
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        answers = resolve(host, port, *args, **kwargs)
        if allowed.names(str(host), int(port) if str(port).isdecimal() else 0):
            named.update((str(entry[4][0]), int(entry[4][1])) for entry in answers)
        return answers

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            return
        address = arguments[1]
        if not isinstance(address, tuple):
            raise _refused(repr(address))
        host, port = cast("tuple[Any, ...]", address)[:2]
        try:
            is_allowed = (host, port) in named or allowed.allows_address(str(host))
        except ValueError:
            is_allowed = False
        if not is_allowed:
            raise _refused(str(host))

    socket.getaddrinfo = getaddrinfo
    sys.addaudithook(check)
