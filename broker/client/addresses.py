"""The URL of a broker: of one server, or of several of a cluster, with commas between them.

`tls://a:4222,b:4222,c:4222`; each may repeat the scheme, and all have the same one. Whoever
connects takes any of them, and another when that is lost.
"""

from urllib.parse import SplitResult, urlsplit

SCHEMES = frozenset({"nats", "tls"})


def server_urls(url: str) -> list[str]:
    """Return the URL of each server."""
    first, *others = (part.strip() for part in url.split(","))
    scheme, mark, _ = first.rpartition("://")
    return [first, *(one if "://" in one else f"{scheme}{mark}{one}" for one in others)]


def split_servers(url: str, schemes: frozenset[str] = SCHEMES) -> list[SplitResult]:
    """Return the URL of each server in its parts; ValueError unless all of them could be one's."""
    servers = [urlsplit(one) for one in server_urls(url)]
    for server in servers:
        if server.scheme not in schemes or not server.hostname:
            raise ValueError(f"{server.netloc!r} is no server")
    if len({server.scheme for server in servers}) > 1:
        raise ValueError("some servers shall encrypt, others not")
    return servers
