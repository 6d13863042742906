"""Which proxy of the environment an HTTP request goes through.

`$HTTP_PROXY`, `$HTTPS_PROXY` and `$ALL_PROXY` (or in lower case) are for hosts elsewhere. This
machine is reached directly: loopback addresses, `localhost`, its host name and its own addresses.
So is what `$NO_PROXY` names: `*`, hosts and what is below them, `host:port`, addresses and networks
as 10.0.0.0/8. An error of a request through a proxy names the variable.
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_SCHEMES = {"ws": "http", "wss": "https"}


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the variable that names it."""

    variable: str
    url: str

    @property
    def shown(self) -> str:
        """The proxy in an error, without its password."""
        host = urlsplit(self.url)
        place = f"{host.hostname}:{host.port}" if host.port else host.hostname
        return f"through {place}, the proxy of ${self.variable}"


def proxy_of(url: str, environment: Mapping[str, str] | None = None) -> Proxy | None:
    """Return the proxy for requests to a URL; None: they go there directly."""
    environment = os.environ if environment is None else environment
    parts = urlsplit(url)
    scheme, host = parts.scheme.lower(), (parts.hostname or "").rstrip(".")
    kinds = (_SCHEMES.get(scheme, scheme), "all")
    names = [form for kind in kinds for form in (f"{kind}_proxy", f"{kind}_proxy".upper())]
    variable = next((name for name in names if environment.get(name)), None)
    if variable is None or is_here(host):
        return None
    excluded = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    port = parts.port or _PORTS.get(scheme, 0)
    if any(_excludes(entry.strip().lower(), host, port) for entry in excluded.split(",")):
        return None
    address = environment[variable]
    return Proxy(variable, address if "://" in address else f"http://{address}")


def is_here(host: str) -> bool:
    """Return whether a host name or address is this machine's."""
    address = _address(host)
    if address is None:
        host = host.lower()
        own = _own_name()
        return host in ("localhost", own, own.partition(".")[0]) or host.endswith(".localhost")
    return address.is_loopback or _is_own_address(str(address))


def keep_proxies_out(environment: MutableMapping[str, str]) -> None:
    """Name this machine in `$NO_PROXY`, for libraries that read the environment by themselves."""
    known = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    entries = [entry.strip() for entry in known.split(",") if entry.strip()]
    added = [name for name in ("localhost", "127.0.0.1", "::1", _own_name()) if name not in entries]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join([*entries, *added])


def _excludes(entry: str, host: str, port: int) -> bool:
    """Return whether an entry of `$NO_PROXY` names a host."""
    if entry in ("", "*"):
        return entry == "*"
    address = _address(host)
    if address is not None:
        with contextlib.suppress(ValueError):
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
    try:
        named = urlsplit(f"//{entry.removeprefix('*')}")
        if named.port is not None and named.port != port:
            return False
    except ValueError:
        return False
    name = (named.hostname or "").removeprefix(".")
    if address is not None:
        return _address(name) == address
    return bool(name) and (host.lower() == name or host.lower().endswith(f".{name}"))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


@lru_cache(maxsize=1)
def _own_name() -> str:
    return socket.gethostname().lower()


@lru_cache(maxsize=1024)
def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return probe.getsockname()[0] == address
    except OSError:
        return False
